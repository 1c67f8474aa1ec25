"""Kineto's ``[memory]`` events as memory recordings, one per device that has any.

On a GPU they are the caching allocator's own calls and exact. On a CPU they are approximate: buffers that a
thread without profiler state frees (gloo's workers) never show as freed. Where an address is allocated again
the missing free is put right before it; the rest cannot be known.

The peak in the trace of the same run: which operator, kernel or collective ran then.

The two have one clock where the trace covers the peak. The recorder takes memory on steps of its own, after
the traced ones; then the same place of the last traced step stands for it: the same occurrence of (phase,
module, activity), as far into it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.memory.prepared import PreparedRecording
from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.analyzers.trace.rank_tables import RankTables, phase_labels
from fsdp2prof.labels import AUTOGRAD_NODE, parse_label
from fsdp2prof.results.memory import AtPeak
from fsdp2prof.tables.allocations import (
    AllocationTable,
    BlockTable,
    MemoryRecording,
    OomTable,
    SegmentTable,
    Stacks,
)
from fsdp2prof.tables.columns import NEVER, IntArray, Strings
from fsdp2prof.tables.trace import LabelTable, MemoryEventTable, PhaseTable, Trace
from fsdp2prof.vocabulary import layer_name

_HOST = -1


def kineto_recordings(trace: Trace) -> list[MemoryRecording]:
    """Return the recordings of every device in a trace, devices before the host; empty without events."""
    devices = np.unique(trace.memory.device).tolist()
    labels = _labels(trace)
    return [
        _recording(trace, trace.memory.take(trace.memory.device == device), int(device), labels)
        for device in sorted(devices, key=lambda device: (device == _HOST, device))
    ]


def _recording(trace: Trace, events: MemoryEventTable, device: int, labels: LabelTable) -> MemoryRecording:
    allocations, repaired = _allocations(trace, events)
    warnings = []
    if device == _HOST:
        warnings.append(
            f"{trace.source}: Kineto's CPU memory events are approximate: frees on other threads are missing "
            f"({repaired} restored where an address was reused); fsdp2prof record counts exactly"
        )
    return MemoryRecording(
        source="kineto",
        device="cpu" if device == _HOST else f"{trace.device.type}:{device}",
        allocations=allocations,
        segments=_segments(events),
        blocks=BlockTable.empty(),
        labels=labels,
        steps=host_steps(trace.labels),
        stacks=Stacks.empty(),
        ooms=OomTable.empty(),
        events=len(events),
        end_ns=int(events.time_ns[-1]),
        truncated=False,
        settings={},
        warnings=tuple(warnings),
    )


def _allocations(trace: Trace, events: MemoryEventTable) -> tuple[AllocationTable, int]:
    """Pair allocations with frees by address; return the table and the number of frees that were missing."""
    order = np.lexsort((np.arange(len(events)), events.address))
    same = np.append(events.address[order][1:] == events.address[order][:-1], False)[: len(order)]
    following = np.append(order[1:], NEVER)[: len(order)]
    preceding = np.concatenate([[-1], order[:-1]])[: len(order)]
    after_same = np.concatenate([[False], same[:-1]])[: len(order)]
    born = events.bytes[order] > 0
    freed = np.where(same, following, NEVER)
    missing = born & same & (np.append(events.bytes, 0)[np.minimum(freed, len(events))] > 0)
    # A free whose address was not allocated in sight: that memory was there before.
    orphan = ~born & ~(after_same & (events.bytes[preceding] > 0))
    old, new = np.sort(order[orphan]), order[born]
    by_order = np.argsort(new)
    new, new_freed = new[by_order], freed[born][by_order]
    before = int(events.allocated_bytes[0] - events.bytes[0]) if events.allocated_bytes[0] >= 0 else 0
    rest = before + int(events.bytes[old].sum())  # alive before and never freed in sight: one block
    unknown = np.array([rest] if rest > 0 else [], dtype=np.int64)
    none = np.full(len(unknown), -1, dtype=np.int64)
    free_order = np.concatenate([np.full(len(unknown), NEVER), old, new_freed])
    rows = len(free_order)
    early = rows - len(new)
    return AllocationTable(
        alloc_order=np.concatenate([np.full(early, -1), new]),
        free_order=free_order,
        alloc_ns=np.concatenate([np.full(early, -1), events.time_ns[new]]),
        free_ns=np.append(events.time_ns, NEVER)[np.minimum(free_order, len(events))],
        size=np.concatenate([unknown, -events.bytes[old], events.bytes[new]]),
        address=np.concatenate([none, events.address[old], events.address[new]]),
        stream=np.zeros(rows, dtype=np.int64),
        pool=Strings.full(rows, None),
        step=np.full(rows, -1, dtype=np.int64),
        phase=Strings.full(rows, "other"),
        fqn=Strings.full(rows, None),
        activity=Strings.full(rows, None),
        category=Strings.full(rows, "unattributed"),
        op=trace.events.name.lookup(
            np.concatenate(
                [np.full(early, -1), innermost_operators(trace, events.thread[new], events.time_ns[new])]
            )
        ),
        stack=np.full(rows, -1, dtype=np.int64),
        tag=Strings.full(rows, None),
        release_order=free_order,
    ), int(missing.sum())


def innermost_operators(trace: Trace, thread: IntArray, time_ns: IntArray) -> IntArray:
    """Row of the innermost operator that runs on each thread at each time; -1 if none does.

    Operators of a thread nest and are sorted by start: the last one that began and has not ended.
    """
    found = np.full(len(time_ns), -1, dtype=np.int64)
    operator = trace.events.category.equals("cpu_op")
    for one in np.unique(thread).tolist():
        rows = np.flatnonzero(operator & (trace.events.thread == one))
        if not len(rows):
            continue
        start, end = trace.events.start_ns[rows], trace.events.end_ns[rows]
        mine = np.flatnonzero(thread == one)
        candidate = np.searchsorted(start, time_ns[mine], side="right") - 1
        parent = _parents(start, end)
        while (over := (candidate >= 0) & (end[candidate] <= time_ns[mine])).any():
            candidate = np.where(over, parent[candidate], candidate)
        found[mine] = np.where(candidate >= 0, rows[candidate], -1)
    return found


def _parents(start: IntArray, end: IntArray) -> IntArray:
    """Row of the interval around each of the nested intervals, which are sorted by start; -1 outermost."""
    parent = np.full(len(start), -1, dtype=np.int64)
    open_rows: list[int] = []
    for row, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_rows and end[open_rows[-1]] < stop and end[open_rows[-1]] <= begin:
            open_rows.pop()
        if open_rows:
            parent[row] = open_rows[-1]
        open_rows.append(row)
    return parent


def _segments(events: MemoryEventTable) -> SegmentTable:
    """Return the ranges that follow from the reserved totals: one for every rise; falls free the latest
    first."""
    reserved = events.reserved_bytes
    if not len(reserved) or reserved.max(initial=0) <= 0:
        return SegmentTable.empty()
    ranges: list[tuple[int, int, int]] = []
    held: list[tuple[int, int]] = [(-1, int(reserved[0]))]
    change = np.diff(reserved)
    for order in (np.flatnonzero(change) + 1).tolist():
        delta = int(change[order - 1])
        if delta > 0:
            held.append((order, delta))
        while delta < 0:
            born, size = held.pop()
            part = min(size, -delta)
            ranges.append((born, order, part))
            delta += part
            if part < size:
                held.append((born, size - part))
    ranges += [(born, NEVER, size) for born, size in held if size]
    ranges.sort()
    alloc = np.array([born for born, _, _ in ranges], dtype=np.int64)
    return SegmentTable(
        alloc_order=alloc,
        free_order=np.array([freed for _, freed, _ in ranges], dtype=np.int64),
        alloc_ns=np.append(events.time_ns, -1)[alloc],
        size=np.array([size for _, _, size in ranges], dtype=np.int64),
        address=np.full(len(ranges), -1, dtype=np.int64),
        stream=np.zeros(len(ranges), dtype=np.int64),
        pool=Strings.full(len(ranges), None),
        expandable=np.zeros(len(ranges), dtype=np.bool_),
    )


def _labels(trace: Trace) -> LabelTable:
    """Return the labels that give phases, of all threads as those of one.

    Only one thread of a training loop works at a time: the loop's own waits while autograd's runs.
    """
    labels = phase_labels(trace)
    labels = labels.take(
        labels.name.matches(lambda name: name.startswith(AUTOGRAD_NODE) or parse_label(name) is not None)
    )
    labels = labels.with_columns(thread=np.zeros(len(labels), dtype=np.int64))
    return labels.take(np.lexsort((-labels.end_ns, labels.start_ns)))


def find_peak(view: PreparedRecording, tables: RankTables) -> AtPeak | None:
    """Look the peak of a recording up in its rank's trace; ``None`` if the trace has no such place."""
    time_ns, events = int(view.times[view.peak_order]), tables.trace.events
    if time_ns < 0 or not len(events):
        return None
    base = 0 if view.recording.source == "kineto" else tables.trace.base_time_ns
    if int(events.start_ns[0]) <= time_ns - base < int(events.end_ns.max()):
        return _at(tables, time_ns - base, "clock")
    place = _same_place(view, tables.phases, time_ns)
    return None if place is None else _at(tables, place, "place")


