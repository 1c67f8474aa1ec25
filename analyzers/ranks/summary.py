"""One rank reduced to what a comparison over ranks needs: its collectives, and the work between them.

All ranks run one program, so the work that a rank launches between two collectives is the same work on every
rank, whenever it runs. What took longer there than on its peers is what made a rank late. :func:`summarise`
keeps that per collective and layer, a few hundred bytes a collective, so that thousands of ranks can be
compared without ever holding their events together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table
from fsdp2prof.tables.trace import CollectiveTable

GARBAGE = "garbage collection"
"""In place of a line: most of the gap was that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork(Table):
    """Everything a rank's device ran (CPU: its operators), in any order, each with its layer."""

    start_ns: IntArray
    end_ns: IntArray
    launch_ns: IntArray
    """Host time of its launch; -1 unknown."""
    name: Strings
    fqn: Strings
    """Module it was launched for; null unknown."""
    is_comm: BoolArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentWork(Table):
    """Work launched between a collective and the one before it: one row per (collective, layer)."""

    collective: IntArray
    """Row of the collective that ends the segment; ascending."""
    fqn: Strings
    duration_ns: IntArray
    """Kernel time of this layer in the segment."""
    end_ns: IntArray
    """When the last of it ended."""
    longest: Strings
    """Name of the longest kernel among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """One rank, ready to be compared."""

    rank: int
    clock: str
    """Ranks with equal names share a clock: the host, or the rank itself when the host is unknown."""
    base_ns: int
    """Added to the tables' times to get the clock's."""
    collectives: CollectiveTable
    world_size: int | None
    group_ranks: Mapping[str, str]
    """Process group name -> its ranks as written; may be truncated or missing."""
    work: SegmentWork
    gap_ns: IntArray
    """Per collective: time in its segment with nothing left to run, because nothing was launched in time."""
    gap_end_ns: IntArray
    """Per collective: when the longest such gap ended; -1 without one."""
    gap_fqn: Strings
    """Per collective: layer whose work ended the longest such gap."""
    gap_loading_ns: IntArray
    """Per collective: part of ``gap_ns`` in which the training got its next batch."""
    gap_line: Strings
    """Per collective: the most frequent Python line of the host in the longest such gap, or
    :data:`GARBAGE`; null if it was not sampled."""


def summarise(
    collectives: CollectiveTable,
    device: DeviceWork,
    *,
    rank: int,
    clock: str | None = None,
    base_ns: int = 0,
    world_size: int | None = None,
    group_ranks: Mapping[str, str] | None = None,
    loading: Intervals | None = None,
    lines: Callable[[IntArray, IntArray], Sequence[str | None]] | None = None,
) -> RankSummary:
    """Reduce one rank's tables to a summary.

    ``clock`` is its host's name if known. ``loading`` is when the training got its batches; ``lines``
    gives the line (or :data:`GARBAGE`) of each interval of host time, from its start to its end.
    """
    work_launch_ns = np.where(device.is_comm, -1, device.launch_ns)
    gaps = _gaps(collectives, device, loading, lines)
    return RankSummary(
        rank=rank,
        clock=f"rank {rank}" if clock is None else clock,
        base_ns=base_ns,
        collectives=collectives.compact(),
        world_size=world_size,
        group_ranks=group_ranks or {},
        work=_work(device, _segments(collectives, work_launch_ns)).compact(),
        gap_ns=gaps.length_ns,
        gap_end_ns=gaps.end_ns,
        gap_fqn=gaps.fqn,
        gap_loading_ns=gaps.loading_ns,
        gap_line=gaps.line,
    )


def _segments(collectives: CollectiveTable, launch_ns: IntArray) -> IntArray:
    """Row of the collective issued next after each launch; -1 if none, or if the launch is unknown."""
    row = np.argsort(collectives.issue_ns, kind="stable")
    following = np.searchsorted(collectives.issue_ns[row], launch_ns, side="left")
    return np.where(launch_ns >= 0, np.append(row, -1)[following], -1)


def _work(work: DeviceWork, segment: IntArray) -> SegmentWork:
    inside = np.flatnonzero(segment >= 0)
    inside = inside[np.lexsort((work.fqn.codes[inside], segment[inside]))]
    row, fqn = segment[inside], work.fqn.codes[inside]
    duration = work.end_ns[inside] - work.start_ns[inside]
    opens = np.ones(len(row), dtype=np.bool_)
    opens[1:] = (row[1:] != row[:-1]) | (fqn[1:] != fqn[:-1])
    first = np.flatnonzero(opens)
    return SegmentWork(
        collective=row[first],
        fqn=Strings(fqn[first], work.fqn.values),
        duration_ns=np.add.reduceat(duration, first) if len(first) else duration,
        end_ns=np.maximum.reduceat(work.end_ns[inside], first) if len(first) else duration,
        longest=work.name.take(inside[_longest(duration, first)]),
    )


def _longest(length: IntArray, first: IntArray) -> IntArray:
    """Return the row of the longest of each group (of several the last); ``first`` are the groups' first."""
    if not len(first):
        return first
    sizes = np.diff(first, append=len(length))
    among = np.flatnonzero(length == np.repeat(np.maximum.reduceat(length, first), sizes))
    return among[np.searchsorted(among, first + sizes) - 1]


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Per segment: time with an empty queue, and its longest gap's end, layer that ended it, and line."""

    length_ns: IntArray
    end_ns: IntArray
    fqn: Strings
    loading_ns: IntArray
    line: Strings


def _gaps(
    collectives: CollectiveTable,
    device: DeviceWork,
    loading: Intervals | None,
    lines: Callable[[IntArray, IntArray], Sequence[str | None]] | None,
) -> _Gaps:
    busy = intervals.union(device.start_ns, device.end_ns)
    by_start = np.argsort(device.start_ns, kind="stable")
    start, end = busy.end[:-1], busy.start[1:]
    following = by_start[np.searchsorted(device.start_ns[by_start], end, side="left")]
    launch = device.launch_ns[following]
    segment = _segments(collectives, launch)
    empty = np.where(segment >= 0, np.clip(launch, start, end) - start, 0)
    rows = np.flatnonzero(empty > 0)
    rows = rows[np.argsort(segment[rows], kind="stable")]
    longest = rows[_longest(empty[rows], np.flatnonzero(np.diff(segment[rows], prepend=-1)))]
    gap_ns = np.zeros(len(collectives), dtype=np.int64)
    np.add.at(gap_ns, segment[rows], empty[rows])
    loading_ns = np.zeros(len(collectives), dtype=np.int64)
    if loading is not None:
        np.add.at(
            loading_ns, segment[rows], intervals.covered(loading, start[rows], start[rows] + empty[rows])
        )
    ended = np.full(len(collectives), -1, dtype=np.int64)
    ended[segment[longest]] = end[longest]
    layers = collectives.fqn.to_list()
    for row, fqn in zip(
        segment[longest].tolist(), device.fqn.take(following[longest]).to_list(), strict=True
    ):
        layers[row] = collectives.fqn[row] if fqn is None else fqn
    seen: list[str | None] = [None] * len(collectives)
    if lines is not None:
        found = lines(start[longest], start[longest] + empty[longest])
        for row, line in zip(segment[longest].tolist(), found, strict=True):
            seen[row] = line
    return _Gaps(gap_ns, ended, Strings.intern(layers), loading_ns, Strings.intern(seen))
