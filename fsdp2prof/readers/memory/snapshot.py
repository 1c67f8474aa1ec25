"""CUDA allocator snapshot pickles to memory recordings, one per device, without executing anything in them.

Reads what ``torch.cuda.memory._dump_snapshot`` of torch 2.1 to 2.13 writes. The events become columns and the
stacks rows of one list; nothing of the pickle's own objects is kept.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2prof.errors import SnapshotError
from fsdp2prof.readers.limits import MOST_DEVICES
from fsdp2prof.readers.memory.recording_checks import check_recording
from fsdp2prof.readers.memory.snapshot_events import (
    EventColumns,
    StackInterner,
    build_allocations,
    build_blocks,
    build_segments,
    read_events,
)
from fsdp2prof.readers.safe_pickle import load_containers, text
from fsdp2prof.tables import NEVER, LabelTable, MemoryRecording, OomTable, StepTable, Strings

_NO_TIMES = "the snapshot has no times (an old torch): phases and layers come from stacks alone"
_NO_HISTORY = (
    "the snapshot has no history: it shows the moment of writing, not the peak; "
    "call torch.cuda.memory._record_memory_history() before the training"
)
_STEP = re.compile(r"ProfilerStep#\d{1,18}")


def read_snapshot(path: Path) -> list[MemoryRecording]:
    """Read a snapshot: one recording per device with a history or memory. Raises ``SnapshotError``."""
    try:
        with _no_garbage_collection():
            recordings = _recordings(load_containers(path), path)
        for recording in recordings:
            check_recording(recording)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise SnapshotError(
            f"{path}: not an allocator snapshot: {type(error).__name__} {error}; "
            "write one with torch.cuda.memory._dump_snapshot"
        ) from error
    return recordings


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking millions of young containers again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
            f"{path}: the snapshot holds no memory and no history; "
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