def _same_place(view: PreparedRecording, traced: PhaseTable, time_ns: int) -> int | None:
    """Return the time of the last traced step that corresponds to an instant of the recording."""
    row = int(intervals.containing(view.phases.start_ns, view.phases.end_ns, np.array([time_ns]))[0])
    steps = traced.step[traced.step >= 0]
    if row < 0 or not len(steps):
        return None
    here, there = _alike(view.phases, view.phases, row), _alike(traced, view.phases, row)
    here = here[view.phases.step[here] == view.phases.step[row]]
    there = there[traced.step[there] == steps.max()]
    nth = int(np.searchsorted(here, row))
    if nth >= len(there):
        return None
    other = int(there[np.argsort(traced.start_ns[there], kind="stable")[nth]])
    start, end = int(view.phases.start_ns[row]), int(view.phases.end_ns[row])
    length = int(traced.end_ns[other] - traced.start_ns[other])
    return int(traced.start_ns[other]) + (time_ns - start) * length // (end - start)


def _alike(phases: PhaseTable, like: PhaseTable, row: int) -> IntArray:
    """Rows of a table with the phase, module and activity of a row of another."""
    same = phases.phase.equals(like.phase[row]) & phases.fqn.equals(like.fqn[row])
    return np.flatnonzero(same & phases.activity.equals(like.activity[row]))


