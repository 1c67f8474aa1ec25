"""From the tables of recorded ranks to programs that can be run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import transfer_rows
from fsdp2prof.analyzers.ranks.comparison import match
from fsdp2prof.analyzers.ranks.matching import match_collectives
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.spans import loading_rows
from fsdp2prof.analyzers.trace.waits import compute_stream
from fsdp2prof.analyzers.whatif.program import Activity, Job, Point, RankProgram, Role
from fsdp2prof.labels import parse_label
from fsdp2prof.tables.columns import IntArray

_STEP = "ProfilerStep#"

_ROLES: dict[str, Role] = {"all_gather": "copy_in", "copy_out": "copy_out", "reduce": "reduce"}
"""Activity of an FSDP label -> purpose of a copy launched in it."""


def program_of(tables: RankTables, summary: RankSummary) -> RankProgram:
    """Return one recorded rank's program; ``summary`` is the one its tables were reduced to."""
    on_device = len(tables.device) > 0
    stream = compute_stream(tables.work)
    activities, events = _activities(tables, on_device=on_device)
    launches = _launch_times(tables, activities)
    marks = _label_marks(tables)
    marks += [_Mark(launches[i], 5, {"launches": one}, turn=one.start) for i, one in activities.items()]
    if on_device:
        marks += [*_sync_marks(tables, activities, launches), *_wait_marks(tables, activities)]
    else:
        marks += _host_wait_marks(tables, activities)
    launched = tables.device.launch_ns >= 0
    latency = (tables.device.start_ns - tables.device.launch_ns)[launched]
    table = tables.collectives.table
    return RankProgram(
        rank=summary.rank,
        on_device=on_device,
        compute_stream=stream,
        latency_ns=max(0, int(latency.min())) if len(latency) else 0,
        points=_points(tables, marks, on_device=on_device),
        activities=activities,
        recorded=dict(activities),
        compared=np.flatnonzero(np.isin(table.step, tables.windows.step)).tolist(),
        events=events,
        steps=tables.windows.step.tolist(),
        windows=list(zip(tables.windows.start_ns.tolist(), tables.windows.end_ns.tolist(), strict=True)),
    )


def job_of(programs: Sequence[RankProgram], summaries: Sequence[RankSummary]) -> Job:
    """Return ranks on one clock, their collectives matched; both sequences are in the same order."""
    offsets = match(summaries).result.clock_offset_ns
    for program, summary in zip(programs, summaries, strict=True):
        program.shift_ns = summary.base_ns - offsets.get(summary.clock, 0)
    _meet(programs, summaries)
    return list(programs)


@dataclass(slots=True)
class _Mark:
    """Something at one instant of the host's time, before the stretches between are known."""

    time: int
    order: int
    point: dict[str, Any] = field(default_factory=dict)
    blocked_from: int = -1
    turn: int = 0
    """Order among launches of one instant."""


