"""CUDA allocator snapshot pickles to memory recordings, one per device, without executing anything in them.

Reads what ``torch.cuda.memory._dump_snapshot`` of torch 2.1 to 2.13 writes. The events become columns and the
stacks rows of one list; nothing of the pickle's own objects is kept.

A recording from a file: its orders, stacks, sizes and times must be such that tables can be joined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2prof.errors import SnapshotError
from fsdp2prof.readers.limits import MOST_DEVICES, too_many_labels
from fsdp2prof.readers.memory.snapshot_events import (
    EventColumns,
    StackInterner,
    build_allocations,
    build_blocks,
    build_segments,
    read_events,
)
from fsdp2prof.readers.safe_pickle import load_containers, text
from fsdp2prof.tables.allocations import MemoryRecording, OomTable, Stacks
from fsdp2prof.tables.columns import NEVER, IntArray, Strings, Table
from fsdp2prof.tables.trace import LabelTable, StepTable
from fsdp2prof.worker_processes import no_garbage_collection

_NO_TIMES = "the snapshot has no times (an old torch): phases and layers come only from stacks"
_NO_HISTORY = (
    "the snapshot has no history: it shows memory when it was written, not the peak; "
    "call torch.cuda.memory._record_memory_history() before the training"
)
_STEP = re.compile(r"ProfilerStep#\d{1,18}")


def read_snapshot(path: Path) -> list[MemoryRecording]:
    """Read a snapshot: one recording per device with a history or memory. Raises ``SnapshotError``."""
    try:
        with no_garbage_collection():
            recordings = _recordings(load_containers(path), path)
        for recording in recordings:
            check_recording(recording)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise SnapshotError(
            f"{path}: not an allocator snapshot: {type(error).__name__} {error}; "
            "write one with torch.cuda.memory._dump_snapshot"
        ) from error
    return recordings


def _recordings(snapshot: Any, path: Path) -> list[MemoryRecording]:
    if not isinstance(snapshot, dict) or "device_traces" not in snapshot or "segments" not in snapshot:
        raise SnapshotError(
            f"{path}: a pickle, but not an allocator snapshot (no device_traces and segments); "
            "write one with torch.cuda.memory._dump_snapshot"
        )
    traces, segments = snapshot["device_traces"], snapshot["segments"]
    devices = {index for index, trace in enumerate(traces) if trace}
    devices |= {int(segment.get("device", 0)) for segment in segments}
    if not devices:
        raise SnapshotError(
            f"{path}: the snapshot contains no memory and no history; "
            "call torch.cuda.memory._record_memory_history() before the training"
        )
    if len(devices) > MOST_DEVICES:
        raise SnapshotError(f"{path}: not the snapshot of one process: it has {len(devices)} devices")
    settings = _settings(snapshot.get("allocator_settings") or {})
    annotations = snapshot.get("external_annotations") or []
    return [
        _recording(
            device,
            traces[device] if device < len(traces) else [],
            [segment for segment in segments if int(segment.get("device", 0)) == device],
            [item for item in annotations if item.get("device", device) == device],
            settings,
        )
        for device in sorted(devices)
    ]


def _recording(
    device: int, trace: list[Any], segments: list[Any], annotations: list[Any], settings: dict[str, str]
) -> MemoryRecording:
    stacks = StackInterner()
    events = read_events(trace, stacks)
    blocks = build_blocks(segments, stacks)
    trace.clear()  # the columns have it all; millions of dictionaries go
    allocations, lost = build_allocations(events, blocks, segments, stacks)
    labels = _labels(annotations)
    oom = np.flatnonzero(events.action.equals("oom"))
    return MemoryRecording(
        source="cuda_snapshot",
        device=f"cuda:{device}",
        allocations=allocations,
        segments=build_segments(events, segments),
        blocks=blocks,
        labels=labels,
        steps=_steps(labels),
        stacks=stacks.table(),
        ooms=OomTable(
            order=oom,
            time_ns=events.time_ns[oom],
            requested=events.size[oom],
            device_free=events.device_free[oom],
            stream=events.stream[oom],
            stack=events.stack[oom],
            op=stacks.operators().lookup(events.stack[oom]),
        ),
        events=len(events),
        end_ns=int(events.time_ns[-1]) if len(events) else -1,
        truncated=lost > 0,
        settings=settings,
        warnings=_warnings(events),
    )


def _warnings(events: EventColumns) -> tuple[str, ...]:
    if not len(events):
        return (_NO_HISTORY,)
    return () if events.time_ns.max() >= 0 else (_NO_TIMES,)


def _settings(settings: dict[Any, Any]) -> dict[str, str]:
    """Settings as text; a table among them (rounding by size) as its entries that are not zero."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat[text(name)] = ",".join(f"{text(key)}:{int(entry)}" for key, entry in value.items() if entry)
        elif isinstance(value, (str, int, float)):
            flat[text(name)] = str(value)
        else:
            raise TypeError(f"a {type(value).__name__} as an allocator setting")
    return flat


