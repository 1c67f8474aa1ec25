"""Tracks of the merged trace: a rank's rows, their names, and slices that nest in them.

Perfetto draws the slices of a row inside one another: two that overlap without one containing the other
need two rows. :func:`nested` puts such slices in separate rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fsdp2prof.analyzers.ranks.matching import match_collectives
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.vocabulary import CATEGORIES, layer_name, printable

Event: TypeAlias = dict[str, Any]
"""One event of the Trace Event Format."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

_ROWS = 1 << 10
"""Rows that a track can grow to."""


class Slice(NamedTuple):
    """Something that took time, in a rank's own nanoseconds."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: Mapping[str, Any] = _NOTHING


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of a track by column, with times in the rank's own nanoseconds."""

    start_ns: IntArray
    end_ns: IntArray
    titles: Sequence[str]
    """JSON of a slice's name and category, as :func:`title`."""
    args: Sequence[str]
    """JSON of further known data, or empty."""

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Slices:
        """Return slices as columns."""
        rows = list(slices)
        return cls(
            np.array([one.start_ns for one in rows], dtype=np.int64),
            np.array([one.end_ns for one in rows], dtype=np.int64),
            [title(one.name, one.category) for one in rows],
            [as_json(one.args) if one.args else "" for one in rows],
        )


@lru_cache(maxsize=1 << 16)
def title(name: str, category: str) -> str:
    """Return an event's descriptive keys, as JSON."""
    return f'"name":{as_json(name)},"cat":{as_json(category)}'


