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
from fsdp2prof.analyzers.whatif.program import Activities, Job, Points, RankProgram
from fsdp2prof.labels import parse_label
from fsdp2prof.results.communication import CrossRank
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_strings

_STEP = "ProfilerStep#"

_ROLES: dict[str, str] = {"all_gather": "copy_in", "copy_out": "copy_out", "reduce": "reduce"}
"""Activity of an FSDP label -> purpose of a copy launched in it."""


def program_of(tables: RankTables, summary: RankSummary) -> RankProgram:
    """Return one recorded rank's program; ``summary`` is the one its tables were reduced to."""
    on_device = len(tables.device) > 0
    activities = _activities(tables, on_device=on_device)
    launches = _launch_times(tables, activities)
    marks = _label_marks(tables)
    rows = np.arange(len(activities))
    marks.append(_Marks(launches, 5, {"launches": rows}, turn=activities.start))
    if on_device:
        marks += [_sync_marks(tables, activities, launches), _wait_marks(tables)]
    else:
        marks.append(_host_wait_marks(tables))
    launched = tables.device.launch_ns >= 0
    latency = (tables.device.start_ns - tables.device.launch_ns)[launched]
    table = tables.collectives.table
    event, owner = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if on_device:
        own = tables.device.event[tables.collectives.activity].astype(np.int64)
        event = np.concatenate([own, tables.work.event.astype(np.int64)])
        owner = np.concatenate([tables.collectives.activity_owner, rows[len(table) :]])
    return RankProgram(
        rank=summary.rank,
        on_device=on_device,
        compute_stream=compute_stream(tables.work),
        latency_ns=max(0, int(latency.min())) if len(latency) else 0,
        points=_points(tables, marks, on_device=on_device),
        activities=activities,
        event=event,
        event_owner=owner,
        compared=np.flatnonzero(np.isin(table.step, tables.windows.step)),
        steps=tables.windows.step.tolist(),
        windows=list(zip(tables.windows.start_ns.tolist(), tables.windows.end_ns.tolist(), strict=True)),
    )


def job_of(
    programs: Sequence[RankProgram], summaries: Sequence[RankSummary], compared: CrossRank | None = None
) -> Job:
    """Return ranks on one clock, their collectives matched; both sequences are in the same order.

    ``compared`` is their comparison, if it was made before.
    """
    offsets = (compared or match(summaries).result).clock_offset_ns
    for program, summary in zip(programs, summaries, strict=True):
        program.shift_ns = summary.base_ns - offsets.get(summary.clock, 0)
    _meet(programs, summaries)
    return list(programs)