def _labels(annotations: list[Any]) -> LabelTable:
    """Pair START and END of the annotations; one still open when the history ends lasts for ever."""
    opened: list[tuple[str, int]] = []
    rows: list[tuple[int, int, str]] = []
    for item in annotations:
        name, time_ns = text(item["name"]), int(item["time_us"]) * 1000
        if item["stage"] == "START":
            opened.append((name, time_ns))
            continue
        for position in range(len(opened) - 1, -1, -1):
            if opened[position][0] == name:
                rows.append((opened.pop(position)[1], time_ns, name))
                break
    rows += [(start, NEVER, name) for name, start in opened]
    rows.sort(key=lambda row: (row[0], -row[1]))
    return LabelTable(
        thread=np.zeros(len(rows), dtype=np.int64),
        start_ns=np.array([row[0] for row in rows], dtype=np.int64),
        end_ns=np.array([row[1] for row in rows], dtype=np.int64),
        name=Strings.intern(row[2] for row in rows),
    )


def _steps(labels: LabelTable) -> StepTable:
    """Return the profiler's steps, where the annotations have them."""
    rows = np.flatnonzero(labels.name.matches(lambda name: _STEP.fullmatch(name) is not None))
    numbers = [int(str(name).partition("#")[2]) for name in labels.name.take(rows).to_list()]
    return StepTable(
        step=np.array(numbers, dtype=np.int64), start_ns=labels.start_ns[rows], end_ns=labels.end_ns[rows]
    )


_MOST_BYTES = 1 << 60
_LATEST_NS = (1 << 63) - (1 << 60)
"""The year 2225 in Unix time: sums with it fit 64 bits."""
_LARGEST = 1 << 61
"""Of addresses, streams, threads, steps: sums with sizes fit 64 bits."""
_MOST_EVENTS_PER_ROW, _EVENTS_OF_NO_ROW = 64, 1 << 16
"""An allocation is two events; a replay spaces them out. All totals are arrays with an entry per event."""


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    """Included."""
    or_never: bool = False


def check_recording(recording: MemoryRecording) -> None:
    """Raise ``ValueError`` with the first thing in a recording that no history has."""
    tables = (recording.allocations, recording.segments, recording.blocks, recording.ooms)
    rows = sum(map(len, tables))
    if not 0 <= recording.events <= _MOST_EVENTS_PER_ROW * rows + _EVENTS_OF_NO_ROW:
        raise ValueError(f"{rows} rows have no history of {recording.events} events")
    if not -1 <= recording.end_ns <= _LATEST_NS:
        raise ValueError(f"no history ends at {recording.end_ns} ns")
    _check_stacks(recording.stacks)
    for table in (*tables, recording.labels, recording.steps):
        _check_columns(table, recording.events, len(recording.stacks))
    labels = recording.labels
    if (np.diff(labels.start_ns) < 0).any() or (labels.end_ns < labels.start_ns).any():
        raise ValueError("labels are not in order")
    if told := too_many_labels(labels):
        raise ValueError(f"not of one process: {told}")


def _check_stacks(stacks: Stacks) -> None:
    offsets = stacks.offsets
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(stacks.frames):
        raise ValueError("stacks and frames do not match")
    if (np.diff(offsets) < 0).any():
        raise ValueError("stacks and frames do not match")


def _check_columns(table: Table, events: int, stacks: int) -> None:
    for field in fields(table):  # type: ignore[arg-type]
        column = getattr(table, field.name)
        if str(field.type) != "IntArray":
            continue
        allowed = _allowed(field.name, events, stacks)
        if not _inside(column, allowed):
            name = f"{type(table).__name__}.{field.name}"
            raise ValueError(f"{name} is not within {allowed.low}..{allowed.high}")


def _allowed(column: str, events: int, stacks: int) -> _Range:
    """Return the values that a column of this name may have."""
    if column == "alloc_order":
        return _Range(-1, events - 1)
    if column.endswith("order"):
        return _Range(0, events - 1, or_never=True)
    if column == "stack":
        return _Range(-1, stacks - 1)
    if column in ("size", "requested"):
        return _Range(0, _MOST_BYTES)
    if column.endswith("_ns"):
        return _Range(-1, _LATEST_NS, or_never=True)
    return _Range(-_LARGEST, _LARGEST)


def _inside(column: IntArray, allowed: _Range) -> bool:
    ordinary = column[column != NEVER] if allowed.or_never else column
    low, high = ordinary.min(initial=allowed.high), ordinary.max(initial=allowed.low)
    return bool(allowed.low <= low and high <= allowed.high) or not len(ordinary)