def _activities(tables: RankTables, *, on_device: bool) -> tuple[dict[int, Activity], dict[int, int]]:
    """Collectives first, numbered as in their table, then (on a device) all other activities."""
    table = tables.collectives.table
    found: dict[int, Activity] = {}
    events: dict[int, int] = {}
    columns = {name: getattr(table, name) for name in ("fqn", "phase", "op", "process_group", "dtype")}
    for i in range(len(table)):
        text = {name: column[i] for name, column in columns.items()}
        found[i] = Activity(
            index=i,
            start=int(table.start_ns[i]),
            end=int(table.end_ns[i]),
            stream=int(table.stream[i]),
            kind="collective",
            step=int(table.step[i]),
            fqn=text["fqn"],
            phase=text["phase"] or "other",
            op=text["op"] or "other",
            group=text["process_group"] or "",
            dtype=text["dtype"] or "",
            group_size=int(table.group_size[i]),
            payload_bytes=int(table.payload_bytes[i]),
            origin=i,
        )
    if not on_device:
        return found, events
    for row, owner in zip(
        tables.collectives.activity.tolist(), tables.collectives.activity_owner.tolist(), strict=True
    ):
        events[int(tables.device.event[row])] = owner
    work, phases = tables.work, tables.phases
    step = np.append(tables.steps.step, -1)[
        intervals.containing(tables.steps.start_ns, tables.steps.end_ns, work.launch_ns)
    ]
    fqn, phase = phases.fqn.lookup(work.phase_row), phases.phase.lookup(work.phase_row)
    activity = phases.activity.lookup(work.phase_row)
    blocks = tables.trace.events.name.matches(backends.blocks_its_host)[work.event] & work.is_memcpy
    numbers = (
        work.start_ns,
        work.end_ns,
        work.stream,
        work.is_fsdp,
        work.is_memcpy,
        blocks,
        step,
        work.event,
    )
    rows = zip(
        *(column.tolist() for column in numbers),
        fqn.to_list(),
        phase.to_list(),
        activity.to_list(),
        strict=True,
    )
    for index, (start, end, stream, own, copies, blocks_host, number, event, of, during, doing) in enumerate(
        rows, len(table)
    ):
        found[index] = Activity(
            index=index,
            start=start,
            end=end,
            stream=stream,
            kind="fsdp_copy" if own else "memcpy" if copies else "compute",
            step=number,
            fqn=of,
            phase=during or "other",
            role=_ROLES.get(doing or "", "") if own else "to_host" if blocks_host else "",
            origin=index,
        )
        events[event] = index
    return found, events


def _label_marks(tables: RankTables) -> list[_Mark]:
    labels = tables.trace.labels
    ours = [name.startswith(_STEP) or parse_label(name) is not None for name in labels.name.values]
    rows = np.flatnonzero(np.array([*ours, False])[labels.name.codes] & ~transfer_rows(labels))
    marks = []
    for row in np.union1d(rows, loading_rows(tables.trace, tables.phases)).tolist():
        name = labels.name[row] or ""
        label = parse_label(name)
        joins = label is not None and name.startswith("FSDP::root_pre_forward")
        start, end = int(labels.start_ns[row]), int(labels.end_ns[row])
        marks.append(_Mark(start, 0, {"label": name, "opens": True, "joins": joins}))
        # what ends as something else begins ends first
        marks.append(_Mark(end, -1 if start < end else 9, {"label": name}))
    return marks


def _launch_times(tables: RankTables, activities: dict[int, Activity]) -> dict[int, int]:
    """Return when the host launched each activity, in the order in which each stream ran them.

    A stream runs its work in the order of its launches. So an activity without a launch in the file
    (queued before it began, or trimmed) was launched no later than the next activity of its stream.
    """
    on_device = len(tables.device) > 0
    known = [
        *tables.collectives.table.issue_ns.tolist(),
        *(tables.work.launch_ns.tolist() if on_device else []),
    ]
    latest: dict[int, int] = {}
    times = {}
    for one in sorted(activities.values(), key=lambda one: (one.start, one.end, one.index), reverse=True):
        time = int(known[one.index]) if known[one.index] >= 0 else one.start
        if on_device:
            time = latest[one.stream] = min(time, latest.get(one.stream, time))
        times[one.index] = time
    return times


def _wait_marks(tables: RankTables, activities: dict[int, Activity]) -> list[_Mark]:
    """Waits of the compute stream for each collective."""
    rows = np.flatnonzero(tables.waits.wait_ns >= 0)
    return [_Mark(int(tables.waits.wait_ns[row]), 4, {"needs": activities[row]}) for row in rows.tolist()]


