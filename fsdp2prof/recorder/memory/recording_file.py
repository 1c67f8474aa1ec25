"""A memory recording to its file, ``memory.npz``, which :mod:`fsdp2prof.readers.memory.recording` reads."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.files import replacing
from fsdp2prof.readers.memory.recording import (
    HEADER,
    RECORDING_SCHEMA,
    RECORDING_TABLES,
    RecordingHeader,
)
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import Strings


def write_recording(path: Path, recording: MemoryRecording) -> None:
    """Write a recording to ``path`` (``memory.npz``); the file appears complete or not at all."""
    arrays: dict[str, Any] = {}
    strings: dict[str, list[str]] = {}
    for name, kind in RECORDING_TABLES.items():
        table = getattr(recording, name)
        for field in fields(kind):  # type: ignore[arg-type]
            _put(arrays, strings, f"{name}.{field.name}", getattr(table, field.name))
    _put(arrays, strings, "stacks.offsets", recording.stacks.offsets)
    _put(arrays, strings, "stacks.frames", recording.stacks.frames)
    header = RecordingHeader(
        schema=RECORDING_SCHEMA,
        source=recording.source,
        device=recording.device,
        events=recording.events,
        end_ns=recording.end_ns,
        truncated=recording.truncated,
        settings=recording.settings,
        warnings=list(recording.warnings),
        strings=strings,
    )
    arrays[HEADER] = np.frombuffer(msgspec.json.encode(header), dtype=np.uint8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _put(arrays: dict[str, Any], strings: dict[str, list[str]], name: str, column: Any) -> None:
    if isinstance(column, Strings):
        strings[name] = list(column.values)
        column = column.codes
    arrays[name] = column