@dataclass(slots=True)
class _Marks:
    """Something at instants of the host's time, before the stretches between are known."""

    time: IntArray
    order: int
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the points: an array, or one value for all."""
    blocked_from: IntArray | None = None
    turn: IntArray | None = None
    """Order among launches of one instant."""


def _activities(tables: RankTables, *, on_device: bool) -> Activities:
    """Collectives first, as in their table, then (on a device) all other activities."""
    table, work, phases = tables.collectives.table, tables.work, tables.phases
    count = len(table)
    parts: dict[str, list[Any]] = {
        "start": [table.start_ns],
        "end": [table.end_ns],
        "stream": [table.stream],
        "kind": [Strings.full(count, "collective")],
        "step": [table.step],
        "fqn": [table.fqn],
        "phase": [_with_default(table.phase, "other")],
        "role": [Strings.full(count, None)],
        "op": [_with_default(table.op, "other")],
        "group": [_with_default(table.process_group, "")],
        "dtype": [_with_default(table.dtype, "")],
    }
    if on_device:
        doing = phases.activity.lookup(work.phase_row)
        blocks = tables.trace.events.name.matches(backends.blocks_its_host)[work.event] & work.is_memcpy
        kind = np.where(work.is_fsdp, 0, np.where(work.is_memcpy, 1, 2)).astype(np.int32)
        known = [[*_ROLES].index(name) if name in _ROLES else -1 for name in doing.values] + [-1]
        role = np.where(work.is_fsdp, np.array(known)[doing.codes], np.where(blocks, len(_ROLES), -1))
        step = np.append(tables.steps.step, -1)[
            intervals.containing(tables.steps.start_ns, tables.steps.end_ns, work.launch_ns)
        ]
        more = {
            "start": work.start_ns,
            "end": work.end_ns,
            "stream": work.stream,
            "kind": Strings(kind, ("fsdp_copy", "memcpy", "compute")),
            "step": step,
            "fqn": phases.fqn.lookup(work.phase_row),
            "phase": _with_default(phases.phase.lookup(work.phase_row), "other"),
            "role": Strings(role.astype(np.int32), (*_ROLES.values(), "to_host")),
            **{name: Strings.full(len(work), "") for name in ("op", "group", "dtype")},
        }
        for name, column in more.items():
            parts[name].append(column)
    columns: dict[str, Any] = {
        name: concat_strings(part) if isinstance(part[0], Strings) else np.concatenate(part).astype(np.int64)
        for name, part in parts.items()
    }
    size = len(columns["start"])
    none, zero = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for name in ("group_size", "payload_bytes"):
        columns[name] = none.copy()
        columns[name][:count] = getattr(table, name)
    columns |= dict.fromkeys(("meeting", "after"), none)
    columns |= dict.fromkeys(("transfer_ns", "gap", "early", "overlap", "rules"), zero)
    return Activities(**columns, origin=np.arange(size))


def _with_default(column: Strings, default: str) -> Strings:
    """Return the column with a value in place of null and of no text."""
    codes = np.where(column.codes < 0, np.int32(len(column.values)), column.codes)
    return Strings(codes, (*(text or default for text in column.values), default))


def _label_marks(tables: RankTables) -> list[_Marks]:
    labels = tables.trace.labels
    ours = [name.startswith(_STEP) or parse_label(name) is not None for name in labels.name.values]
    rows = np.flatnonzero(np.array([*ours, False])[labels.name.codes] & ~transfer_rows(labels))
    rows = np.union1d(rows, loading_rows(tables.trace, tables.phases))
    name, start, end = labels.name.take(rows), labels.start_ns[rows], labels.end_ns[rows]
    joins = name.matches(
        lambda text: text.startswith("FSDP::root_pre_forward") and parse_label(text) is not None
    )
    turn = np.arange(len(rows))
    empty = start >= end

    def closing(which: BoolArray, order: int) -> _Marks:
        return _Marks(end[which], order, {"label": name.take(which)}, turn=turn[which])

    opening = _Marks(start, 0, {"label": name, "opens": True, "joins": joins}, turn=turn)
    # what ends as something else begins ends first
    return [opening, closing(~empty, -1), closing(empty, 9)]


def _launch_times(tables: RankTables, activities: Activities) -> IntArray:
    """Return when the host launched each activity, in the order in which each stream ran them.

    A stream runs its work in the order of its launches. So an activity without a launch in the file
    (queued before it began, or trimmed) was launched no later than the next activity of its stream.
    """
    on_device = len(tables.device) > 0
    known = tables.collectives.table.issue_ns
    if on_device:
        known = np.concatenate([known, tables.work.launch_ns])
    times = np.where(known >= 0, known, activities.start)
    if on_device:
        order = np.lexsort((activities.end, activities.start))
        for stream in intervals.distinct(activities.stream):
            rows = order[activities.stream[order] == stream][::-1]
            times[rows] = np.minimum.accumulate(times[rows])
    return times


def _wait_marks(tables: RankTables) -> _Marks:
    """Waits of the compute stream for each collective."""
    rows = np.flatnonzero(tables.waits.wait_ns >= 0)
    return _Marks(tables.waits.wait_ns[rows], 4, {"needs": rows})


def _host_wait_marks(tables: RankTables) -> _Marks:
    """Where the host itself waited for collectives, which on a CPU block their caller."""
    waits, end = tables.waits, tables.collectives.table.end_ns
    unseen = (waits.resumed_ns < 0) | (end <= waits.resumed_ns)
    rows = np.flatnonzero((waits.wait_ns >= 0) & (waits.needed_ns >= 0) & unseen)
    needed = waits.needed_ns[rows]
    return _Marks(np.maximum(needed, end[rows]), 6, {"awaits": rows}, needed)


def _sync_marks(tables: RankTables, activities: Activities, launches: IntArray) -> _Marks:
    """Calls that blocked the host until the device had finished all earlier launches."""
    events = tables.trace.events
    calls = np.flatnonzero(events.name.matches(backends.always_blocks) & (events.thread >= 0))
    order = np.lexsort((launches, activities.end))
    finished, launched = activities.end[order], launches[order]
    marks = []
    last = np.searchsorted(finished, events.end_ns[calls], side="right") - 1
    starts, ends = events.start_ns[calls].tolist(), events.end_ns[calls].tolist()
    for start, end, at in zip(starts, ends, last.tolist(), strict=True):
        while at >= 0 and launched[at] > end:
            at -= 1
        if at >= 0 and finished[at] > start:
            marks.append((finished[at], order[at], start))
    time, awaits, since = np.array(marks, dtype=np.int64).reshape(-1, 3).T
    return _Marks(time, 6, {"awaits": awaits, "syncs": True}, since)


_POINT: dict[str, Any] = {
    "launches": -1, "awaits": -1, "syncs": False, "needs": -1, "joins": False, "opens": False, "copy": False
}  # fmt: skip
"""Columns of points that marks give, and their values without one."""


def _points(tables: RankTables, marks: list[_Marks], *, on_device: bool) -> Points:
    """Put marks in order and account for the host's time between them."""
    counts = [len(mark.time) for mark in marks]
    none = np.full(sum(counts), -1, dtype=np.int64)
    turn, blocked_from = np.zeros(len(none), dtype=np.int64), none.copy()
    columns = {name: np.full(len(none), value) for name, value in _POINT.items()}
    first = 0
    for mark, count in zip(marks, counts, strict=True):
        own = slice(first, first + count)
        for name, value in mark.columns.items():
            if name in columns:
                columns[name][own] = value
        if mark.turn is not None:
            turn[own] = mark.turn
        if mark.blocked_from is not None:
            blocked_from[own] = mark.blocked_from
        first += count
    label = concat_strings([mark.columns.get("label", Strings.full(len(mark.time), None)) for mark in marks])
    time = np.concatenate([mark.time for mark in marks])
    by_time = np.lexsort((turn, np.repeat([mark.order for mark in marks], counts), time))
    time, blocked_from = time[by_time], blocked_from[by_time]
    begin = np.concatenate([time[:1], time[:-1]])
    computed: IntArray = np.zeros(len(time), dtype=np.int64)
    updated = computed
    if not on_device:
        computed = intervals.covered(tables.run.compute, begin, time)
        updates = tables.phases.phase.equals("optimizer")
        spans = intervals.union(tables.phases.start_ns[updates], tables.phases.end_ns[updates])
        updated = np.minimum(computed, intervals.covered(spans, begin, time))
    blocked = np.maximum(0, time - np.maximum(begin, blocked_from))
    work = time - begin - np.where(blocked_from >= 0, blocked, 0)
    # a label begins after its stretch, and goes where its content goes
    opens = columns["opens"][by_time]
    row = np.repeat(np.arange(len(time)), 1 + opens)
    second = np.append(False, row[1:] == row[:-1]) if len(row) else np.zeros(0, dtype=np.bool_)
    stretch = np.append(second[1:], False) if len(row) else second
    filled = {name: np.where(stretch, _POINT[name], column[by_time][row]) for name, column in columns.items()}
    codes = np.where(stretch, np.int32(-1), label.codes[by_time][row]).astype(np.int32)
    return Points(
        number=np.arange(len(row)),
        begin=np.where(second, time[row], begin[row]),
        end=time[row],
        work_ns=np.where(second, 0, work[row]),
        compute_ns=np.where(second, 0, np.minimum(computed, work)[row]),
        update_ns=np.where(second, 0, np.minimum(np.minimum(updated, computed), work)[row]),
        label=Strings(codes, label.values),
        **filled,
    )


