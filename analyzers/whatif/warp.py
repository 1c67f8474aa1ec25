"""A program that was run again as a trace: the recorded events, each where it would have happened.

Every analysis of a recorded rank reads it. A host event is stretched with the host's time around it, a
device's moves with its activity, and what a change leaves out is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.trace.collective_names import gloo_ranges
from fsdp2prof.analyzers.whatif.run import RankRun
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings
from fsdp2prof.tables.trace import EventTable, LabelTable, Trace


def replayed_trace(trace: Trace, ran: RankRun) -> Trace:
    """Return ``trace`` as it would have been written of the run ``ran``, on the trace's own clock."""
    hosts = _Host.of(ran, copies=False)
    own = _moved(trace, ran, hosts, ran.program.events)
    parts = [own]
    again = _Host.of(ran, copies=True)
    if len(again.begin):
        parts.append(_repeated(trace, ran, again))
    parts += _of_other_kinds(trace, ran)
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
        rows = [
            (point.number, point.begin, point.end, begin, end)
            for point, begin, end in zip(ran.program.points, ran.begin, ran.end, strict=True)
            if point.copy == copies
        ]
        rows.sort()
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return cls(table[:, 1], table[:, 2], table[:, 3], table[:, 4], np.ones(len(table), dtype=np.bool_))

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


def _moved(trace: Trace, ran: RankRun, hosts: _Host, owner: dict[int, int]) -> _Rows:
    events = trace.events
    start = hosts.moved(events.start_ns, ends=False)
    end = np.maximum(hosts.moved(events.end_ns, ends=True), start)
    keep = _kept(trace, ran)
    served = dict(owner) if ran.program.on_device else _gloo_owners(trace, ran)
    for row, index in served.items():
        if index not in ran.started:
            keep[row] = False
            continue
        recorded = ran.program.activities[index]
        begins, over = ran.started[index], ran.ended[index]
        # one of several kernels of a collective keeps its place in it
        inside = events.start_ns[row] - recorded.start
        start[row] = min(begins + max(0, int(inside)), over)
        left = recorded.end - int(events.end_ns[row])
        end[row] = max(int(start[row]), over - max(0, left))
    rows = np.flatnonzero(keep)
    return _Rows(rows, start[rows], end[rows], copy=False)


def _kept(trace: Trace, ran: RankRun) -> BoolArray:
    """Rows outside the intervals that were left out."""
    events = trace.events
    keep = np.ones(len(events), dtype=np.bool_)
    for begin, end in ran.program.left_out:
        keep &= ~((events.thread >= 0) & (events.start_ns >= begin) & (events.end_ns <= end))
    return keep


def _gloo_owners(trace: Trace, ran: RankRun) -> dict[int, int]:
    """Rows of gloo's threads -> the collective whose time they lie in."""
    events = trace.events
    ranges = gloo_ranges(trace)
    threads = set(events.thread[ranges].tolist())
    rows = np.flatnonzero(np.isin(events.thread, list(threads)))
    recorded = sorted(
        (one.start, one.end, one.index) for one in ran.program.recorded.values() if one.kind == "collective"
    )
    starts = np.array([begin for begin, _, _ in recorded], dtype=np.int64)
    found = {}
    for row in rows.tolist():
        at = int(np.searchsorted(starts, events.start_ns[row], side="right")) - 1
        while at >= 0 and recorded[at][1] < events.end_ns[row]:
            at -= 1
        if at >= 0:
            found[row] = recorded[at][2]
    return found


def _repeated(trace: Trace, ran: RankRun, hosts: _Host) -> _Rows:
    """Events of stretches that a change repeats, and the activities that they launch."""
    events = trace.events
    inside = (events.thread >= 0) & hosts.holds(events.start_ns, events.end_ns)
    rows = np.flatnonzero(inside)
    start = hosts.moved(events.start_ns[rows], ends=False)
    end = np.maximum(hosts.moved(events.end_ns[rows], ends=True), start)
    owners = ran.program.events if ran.program.on_device else _gloo_owners(trace, ran)
    by_owner: dict[int, list[int]] = {}
    for row, index in owners.items():
        by_owner.setdefault(index, []).append(row)
    more, begins, ends = [], [], []
    for index, one in ran.program.activities.items():
        if one.origin != index and one.op == ran.program.recorded[one.origin].op:
            for row in by_owner.get(one.origin, ()):
                more.append(row)
                begins.append(ran.started[index])
                ends.append(ran.ended[index])
    added = np.array([more, begins, ends], dtype=np.int64)
    return _Rows(
        np.concatenate([rows, added[0]]),
        np.concatenate([start, added[1]]),
        np.concatenate([end, added[2]]),
        copy=True,
    )


def _of_other_kinds(trace: Trace, ran: RankRun) -> list[_Rows]:
    """Collectives that a change adds: events of the recorded ones that they stand behind, renamed."""
    recorded, events = ran.program.recorded, trace.events
    made = {
        index: one
        for index, one in ran.program.activities.items()
        if one.origin != index and one.op != recorded[one.origin].op
    }
    if not made:
        return []
    owners = ran.program.events if ran.program.on_device else _gloo_owners(trace, ran)
    by_owner: dict[int, list[int]] = {}
    for row, index in owners.items():
        by_owner.setdefault(index, []).append(row)
    described = np.unique(trace.collective_args.event)
    described = described[events.thread[described] >= 0]
    issued, launched = {}, {}
    for point, begin, end in zip(ran.program.points, ran.begin, ran.end, strict=True):
        if point.launches is not None:
            launched[point.launches.index] = point.end
            issued[point.launches.index] = begin, end
    parts = []
    for index, one in made.items():
        on_device = by_owner.get(one.origin, [])
        since, (begin, end) = launched[one.origin], issued[index]
        holds = (events.start_ns[described] <= since) & (events.end_ns[described] >= since)
        linked = np.isin(events.correlation, events.correlation[on_device]) & (events.correlation >= 0)
        hosts = set(described[holds].tolist()) | set(np.flatnonzero(linked & (events.thread >= 0)).tolist())
        hosts -= set(on_device)
        rows = np.array([*on_device, *hosts], dtype=np.int64)
        here, there = len(on_device), len(hosts)
        starts = np.array([ran.started[index]] * here + [begin] * there, dtype=np.int64)
        ends = np.array([ran.ended[index]] * here + [end] * there, dtype=np.int64)
        parts.append(_Rows(rows, starts, ends, copy=True, kind=one.op))
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