def _at(tables: RankTables, time_ns: int, match: Literal["clock", "place"]) -> AtPeak:
    trace, device, phases = tables.trace, tables.device, tables.phases
    row = np.flatnonzero((phases.start_ns <= time_ns) & (time_ns < phases.end_ns))
    threads = phases.thread[row] if len(row) else np.array([0], dtype=np.int64)
    operator = innermost_operators(trace, threads, np.full(len(threads), time_ns))
    operator = operator[operator >= 0]
    launched = np.flatnonzero((device.launch_ns >= 0) & (device.launch_ns <= time_ns))
    busy = device.event[(device.start_ns <= time_ns) & (time_ns < device.end_ns)]
    table = tables.collectives.table
    in_flight = np.flatnonzero((table.start_ns <= time_ns) & (time_ns < table.end_ns))
    kernels = [str(trace.events.name[int(event)]) for event in busy]
    collectives = [_collective(str(table.op[int(one)]), table.fqn[int(one)]) for one in in_flight]
    step = int(intervals.containing(tables.steps.start_ns, tables.steps.end_ns, np.array([time_ns]))[0])
    return AtPeak(
        match=match,
        step=int(tables.steps.step[step]) if step >= 0 else None,
        operator=trace.events.name[int(operator[0])] if len(operator) else None,
        launched=(
            trace.events.name[int(device.event[launched[np.argmax(device.launch_ns[launched])]])]
            if len(launched)
            else None
        ),
        running=[*kernels, *collectives],
    )


def _collective(op: str, fqn: str | None) -> str:
    return op if fqn is None else f"{op} {layer_name(fqn)}"
