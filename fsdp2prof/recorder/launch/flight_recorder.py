"""Environment variables of torch's Flight Recorder, which keeps the last collectives of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fsdp2prof.run_directory import FLIGHT_RECORDER_FOLDER

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 8))
"""Entries of the Flight Recorder's buffer: the name, the older one, the first torch that knows the new."""
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 9))
"""Where NCCL's watchdog writes its dump, to which torch adds the rank."""
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", (2, 2))
_KEPT = "2000"


def buffer_variables(environment: Mapping[str, str], run: Path, torch: str) -> dict[str, str]:
    """Return the variables that switch the Flight Recorder on, and let NCCL's watchdog dump it into the
    run.

    The user's own settings stay. ``torch`` is the version that trains: newer ones warn of old names.
    """
    variables = {}
    file = str(run.resolve() / FLIGHT_RECORDER_FOLDER / "nccl_trace_rank_")
    for (new, old, since), value in ((_SIZE, _KEPT), (_FILE, file), (_ON_TIMEOUT, "1")):
        if new not in environment and old not in environment:
            variables[new if _minor(torch) >= since else old] = value
    return variables


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