def _host_wait_marks(tables: RankTables, activities: dict[int, Activity]) -> list[_Mark]:
    """Where the host itself waited for collectives, which on a CPU block their caller."""
    waits, table, marks = tables.waits, tables.collectives.table, []
    for row in np.flatnonzero((waits.wait_ns >= 0) & (waits.needed_ns >= 0)).tolist():
        needed, resumed, end = int(waits.needed_ns[row]), int(waits.resumed_ns[row]), int(table.end_ns[row])
        if resumed < 0 or end <= resumed:
            marks.append(_Mark(max(needed, end), 6, {"awaits": activities[row]}, needed))
    return marks


def _sync_marks(tables: RankTables, activities: dict[int, Activity], launches: dict[int, int]) -> list[_Mark]:
    """Calls that blocked the host until the device had finished all earlier launches."""
    events = tables.trace.events
    calls = np.flatnonzero(events.name.matches(backends.always_blocks) & (events.thread >= 0))
    ends = sorted((one.end, launches[index], index) for index, one in activities.items())
    finished = np.array([end for end, _, _ in ends], dtype=np.int64)
    marks = []
    for call in calls.tolist():
        start, end = int(events.start_ns[call]), int(events.end_ns[call])
        at = int(np.searchsorted(finished, end, side="right")) - 1
        while at >= 0 and ends[at][1] > end:
            at -= 1
        if at >= 0 and ends[at][0] > start:
            marks.append(_Mark(ends[at][0], 6, {"awaits": activities[ends[at][2]], "syncs": True}, start))
    return marks


def _points(tables: RankTables, marks: list[_Mark], *, on_device: bool) -> list[Point]:
    """Put marks in order and account for the host's time between them."""
    marks.sort(key=lambda mark: (mark.time, mark.order, mark.turn))
    time = np.array([mark.time for mark in marks], dtype=np.int64)
    begin = np.concatenate([time[:1], time[:-1]])
    computed: IntArray = np.zeros(len(marks), dtype=np.int64)
    updated = computed
    if not on_device:
        computed = intervals.covered(tables.run.compute, begin, time)
        updates = tables.phases.phase.equals("optimizer")
        spans = intervals.union(tables.phases.start_ns[updates], tables.phases.end_ns[updates])
        updated = np.minimum(computed, intervals.covered(spans, begin, time))
    points: list[Point] = []
    for mark, since, computes, updates_ns in zip(
        marks, begin.tolist(), computed.tolist(), updated.tolist(), strict=True
    ):
        blocked = max(0, mark.time - max(since, mark.blocked_from)) if mark.blocked_from >= 0 else 0
        work = mark.time - since - blocked
        stretch = {
            "end": mark.time,
            "compute_ns": min(computes, work),
            "update_ns": min(updates_ns, computes, work),
        }
        if mark.point.get("opens"):  # the label begins after the stretch, and goes where its content goes
            points.append(Point(number=len(points), begin=since, work_ns=work, **stretch))
            since, work, stretch = mark.time, 0, {"end": mark.time}
        points.append(Point(number=len(points), begin=since, work_ns=work, **stretch, **mark.point))
    return points


def _meet(programs: Sequence[RankProgram], summaries: Sequence[RankSummary]) -> None:
    """Number the collectives that ranks joined, and separate each one's transfer from its wait."""
    order = sorted(range(len(programs)), key=lambda at: programs[at].rank)
    matched = match_collectives([summaries[at] for at in order])
    for program in programs:
        for one in program.activities.values():
            one.transfer_ns = one.duration
    first, ranks, rows = matched.first.tolist(), matched.rank.tolist(), matched.row.tolist()
    for number, (begin, end) in enumerate(pairwise(first)):
        members = []
        for rank, row in zip(ranks[begin:end], rows[begin:end], strict=True):
            program = programs[order[rank]]
            members.append((program.activities[program.compared[row]], program.shift_ns))
        latest = max(one.start + shift for one, shift in members)
        if min(one.end + shift for one, shift in members) < latest:
            continue  # a rank left before the last one came
        for one, shift in members:
            one.meeting, one.transfer_ns = number, one.end + shift - latest