def as_json(value: Any) -> str:
    """Encode a value."""
    return msgspec.json.encode(value).decode()


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a rank, and the rows added to it where slices overlap."""

    number: int
    name: str
    order: int
    """Rows of a rank are shown by this number."""

    def tid(self, row: int) -> int:
        """Return the thread id of a row."""
        return self.number * _ROWS + row

    def named(self, pid: int, row: int) -> Iterator[Event]:
        """Yield the metadata of a row."""
        tid = self.tid(row)
        name = self.name if row == 0 else f"{self.name} ({row + 1})"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": self.order * _ROWS + row},
        }


def named_process(pid: int, name: str, labels: str = "") -> Iterator[Event]:
    """Yield the metadata of a process."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    if labels:
        yield {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": labels}}


def nested(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the first row in which each slice nests; they are ordered by start, the longer first."""
    rows: list[list[int]] = [[]]
    first, placed = rows[0], []
    for start, end in zip(starts, ends, strict=True):
        while first and first[-1] <= start:
            first.pop()
        if not first or end <= first[-1]:
            first.append(end)
            placed.append(0)
            continue
        row = next((row for row in range(1, len(rows)) if _fits(rows[row], start, end)), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(end)
        placed.append(row)
    return placed


def _fits(open_ends: list[int], start: int, end: int) -> bool:
    """Whether a slice lies inside the innermost of a row that has not ended; forget those that have."""
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]


def track_events(track: Track, slices: Slices, pid: int, clock: RankClock) -> tuple[list[str], IntArray]:
    """Encode a track: metadata of its rows, slices by start. Return the thread id of each slice, too."""
    order = np.lexsort((-slices.end_ns, slices.start_ns))
    start, end = slices.start_ns[order], slices.end_ns[order]
    rows = nested(start.tolist(), end.tolist())
    tids = np.array([track.tid(row) for row in range(max(rows, default=-1) + 1)], dtype=np.int64)[rows]
    lines = [as_json(event) for row in range(max(rows, default=-1) + 1) for event in track.named(pid, row)]
    times = clock.each_us(start), ((end - start) / _US).tolist()
    titles, args = slices.titles, slices.args
    lines += [
        f'{{"ph":"X",{titles[i]},"pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur}'
        + (f',"args":{args[i]}}}' if args[i] else "}")
        for i, tid, ts, dur in zip(order.tolist(), tids.tolist(), *times, strict=True)
    ]
    of_slice = np.empty(len(order), dtype=np.int64)
    of_slice[order] = tids
    return lines, of_slice


def counter(pid: int, name: str, time_us: float, values: Mapping[str, int | float]) -> Event:
    """Return one sample of a counter; several values are stacked."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time_us, "args": dict(values)}


def flow(kind: str, name: str, category: str, number: int, pid: int, tid: int, time_us: float) -> Event:
    """Return a point of an arrow: ``s`` starts it, ``t`` continues it, ``f`` ends it, at the slice that
    contains it."""
    event: Event = {
        "ph": kind, "name": name, "cat": category, "id": number, "pid": pid, "tid": tid, "ts": time_us,
    }  # fmt: skip
    return event | {"bp": "e"} if kind == "f" else event


_US = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankClock:
    """From a rank's own nanoseconds to the merged trace's microseconds."""

    shift_ns: int
    """Added to the rank's own times."""
    aligned: bool = True
    """Whether the rank's clock is known to agree with the others."""

    def us(self, time_ns: int) -> float:
        """Return a time in microseconds; exact to the nanosecond for 52 days."""
        return (time_ns + self.shift_ns) / _US

    def each_us(self, times_ns: IntArray) -> list[float]:
        """Return times in microseconds."""
        microseconds: list[float] = ((times_ns + self.shift_ns) / _US).tolist()
        return microseconds


def rank_clocks(summaries: Sequence[RankSummary], analysis: TraceAnalysis) -> dict[int, RankClock]:
    """Return the clock of every rank that was analysed.

    Offsets come from the comparison of the ranks. A clock of which nothing is known begins, like the first
    one, with its rank's first step.
    """
    offsets = analysis.cross_rank.clock_offset_ns
    steps = {rank.rank: min(step.start_ns for step in rank.steps) for rank in analysis.ranks if rank.steps}
    clocks = {one.clock for one in summaries}
    known = clocks if len(clocks) == 1 else clocks & offsets.keys()
    true = {one.rank: one.base_ns - offsets.get(one.clock, 0) for one in summaries if one.clock in known}
    begin = min((steps[rank] + shift for rank, shift in true.items() if rank in steps), default=0)
    return {
        one.rank: RankClock(shift_ns=true[one.rank] - begin)
        if one.rank in true
        else RankClock(shift_ns=-steps.get(one.rank, 0), aligned=False)
        for one in summaries
    }


_INSIDE_NS = 1000
"""How far inside a slice its point lies, at most half of the slice."""


@dataclass(frozen=True, slots=True)
class FlowPoint:
    """Where an arrow passes through one rank's collective."""

    number: int
    """Of the collective, from 1."""
    kind: str
    """``s`` at the rank that was first, ``t``, ``f`` at the last one."""
    time_ns: int
    """On the rank's own clock."""


def collective_flows(
    summaries: Sequence[RankSummary], clocks: Mapping[int, RankClock]
) -> dict[int, dict[int, FlowPoint]]:
    """Return rank -> row among its analysed collectives -> the point of its arrow."""
    summaries = sorted(summaries, key=lambda summary: summary.rank)
    matched = match_collectives(summaries)
    points: dict[int, dict[int, FlowPoint]] = defaultdict(dict)
    if not matched.count:
        return points
    start = matched.column([one.collectives.start_ns for one in summaries])
    end = matched.column([one.collectives.end_ns for one in summaries])
    own = start + np.minimum((end - start) // 2, _INSIDE_NS)
    shift = np.array([clocks[one.rank].shift_ns for one in summaries])
    common = own + shift[matched.rank]
    for collective in range(matched.count):
        rows = np.arange(matched.first[collective], matched.first[collective + 1])
        rows = rows[np.argsort(common[rows], kind="stable")]
        kinds = ["s", *["t"] * (len(rows) - 2), "f"]
        for row, kind in zip(rows.tolist(), kinds, strict=True):
            rank = summaries[int(matched.rank[row])].rank
            points[rank][int(matched.row[row])] = FlowPoint(collective + 1, kind, int(own[row]))
    return points


_TRACK = Track(4, "findings", 0)


def finding_events(analysis: TraceAnalysis, clocks: Mapping[int, RankClock]) -> Iterator[Event]:
    """Yield every finding as an instant in the process of the rank that it is about, with a track's name."""
    named: set[int] = set()
    for finding in analysis.findings:
        rank, time_ns = _place(finding, analysis)
        if rank not in clocks:
            continue
        if rank not in named:
            named.add(rank)
            yield from _TRACK.named(rank, 0)
        where = "" if finding.fqn is None else f"{layer_name(finding.fqn)}: "
        yield {
            "ph": "i",
            "s": "t",
            "name": printable(f"{finding.severity}: {where}{finding.id.replace('_', ' ')}"),
            "cat": "finding",
            "pid": rank,
            "tid": _TRACK.tid(0),
            "ts": clocks[rank].us(time_ns),
            "args": {"message": printable(finding.message), "id": finding.id},
        }


def _place(finding: Finding, analysis: TraceAnalysis) -> tuple[int, int]:
    """Return the rank and its own time: of the largest group of the layer, otherwise of the first step."""
    told = finding.evidence.get("rank")
    ranks = {rank.rank: rank for rank in analysis.ranks if rank.steps}
    mine = [
        row
        for row in analysis.groups
        if row.fqn == finding.fqn and row.rank in ranks and (told is None or row.rank == told)
    ]
    if finding.fqn is not None and mine:
        worst = max(mine, key=lambda row: row.exposed_ns)
        steps = {step.step: step for step in ranks[worst.rank].steps}
        if worst.step in steps:
            return worst.rank, steps[worst.step].start_ns
    rank = told if isinstance(told, int) and told in ranks else min(ranks, default=-1)
    return rank, min((step.start_ns for step in ranks[rank].steps), default=0) if rank in ranks else 0


_FIRST_PROCESS = 1 << 20
"""Above every rank's."""

_MEMORY_TRACK = Track(1, "phase", 0)


def memory_events(memory: RankMemory, position: int) -> Iterator[Event]:
    """Yield the allocated bytes by category, the reserved bytes, and the phases; ``position`` numbers it."""
    times = memory.timeline.get("time_ns", [])
    if not times or min(times) < 0:
        return
    pid = _FIRST_PROCESS + position
    yield from named_process(
        pid, f"memory of rank {memory.rank}, {memory.device}", "a later step, on its own clock"
    )
    yield from _MEMORY_TRACK.named(pid, 0)
    for span in memory.phase_spans:
        yield {
            "ph": "X",
            "name": span.phase,
            "cat": "fsdp",
            "pid": pid,
            "tid": _MEMORY_TRACK.tid(0),
            "ts": (span.start_ns - times[0]) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
        }
    columns = {
        word.label: memory.timeline[name] for name, word in CATEGORIES.items() if name in memory.timeline
    }
    reserved = memory.timeline.get("reserved")
    for row, time in enumerate(times):
        us = (time - times[0]) / 1000
        yield counter(pid, "allocated bytes", us, {label: column[row] for label, column in columns.items()})
        if reserved:
            yield counter(pid, "reserved bytes", us, {"reserved": reserved[row]})
