"""The folder a day leaves: recordings, tables, and a README of how they were made."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.day import Outcome
from benchmarks.gpu_day.machine import Machine
from benchmarks.gpu_day.memory import STATED_ERROR_FRAC
from fsdp2prof.files import replacing

_GIB = 1 << 30
_MADE = ("recordings", "live", "memory", "logs")


def clear(folder: Path) -> None:
    """Make the folder, without what an earlier day left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _MADE:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("summary", "recordings", "live", "memory", "overhead"):
        (folder / f"{name}.json").unlink(missing_ok=True)


def write(folder: Path, machine: Machine, backend: str, outcomes: Sequence[Outcome]) -> None:
    """Write the README and, as JSON, the summary and the tables of recordings and memory."""
    rows = {
        part: [one.row for one in outcomes if one.part == part and one.row]
        for part in ("recordings", "live", "memory", "overhead")
    }
    ended = [{name: getattr(one, name) for name in ("part", "job", "state", "detail")} for one in outcomes]
    _dump(folder / "summary.json", {"machine": asdict(machine), "backend": backend, "outcomes": ended})
    _dump(folder / "recordings.json", rows["recordings"])
    _dump(folder / "live.json", rows["live"])
    _dump(folder / "memory.json", {"stated_error_frac": STATED_ERROR_FRAC, "rows": rows["memory"]})
    _dump(folder / "overhead.json", rows["overhead"])
    (folder / "README.md").write_text(_readme(machine, backend, ended, rows))


def remove_scratch(folder: Path) -> None:
    """Remove the files of the parts of which only the tables are kept."""
    for name in ("memory", "live"):
        shutil.rmtree(folder / name, ignore_errors=True)


def pack(folder: Path) -> None:
    """Write all of the folder as one tar beside it: what there is can be taken away at any time."""
    target = folder.with_name(f"{folder.name}.tar")
    with replacing(target) as temporary, tarfile.open(temporary, "w") as tar:
        tar.add(folder, arcname=folder.name, filter=lambda one: None if "/memory/" in one.name else one)


def _dump(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _readme(
    machine: Machine, backend: str, ended: list[dict[str, str]], rows: dict[str, list[dict[str, Any]]]
) -> str:
    now = datetime.now(timezone.utc)
    devices = ", ".join(
        f"{name} ({size / _GIB:.1f} GiB)"
        for name, size in zip(machine.devices, machine.device_bytes, strict=True)
    )
    ratios = [ratio for row in rows["overhead"] for ratio in row.get("ratios", ())]
    pauses = [row["pause"] for row in rows["overhead"] if "pause" in row]
    parts = [
        "# A GPU day",
        f"Written by `make gpu` on {now:%Y-%m-%d}: Python {machine.python}, torch {machine.torch}, "
        f"CUDA {machine.cuda}, NCCL {machine.nccl}; devices: {devices or 'none, a CPU'}. Ranks: {backend}.",
        "`recordings/` holds run directories of `fsdp2prof record` (`gunzip rank-*/*.pickle.gz` before you "
        "analyse one), `logs/` the end of what every command printed.",
        _table(ended) if ended else "No job has ended yet.",
        "## Recordings",
        _table(rows["recordings"]) if rows["recordings"] else "None.",
        "## Memory: measured and estimated",
        "One rank of a large world, with a process group without peers. Peaks over three steps: of the "
        "allocator (reserved; allocated) or, on a CPU, counted by the recorder, with the cuBLAS workspaces "
        "added that only a GPU has. GiB; the error is the estimate's.",
        _table([_memory_line(row) for row in rows["memory"]]) if rows["memory"] else "None.",
        "## What recording costs",
        _table([_ratio_line(ratio) for ratio in ratios]) if ratios else "Not measured.",
        "Seconds that the training stood still while a trace was written, and what was written.",
        _table(pauses) if pauses else "Not measured.",
    ]
    return "\n\n".join(parts) + "\n"


def _memory_line(row: dict[str, Any]) -> dict[str, object]:
    line: dict[str, object] = {name: row[name] for name in ("name", "model", "layers", "world_size")}
    line["allocator"] = row["policy"]["allocator"]
    for name, error in row["error_frac"].items():
        line[f"{name} measured"] = f"{row['measured_bytes'][name] / _GIB:.3f}"
        line[f"{name} estimated"] = f"{row['estimated_bytes'][name] / _GIB:.3f}"
        line[f"{name} error"] = f"{100 * error:+.2f} %"
    return line


def _ratio_line(ratio: dict[str, Any]) -> dict[str, object]:
    numbers = {name: f"{ratio[name]:.3f}" for name in ("median", "lowest", "highest")}
    return {"ratio": ratio["ratio"], "clock": ratio["clock"], **numbers, "rounds": ratio["rounds"]}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; they have the same keys."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(str(value).replace("|", "\\|") for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
