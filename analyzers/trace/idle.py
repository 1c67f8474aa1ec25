"""Why nothing ran: every idle nanosecond of a step with its cause, and the host's waits for its device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.launches import runtime_calls
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.steps import mean
from fsdp2prof.analyzers.trace.rank_tables import Lines, RankTables
from fsdp2prof.analyzers.trace.spans import loading
from fsdp2prof.by_key import grouped
from fsdp2prof.results.trace import HostSyncPlace, HostSyncRow
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import EventTable, PhaseTable, StepTable, Trace


def idle_causes(tables: RankTables) -> list[dict[str, int]]:
    """Return, per window, cause -> idle time; the causes of a window sum to its ``idle``.

    On a device, a gap ends when the next activity starts. From that activity's launch on, the gap is
    ``queued`` (launch latency, or an order that a stream enforces). Before it, nothing was left to run:
    ``profiler`` while the profiler itself was at work or between two steps; else, if the host stood in a call
    when the device ran dry, or has not been ahead of the compute since such a call drained the device,
    ``device_sync`` (a synchronisation) or ``memcpy`` (a copy that blocks); else ``data_loader`` while the
    training got its next batch, and ``host_bound``. If the launch is not in the file, ``unknown``.

    On a host-only trace, time in which a caller was blocked by a collective whose transfer did not run is
    ``communication``, the rest ``data_loader`` or ``host_bound``: dispatch, Python.
    """
    windows = tables.windows
    per_window = {
        cause: intervals.covered(part, windows.start_ns, windows.end_ns)
        for cause, part in idle_parts(tables).items()
    }
    return [
        {cause: int(time[window]) for cause, time in per_window.items() if time[window]}
        for window in range(len(windows))
    ]


def idle_parts(tables: RankTables) -> dict[str, Intervals]:
    """Return cause -> the idle instants that it explains: disjoint, and together all idle time."""
    idle = tables.parts.idle
    parts = _device_parts(tables, idle) if len(tables.device) else _host_parts(tables, idle)
    batches = loading(tables.trace, tables.phases)
    parts["data_loader"] = intervals.intersect(parts["host_bound"], batches)
    parts["host_bound"] = intervals.subtract(parts["host_bound"], batches)
    return parts


def _device_parts(tables: RankTables, idle: Intervals) -> dict[str, Intervals]:
    device, windows = tables.device, tables.windows
    # A gap over a window's edge would count with the wrong launch: windows begin with an activity.
    _, start, end = intervals.cut(idle.start, idle.end, windows.start_ns)
    launch = np.append(device.launch_ns, -1)[np.searchsorted(device.start_ns, end, side="left")]
    known = launch >= 0
    empty_until = np.clip(launch, start, end)
    profiler = intervals.intersect(intervals.union(start[known], empty_until[known]), _profiler(tables))
    parts = {
        "profiler": profiler,
        "queued": intervals.union(empty_until[known], end[known]),
        "unknown": intervals.union(start[~known], end[~known]),
    }
    calls = {"device_sync": backends.waits_for_device, "memcpy": backends.may_block_for_copy}
    begin, queue = start, _queue(tables)
    for cause, is_meant in calls.items():
        blocked = host_calls(tables, is_meant)
        inside = intervals.containing(blocked.start, blocked.end, begin) >= 0
        until = np.where(inside, empty_until, begin + _refilling(queue, blocked, begin, empty_until, launch))
        until = np.where(known, until, begin)
        parts[cause] = intervals.subtract(intervals.union(begin, until), profiler)
        begin = until
    whole = intervals.union(begin[known], empty_until[known])
    parts["host_bound"] = intervals.subtract(whole, profiler)
    return parts


@dataclass(frozen=True, slots=True)
class _Queue:
    """How far the host was ahead of the device."""

    launched: IntArray
    """Launch times in order."""
    reach: IntArray
    """When what was launched before each of them, and at last everything, had run; -1: nothing was."""
    ahead: IntArray
    """Launches of compute while earlier compute still ran, in order."""


def _queue(tables: RankTables) -> _Queue:
    device, work = tables.device, tables.work
    by_launch = np.argsort(device.launch_ns, kind="stable")
    compute = np.flatnonzero(~work.is_fsdp & ~work.is_memcpy & (work.launch_ns >= 0))
    running = np.maximum.accumulate(work.end_ns[compute[:-1]])
    launch = work.launch_ns[compute[1:]]
    return _Queue(
        launched=device.launch_ns[by_launch],
        reach=np.concatenate([[-1], np.maximum.accumulate(device.end_ns[by_launch])]),
        ahead=np.sort(launch[launch < running], kind="stable"),
    )


def _refilling(
    queue: _Queue, blocked: Intervals, start: IntArray, end: IntArray, launch: IntArray
) -> IntArray:
    """Return how much of each gap is owed to a call before it that drained the device.

    A call drains if work ran when it began and nothing launched before its end ran beyond that. It cost the
    host the lead it had, so at most that much idle time is owed to it, and only until compute is launched
    while earlier compute still runs: then the host is ahead again.
    """
    reach = queue.reach
    lead = reach[np.searchsorted(queue.launched, blocked.start)] - blocked.start
    drains = (lead > 0) & (reach[np.searchsorted(queue.launched, blocked.end)] <= blocked.end)
    drained, lead = blocked.end[drains], lead[drains]
    if not len(drained):
        return np.zeros(len(start), dtype=np.int64)
    last = np.searchsorted(drained, launch, side="right") - 1
    behind = (
        np.searchsorted(queue.ahead, start, side="right")
        == np.searchsorted(queue.ahead, drained, side="right")[last]
    )
    owing = np.flatnonzero(behind & (last >= 0) & (start < end))
    last, length = last[owing], end[owing] - start[owing]
    order = np.argsort(last, kind="stable")
    before = np.cumsum(length[order]) - length[order]
    spent = np.empty(len(length), dtype=np.int64)
    spent[order] = before - before[np.searchsorted(last[order], last[order], side="left")]
    owed = np.zeros(len(start), dtype=np.int64)
    owed[owing] = np.clip(lead[last] - spent, 0, length)
    return owed


def _host_parts(tables: RankTables, idle: Intervals) -> dict[str, Intervals]:
    table, waits = tables.collectives.table, tables.waits
    blocked = waits.stall_ns > 0
    until = np.where(waits.resumed_ns >= 0, waits.resumed_ns, table.end_ns)
    waiting = intervals.union(table.issue_ns[blocked], until[blocked])
    return {
        "communication": intervals.intersect(idle, waiting),
        "host_bound": intervals.subtract(idle, waiting),
    }


def host_calls(tables: RankTables, is_meant: Callable[[str], bool]) -> Intervals:
    """When the host stood in a runtime call of some names."""
    events = tables.trace.events
    calls = runtime_calls(events)
    rows = calls[events.name.take(calls).matches(is_meant)]
    return intervals.union(events.start_ns[rows], events.end_ns[rows])


def _profiler(tables: RankTables) -> Intervals:
    """When the profiler was at work: its own overhead events, and the time between two steps."""
    events, steps = tables.trace.events, tables.steps
    overhead = events.category.equals("overhead")
    between: tuple[IntArray, IntArray] = (steps.end_ns[:-1], steps.start_ns[1:])
    return intervals.union(
        np.concatenate([events.start_ns[overhead], between[0]]),
        np.concatenate([events.end_ns[overhead], between[1]]),
    )


_NESTED = 64
"""Operators that begin before a call, of which one is taken for the innermost around it."""
_INNER = {"aten::_local_scalar_dense": "aten::item"}
"""Operators that people know by the name of their caller."""


def host_syncs(
    trace: Trace, phases: PhaseTable, steps: StepTable, rank: int, lines: Lines
) -> list[HostSyncRow]:
    """Return the synchronising calls inside the steps (in host time), the longest blocked first."""
    events = trace.events
    calls = np.flatnonzero(events.name.matches(backends.always_blocks))
    calls = calls[events.thread[calls] >= 0]
    inside = intervals.containing(steps.start_ns, steps.end_ns, events.start_ns[calls]) >= 0
    calls = calls[inside]
    row = find_rows(phases, events.thread[calls], events.start_ns[calls])
    operator = events.name.lookup(_operators(trace, calls))
    fqn, phase = phases.fqn.lookup(row), phases.phase.lookup(row)
    found: dict[tuple[str | None, ...], list[int]] = defaultdict(lambda: [0, 0])
    blocked = events.end_ns[calls] - events.start_ns[calls]
    sites: dict[tuple[str | None, ...], Counter[str]] = defaultdict(Counter)
    seen = lines.seen(events.start_ns[calls], events.end_ns[calls])
    keys = zip(*(column.to_list() for column in (fqn, phase, events.name.take(calls), operator)), strict=True)
    for key, duration, line in zip(keys, blocked.tolist(), seen, strict=True):
        sites[key].update({line: duration} if line else {})
        total = found[key]
        total[0] += 1
        total[1] += duration
    rows = [
        HostSyncRow(
            rank=rank,
            fqn=layer,
            phase=when or "other",
            call=call or "",
            operator=_INNER.get(name or "", name),
            count=count,
            blocked_ns=duration,
            site=next((line for line, _ in sites[layer, when, call, name].most_common(1)), None),
        )
        for (layer, when, call, name), (count, duration) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.blocked_ns)


def host_sync_places(rows: Sequence[HostSyncRow], windows: int) -> list[HostSyncPlace]:
    """Sum up synchronising calls of all ranks over ``windows`` step windows; the longest blocked first."""
    places = grouped(((row.fqn, row.phase, row.call, row.operator), row) for row in rows)
    summed = [
        HostSyncPlace(
            fqn=fqn,
            phase=phase,
            call=call,
            operator=operator,
            count=mean(sum(row.count for row in same), windows),
            blocked_ns=mean(sum(row.blocked_ns for row in same), windows),
        )
        for (fqn, phase, call, operator), same in places.items()
    ]
    return sorted(summed, key=lambda place: -place.blocked_ns)


def _operators(trace: Trace, calls: IntArray) -> IntArray:
    """Return the event row of the operator that made each call, by the id that the call carries, otherwise
    the innermost one around it; -1 if none."""
    events = trace.events
    operators = np.flatnonzero(events.category.equals("cpu_op"))
    numbered = operators[events.external_id[operators] >= 0]
    numbered = numbered[np.argsort(events.external_id[numbered], kind="stable")]
    found = np.full(len(calls), -1, dtype=np.int64)
    if len(numbered):
        ids = events.external_id[numbered]
        at = np.minimum(np.searchsorted(ids, events.external_id[calls]), len(ids) - 1)
        named = numbered[at]
        encloses = (
            (ids[at] == events.external_id[calls])
            & (events.thread[named] == events.thread[calls])
            & (events.start_ns[named] <= events.start_ns[calls])
            & (events.end_ns[named] >= events.end_ns[calls])
        )
        found = np.where(encloses, named, found)
    unnamed = np.flatnonzero(found < 0)
    found[unnamed] = _around(events, operators, calls[unnamed])
    return found


def _around(events: EventTable, operators: IntArray, calls: IntArray) -> IntArray:
    """Return the innermost operator of its thread around each call: of those that nest, the last to begin."""
    found = np.full(len(calls), -1, dtype=np.int64)
    for thread in intervals.distinct(events.thread[calls]):
        mine = operators[events.thread[operators] == thread]
        ends = events.end_ns[mine]
        rows = np.flatnonzero(events.thread[calls] == thread)
        before = np.searchsorted(events.start_ns[mine], events.start_ns[calls[rows]], side="right")
        for row, last in zip(rows.tolist(), before.tolist(), strict=True):
            first = max(0, last - _NESTED)
            around = np.flatnonzero(ends[first:last] >= events.end_ns[calls[row]])
            if len(around):
                found[row] = mine[first + int(around[-1])]
    return found
