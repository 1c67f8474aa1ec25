"""Device activities and the host calls that launched them: the bridge from streams to phases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.results.step import IncompleteStep
from fsdp2prof.tables.columns import BoolArray, CompactArray, IntArray, Strings, Table
from fsdp2prof.tables.trace import EventTable, StepTable, Trace

_MOST_MISSING = 0.01
"""Share of a step's launches, or a rank's, that may have no record: their numbers are right to that share."""
_MOST_LAST = 0.05
"""The same of one step of a rank whose last launches have none: steps differ by as much of themselves."""
_MOST_OVERLAPPING = 0.01
"""Share of a stream's busy time that may be counted twice: kernels launched programmatically begin a little
before the one in front of them ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTable(Table):
    """Activities of the rank's device, sorted by ``start_ns``."""

    event: IntArray
    """Row in the trace's :class:`~fsdp2prof.tables.EventTable`."""
    start_ns: IntArray
    end_ns: IntArray
    stream: CompactArray
    is_copy: BoolArray
    """A memory copy, by kernel or by copy engine."""
    is_set: BoolArray
    """A memory set."""
    launch_ns: IntArray
    """Host time at which its launch began; -1 when the launch is not in the file."""
    thread: CompactArray
    """Thread of its launch; -1 unknown."""
    in_graph: BoolArray
    """Launched by the one call that launched its whole graph."""


def device_activities(trace: Trace) -> DeviceTable:
    """Return the activities of the trace's device, joined to their launches by correlation id.

    A graph's kernels share the one call that launched the graph. Activities without a launch in the file
    (queued before recording began) have launch time and thread -1.
    """
    events = trace.events
    on_device = events.category.matches(backends.is_work)
    if trace.device.index is not None:
        on_device &= events.device == trace.device.index
    event = np.flatnonzero(on_device)
    launch = host_launches(events, event)
    graph = events.name.lookup(launch).matches(backends.launches_graph)
    return DeviceTable(
        event=event,
        start_ns=events.start_ns[event],
        end_ns=events.end_ns[event],
        stream=events.stream[event],
        is_copy=events.category.matches(backends.is_copy)[event],
        is_set=events.category.matches(backends.is_fill)[event],
        launch_ns=np.where(launch >= 0, events.start_ns[launch], -1),
        thread=np.where(launch >= 0, events.thread[launch], -1),
        in_graph=graph,
    )


def runtime_calls(events: EventTable) -> IntArray:
    """Return the event rows of the host's calls into the device's runtime and driver."""
    return np.flatnonzero(events.category.matches(backends.is_call))