def _meet(programs: Sequence[RankProgram], summaries: Sequence[RankSummary]) -> None:
    """Number the collectives that ranks joined, and separate each one's transfer from its wait."""
    order = sorted(range(len(programs)), key=lambda at: programs[at].rank)
    matched = match_collectives([summaries[at] for at in order])
    own = [programs[at] for at in order]
    rows = [program.compared.tolist() for program in own]
    start = [(program.activities.start + program.shift_ns).tolist() for program in own]
    end = [(program.activities.end + program.shift_ns).tolist() for program in own]
    meeting = [program.activities.meeting.copy() for program in own]
    transfer = [program.activities.duration for program in own]
    first, ranks, places = matched.first.tolist(), matched.rank.tolist(), matched.row.tolist()
    for number, (begin, until) in enumerate(pairwise(first)):
        members = [
            (rank, rows[rank][place])
            for rank, place in zip(ranks[begin:until], places[begin:until], strict=True)
        ]
        latest = max(start[rank][one] for rank, one in members)
        if min(end[rank][one] for rank, one in members) < latest:
            continue  # a rank left before the last one came
        for rank, one in members:
            meeting[rank][one], transfer[rank][one] = number, end[rank][one] - latest
    for program, number_of, time in zip(own, meeting, transfer, strict=True):
        program.activities = program.activities.with_columns(meeting=number_of, transfer_ns=time)
