"""A program that was run again as a trace: the recorded events, each where it would have happened.

Every analysis of a recorded rank reads it. A host event is stretched with the host's time around it, a
device's moves with its activity, and what a change leaves out is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.trace.collective_names import gloo_ranges
from fsdp2prof.analyzers.whatif.run import RankRun
from fsdp2prof.by_key import grouped
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings
from fsdp2prof.tables.trace import EventTable, LabelTable, Trace


def replayed_trace(trace: Trace, ran: RankRun) -> Trace:
    """Return ``trace`` as it would have been written of the run ``ran``, on the trace's own clock."""
    program = ran.program
    rows, owner = (program.event, program.event_owner) if program.on_device else _gloo_owners(trace, ran)
    parts = [_moved(trace, ran, _Host.of(ran, copies=False), rows, owner)]
    again = _Host.of(ran, copies=True)
    by_owner = grouped((index, row) for row, index in zip(rows.tolist(), owner.tolist(), strict=True))
    if len(again.begin):
        parts.append(_repeated(trace, ran, again, by_owner))
    parts += _of_other_kinds(trace, ran, by_owner)
    return _assembled(trace, parts)


@dataclass(frozen=True, slots=True)
class _Host:
    """Stretches of the host's time, recorded and new, by their recorded beginning; on the trace's clock."""

    begin: IntArray
    end: IntArray
    new_begin: IntArray
    new_end: IntArray
    kept: BoolArray

    @classmethod
    def of(cls, ran: RankRun, *, copies: bool) -> _Host:
        points = ran.program.points
        columns = (points.begin, points.end, ran.begin, ran.end)
        rows = np.flatnonzero(points.copy == copies)
        rows = rows[np.lexsort([column[rows] for column in (*reversed(columns), points.number)])]
        begin, end, new_begin, new_end = (column[rows] for column in columns)
        return cls(begin, end, new_begin, new_end, np.ones(len(rows), dtype=np.bool_))

    def moved(self, time: IntArray, *, ends: bool) -> IntArray:
        """Return the new host times; at a boundary, a beginning stays with the following interval."""
        row = np.searchsorted(self.begin, time, side="left" if ends else "right") - 1
        row = np.clip(row, 0, len(self.begin) - 1)
        begin, end = self.begin[row], self.end[row]
        length, now = end - begin, self.new_end[row] - self.new_begin[row]
        inside = np.clip(time - begin, 0, length)
        scaled = np.where(length > 0, inside * now // np.maximum(length, 1), now)
        beyond = np.where(row == len(self.begin) - 1, np.maximum(time - end, 0), 0)
        before = np.where(row == 0, np.minimum(time - begin, 0), 0)
        moved: IntArray = self.new_begin[row] + scaled + beyond + before
        return moved

    def holds(self, start: IntArray, end: IntArray) -> BoolArray:
        """Whether ranges begin and end in stretches that are there."""
        row = np.clip(np.searchsorted(self.begin, start, side="right") - 1, 0, len(self.begin) - 1)
        last = np.clip(np.searchsorted(self.begin, end, side="left") - 1, 0, len(self.begin) - 1)
        inside: BoolArray = (start >= self.begin[row]) & (start <= self.end[row])
        return inside & (end <= self.end[np.maximum(last, row)])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Events of the trace with new times."""

    row: IntArray
    start: IntArray
    end: IntArray
    copy: bool
    kind: str = ""
    """Operation that collectives become; empty is their own."""


def _moved(trace: Trace, ran: RankRun, hosts: _Host, rows: IntArray, owner: IntArray) -> _Rows:
    """Move every event: ``rows`` with their activities, the others with the host."""
    events, table = trace.events, ran.program.activities
    start = hosts.moved(events.start_ns, ends=False)
    end = np.maximum(hosts.moved(events.end_ns, ends=True), start)
    keep = _kept(trace, ran)
    launched = ran.program.launched[owner]
    keep[rows[~launched]] = False
    rows, owner = rows[launched], owner[launched]
    begins, over = ran.started[owner], ran.ended[owner]
    # one of several kernels of a collective keeps its place in it
    inside, left = events.start_ns[rows] - table.start[owner], table.end[owner] - events.end_ns[rows]
    start[rows] = np.minimum(begins + np.maximum(0, inside), over)
    end[rows] = np.maximum(start[rows], over - np.maximum(0, left))
    rows = np.flatnonzero(keep)
    return _Rows(rows, start[rows], end[rows], copy=False)


def _kept(trace: Trace, ran: RankRun) -> BoolArray:
    """Rows outside the intervals that were left out."""
    events = trace.events
    keep = np.ones(len(events), dtype=np.bool_)
    for begin, end in ran.program.left_out:
        keep &= ~((events.thread >= 0) & (events.start_ns >= begin) & (events.end_ns <= end))
    return keep


def _gloo_owners(trace: Trace, ran: RankRun) -> tuple[IntArray, IntArray]:
    """Return the rows of gloo's threads, and the collective whose time each lies in."""
    events, table = trace.events, ran.program.activities
    ranges = gloo_ranges(trace)
    threads = set(events.thread[ranges].tolist())
    rows = np.flatnonzero(np.isin(events.thread, list(threads)))
    recorded = np.flatnonzero(table.kind.equals("collective") & (table.origin == np.arange(len(table))))
    recorded = recorded[np.lexsort((table.end[recorded], table.start[recorded]))]
    last = np.searchsorted(table.start[recorded], events.start_ns[rows], side="right") - 1
    ends = table.end[recorded].tolist()
    found = []
    for row, at, end in zip(rows.tolist(), last.tolist(), events.end_ns[rows].tolist(), strict=True):
        while at >= 0 and ends[at] < end:
            at -= 1
        if at >= 0:
            found.append((row, recorded[at]))
    served, owner = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return served, owner


def _copies(ran: RankRun) -> tuple[IntArray, BoolArray]:
    """Return the launched activities that a change added, and whether their operation is another one."""
    table = ran.program.activities
    added = np.flatnonzero((table.origin != np.arange(len(table))) & ran.program.launched)
    return added, table.op.codes[added] != table.op.codes[table.origin[added]]


def _repeated(trace: Trace, ran: RankRun, hosts: _Host, by_owner: Mapping[int, list[int]]) -> _Rows:
    """Events of stretches that a change repeats, and the activities that they launch."""
    events = trace.events
    inside = (events.thread >= 0) & hosts.holds(events.start_ns, events.end_ns)
    rows = np.flatnonzero(inside)
    start = hosts.moved(events.start_ns[rows], ends=False)
    end = np.maximum(hosts.moved(events.end_ns[rows], ends=True), start)
    added, other = _copies(ran)
    served = [
        (row, index)
        for index, origin in zip(
            added[~other].tolist(), ran.program.activities.origin[added[~other]].tolist(), strict=True
        )
        for row in by_owner.get(origin, ())
    ]
    more, index = np.array(served, dtype=np.int64).reshape(-1, 2).T
    return _Rows(
        np.concatenate([rows, more]),
        np.concatenate([start, ran.started[index]]),
        np.concatenate([end, ran.ended[index]]),
        copy=True,
    )


def _of_other_kinds(trace: Trace, ran: RankRun, by_owner: Mapping[int, list[int]]) -> list[_Rows]:
    """Collectives that a change adds: events of the recorded ones that they stand behind, renamed."""
    events, points, table = trace.events, ran.program.points, ran.program.activities
    added, other = _copies(ran)
    made = added[other]
    if not len(made):
        return []
    described = np.unique(trace.collective_args.event)
    described = described[events.thread[described] >= 0]
    at = np.full(len(table), -1, dtype=np.int64)
    launching = np.flatnonzero(points.launches >= 0)
    at[points.launches[launching]] = launching
    parts = []
    for index in made.tolist():
        origin = int(table.origin[index])
        on_device = by_owner.get(origin, [])
        since, begin, end = points.end[at[origin]], ran.begin[at[index]], ran.end[at[index]]
        holds = (events.start_ns[described] <= since) & (events.end_ns[described] >= since)
        linked = np.isin(events.correlation, events.correlation[on_device]) & (events.correlation >= 0)
        hosts = set(described[holds].tolist()) | set(np.flatnonzero(linked & (events.thread >= 0)).tolist())
        hosts -= set(on_device)
        rows = np.array([*on_device, *hosts], dtype=np.int64)
        here, there = len(on_device), len(hosts)
        starts = np.array([ran.started[index]] * here + [begin] * there, dtype=np.int64)
        ends = np.array([ran.ended[index]] * here + [end] * there, dtype=np.int64)
        parts.append(_Rows(rows, starts, ends, copy=True, kind=table.op[index] or ""))
    return parts


_NAMES = {"all_reduce": ("allreduce", "ncclDevKernel_AllReduce_Sum_RING", "c10d::allreduce_")}
"""Operation -> its name in metadata, as a kernel and as an operator."""


def _renamed(table: EventTable, kind: Sequence[str]) -> EventTable:
    """Give events that became another operation's its names."""
    names = table.name.to_list()
    for row, op in enumerate(kind):
        if op:
            _, kernel, operator = _NAMES[op]
            name = names[row] or ""
            names[row] = operator if name.startswith("c10d::") else kernel if table.thread[row] < 0 else name
    return table.with_columns(name=Strings.intern(names))


def _assembled(trace: Trace, parts: list[_Rows]) -> Trace:
    """Put moved events into the order of a trace, with their metadata."""
    events = trace.events
    row = np.concatenate([part.row for part in parts])
    start = np.concatenate([part.start for part in parts])
    end = np.concatenate([part.end for part in parts])
    copy = np.concatenate([np.full(len(part.row), part.copy) for part in parts])
    kinds = np.concatenate([np.full(len(part.row), part.kind, dtype=object) for part in parts])
    order = np.lexsort((row, -end, start))
    row, start, end, copy, kinds = row[order], start[order], end[order], copy[order], kinds[order]
    table = events.take(row).with_columns(start_ns=start, end_ns=end)
    table = _renumbered(table, copy)
    if any(kinds):
        table = _renamed(table, kinds.tolist())
    place = np.argsort(row, kind="stable")
    sorted_rows = row[place]

    def renamed(column: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of a side table, one for each image of its event, and the events' new rows."""
        first = np.searchsorted(sorted_rows, column, side="left")
        count = np.searchsorted(sorted_rows, column, side="right") - first
        side = np.repeat(np.arange(len(column)), count)
        offset = np.arange(len(side)) - np.repeat(np.cumsum(count) - count, count)
        new = place[first[side] + offset] if len(side) else np.empty(0, dtype=np.int64)
        back = np.argsort(new, kind="stable")
        return side[back], new[back]

    side, new = renamed(trace.collective_args.event)
    args = trace.collective_args.take(side).with_columns(event=new)
    if any(kinds):
        own = [
            _NAMES[kinds[at]][0] if kinds[at] else name
            for at, name in zip(new, args.collective.to_list(), strict=True)
        ]
        args = args.with_columns(collective=Strings.intern(own))
    side, new = renamed(trace.shapes.event)
    shapes = trace.shapes.take(side).with_columns(event=new)
    return replace(
        trace,
        capture="made",
        events=table,
        collective_args=args.with_columns(
            seq=np.where(copy[args.event], -1, args.seq),
            comms_id=np.where(copy[args.event], -1, args.comms_id),
        ),
        labels=_labels(table),
        shapes=shapes,
        memory=type(trace.memory).empty(),
        syncs=type(trace.syncs).empty(),
    )


def _renumbered(table: EventTable, copy: BoolArray) -> EventTable:
    """Give repeated launches and their activities new correlation ids."""
    if not copy.any():
        return table
    highest = int(max(table.correlation.max(initial=0), table.external_id.max(initial=0))) + 1
    return table.with_columns(
        **{
            name: np.where(
                copy & (getattr(table, name) >= 0), getattr(table, name) + highest, getattr(table, name)
            )
            for name in ("correlation", "external_id")
        }
    )


def _labels(table: EventTable) -> LabelTable:
    rows = np.flatnonzero(table.category.equals("user_annotation") & (table.thread >= 0))
    return LabelTable(
        thread=table.thread[rows].astype(np.int64),
        start_ns=table.start_ns[rows],
        end_ns=table.end_ns[rows],
        name=table.name.take(rows),
    )
