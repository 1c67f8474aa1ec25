"""Flight Recorder dumps made by hand, as NCCL's look: named groups, states, coalesced names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2prof.readers.job.flight_recorder import read_dump
from fsdp2prof.tables.flight_recorder import FlightDump

Call = Mapping[str, Any]


def call(op: str, numel: int, seq: int, *, group: str = "0", state: str = "completed", **more: Any) -> Call:
    """One entry of a dump, issued at nanosecond ``seq``."""
    return {
        "record_id": seq - 1,
        "process_group": [group, f"group {group}"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[numel]],
        "output_sizes": [[numel]],
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed",
        "time_created_ns": seq,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def document(calls: Sequence[Call], groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A whole dump."""
    config = {
        name: {"name": name, "desc": f"group {name}", "ranks": str(list(r))} for name, r in groups.items()
    }
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(calls)}


def write(folder: Path, by_rank: Mapping[int, Sequence[Call]], groups: Mapping[str, Sequence[int]]) -> Path:
    """Write a dump a rank as JSON."""
    for rank, calls in by_rank.items():
        (folder / f"fr_{rank}.json").write_text(json.dumps(document(calls, groups)))
    return folder


def read(folder: Path, *ranks: int) -> list[FlightDump]:
    return [read_dump(folder / f"fr_{rank}.json", rank) for rank in ranks]


def two_ranks_that_differ() -> list[FlightDump]:
    """Rank 1 reduces where rank 0 gathers, and both wait."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        calls = {
            rank: [call(op, 8, 1, state="started")]
            for rank, op in enumerate(("_all_gather_base", "all_reduce"))
        }
        return read(write(Path(name), calls, {"0": [0, 1]}), 0, 1)
