"""Recordings as they can be kept and shared: small, and without the machine's own names."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def without_paths(text: str) -> str:
    """Replace this checkout and this Python's folder by ``.`` and ``python``."""
    return text.replace(str(REPOSITORY), ".").replace(sys.prefix, "python")


def pack(folder: Path) -> None:
    """Take host and paths out of a run directory, and compress its snapshots as ``*.pickle.gz``."""
    for path in folder.glob("**/*.json"):
        document = json.loads(without_paths(path.read_text()))
        if "host" in document:
            document["host"] = "host"
        if "hosts" in document:
            document["hosts"] = ["host"]
        path.write_text(json.dumps(document))
    for path in folder.glob("rank-*/*.txt"):
        path.write_text(without_paths(path.read_text()))
    for path in folder.glob("flight-recorder/*"):
        path.write_bytes(pickle.dumps(_cleaned(pickle.loads(path.read_bytes()))))
    for path in folder.glob("rank-*/trace.json.gz"):
        with gzip.open(path, "rt") as source:
            text = without_paths(source.read())
        with gzip.open(path, "wt") as target:
            target.write(text)
    for path in folder.glob("rank-*/*.pickle"):
        with path.open("rb") as source:
            snapshot = pickle.load(source)  # the recorder's own, of a moment ago
        for frame in _frames(snapshot):
            frame["filename"] = without_paths(frame["filename"])
        with gzip.open(f"{path}.gz", "wb") as target:
            pickle.dump(snapshot, target, protocol=pickle.HIGHEST_PROTOCOL)
        path.unlink()


def _cleaned(value: Any) -> Any:
    """Take paths out of every text in builtin containers."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(one) for key, one in value.items()}
    return type(value)(map(_cleaned, value)) if isinstance(value, list | tuple) else value


def _frames(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every stack frame of a CUDA snapshot; one that several stacks share, several times."""
    for trace in snapshot["device_traces"]:
        for entry in trace:
            yield from entry.get("frames", ())
    for segment in snapshot["segments"]:
        yield from segment.get("frames", ())
        for block in segment["blocks"]:
            yield from block.get("frames", ())
            for history in block.get("history", ()):
                yield from history.get("frames", ())