def host_launches(events: EventTable, rows: IntArray) -> IntArray:
    """Return the event row of the runtime call that launched each device event; -1 if it is missing."""
    calls = runtime_calls(events)
    calls = calls[events.correlation[calls] >= 0]
    if not len(calls):
        return np.full(len(rows), -1, dtype=np.int64)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    ids = events.correlation[calls]
    wanted = events.correlation[rows]
    found = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where((wanted >= 0) & (ids[found] == wanted), calls[found], -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTable(Table):
    """Host calls that put work on a device, in order of time."""

    start_ns: IntArray
    has_record: BoolArray
    """A record of the device carries its correlation id."""
    in_collective: BoolArray
    """Launched while the host issued a collective."""


def launch_calls(trace: Trace) -> LaunchTable:
    """Return the launches of a trace whose work the device had done before the recording ended.

    Of a capture that ended while the device was busy, launches that were still queued are left out. Copies
    that never leave a record, such as those a runtime does on the host, and launches into a graph that is
    being captured do not count as launches. The table is empty where the device's records carry no
    correlation ids, and for a trace that was not recorded.
    """
    if trace.capture == "made":
        return LaunchTable.empty()
    events = trace.events
    correlated = events.correlation >= 0
    calls = runtime_calls(events)
    calls = calls[correlated[calls]]
    captured = _captured(events, calls)
    calls = calls[events.name.take(calls).matches(backends.is_launch) & ~captured]
    on_device = events.category.matches(backends.is_work)
    records = np.flatnonzero(on_device & correlated)
    if not len(records) and on_device.any():
        calls = calls[:0]
    has_record = intervals.among(events.correlation[calls], events.correlation[records])
    counts = _leaves_records(events.name.take(calls), has_record)
    if trace.capture == "cut" and len(records):
        last = events.start_ns[calls[has_record]].max(initial=-1)
        start = events.start_ns[calls]
        counts &= has_record | (start <= last) | (start > events.end_ns[records].max())
    start = events.start_ns[calls[counts]]
    issuing = events.name.equals("record_param_comms")
    issues = intervals.union(events.start_ns[issuing], events.end_ns[issuing])
    return LaunchTable(
        start_ns=start,
        has_record=has_record[counts],
        in_collective=intervals.containing(*issues, start) >= 0,
    )


def _captured(events: EventTable, calls: IntArray) -> BoolArray:
    """Mask of the calls that a thread made while it captured a graph."""
    start, thread = events.start_ns[calls], events.thread[calls]
    captured = np.zeros(len(calls), dtype=np.bool_)
    for row, begins, ends in graph_captures(events, calls):
        captured |= (thread == row) & (start >= begins) & (start < ends)
    return captured


def graph_captures(events: EventTable, calls: IntArray) -> list[tuple[int, float, float]]:
    """Return thread, begin and end of each capture of a graph among the runtime's calls."""
    names = events.name.take(calls)
    edges = calls[names.matches(lambda call: backends.begins_capture(call) or backends.ends_capture(call))]
    return backends.captures(
        (int(events.start_ns[i]), int(events.thread[i]), events.name[i] or "") for i in edges.tolist()
    )


def _leaves_records(names: Strings, has_record: BoolArray) -> BoolArray:
    """Whether calls of each name leave records: all that are queued do, others where one did."""
    if not has_record.any():
        return np.ones(len(has_record), dtype=np.bool_)
    leaves = np.array(["Launch" in name or "Async" in name for name in names.values], dtype=np.bool_)
    leaves[np.unique(names.codes[has_record])] = True
    counts: BoolArray = leaves[names.codes]
    return counts


def incomplete_steps(calls: LaunchTable, steps: StepTable) -> list[IncompleteStep]:
    """Return the steps with too many launches without a record for their numbers to be right.

    A step's numbers are wrong by about the fraction of its launches that is missing: more than 1 % is too
    many. Work that the device had not finished when the recording ended is always missing: if at most 1 %
    of the rank's launches is missing, the last step alone may miss up to 5 % of its launches. The same
    limits hold for collectives separately, which are few launches but all of the exposed communication.
    """
    row = intervals.containing(steps.start_ns, steps.end_ns, calls.start_ns)
    recorded = np.flatnonzero(calls.has_record)
    is_last = np.arange(len(row)) > (recorded[-1] if len(recorded) else -1)
    found: dict[int, IncompleteStep] = {}
    for counted in (calls.in_collective & (row >= 0), row >= 0):
        launches = np.bincount(row[counted], minlength=len(steps))
        lost = counted & ~calls.has_record
        missing = np.bincount(row[lost], minlength=len(steps))
        before = np.bincount(row[lost & ~is_last], minlength=len(steps))
        few = missing.sum() <= _MOST_MISSING * launches.sum()
        most = (_MOST_LAST if few else _MOST_MISSING) * launches
        for i in np.flatnonzero((missing > most) | (before > _MOST_MISSING * launches)).tolist():
            step, count = int(steps.step[i]), int(launches[i])
            found[i] = IncompleteStep(step=step, launches=count, missing=int(missing[i]))
    return [found[i] for i in sorted(found)]


def overlapping_records(device: DeviceTable) -> int:
    """Count activities that begin before the previous one on their stream ends.

    A stream runs one at a time, so such durations are wrong. A graph's kernels do not count. Returns 0 if
    at most 1 % of the busy time is counted twice.
    """
    device = device.take(~device.in_graph)
    device = device.take(np.lexsort((device.start_ns, device.stream)))
    same = device.stream[1:] == device.stream[:-1]
    twice = np.minimum(device.end_ns[:-1], device.end_ns[1:]) - device.start_ns[1:]
    twice = np.where(same, np.maximum(twice, 0), 0)
    busy = (device.end_ns - device.start_ns).sum()
    return int(np.count_nonzero(twice)) if twice.sum() > _MOST_OVERLAPPING * busy else 0
