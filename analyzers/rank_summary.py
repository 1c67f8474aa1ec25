"""One rank reduced to what a comparison over ranks needs: its collectives, and the work before each.

Ranks meet in their collectives. Between two meetings of one process group a rank computes, waits for its
host, or waits for other communication; what a late rank did more of than its peers is what made it late.
:func:`summarise` keeps that per collective and layer, a few hundred bytes a collective, so that thousands of
ranks can be compared without ever holding their events together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.tables import BoolArray, CollectiveTable, IntArray, Strings, Table

__all__ = ["DeviceWork", "RankSummary", "SegmentWork", "summarise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWork(Table):
    """Everything a rank's device ran (CPU: its operators), in any order, each with its layer."""

    start_ns: IntArray
    end_ns: IntArray
    name: Strings
    fqn: Strings
    """Module it was launched for; null unknown."""
    is_comm: BoolArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentWork(Table):
    """Work before collectives: one row per (collective, layer)."""

    collective: IntArray
    """Row of the collective; ascending."""
    fqn: Strings
    duration_ns: IntArray
    """Kernel time of this layer between the group's previous collective and this one."""
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
    group_ranks: Mapping[str, str]
    """Process group name -> its ranks as written; may be truncated or missing."""
    work: SegmentWork
    gap_ns: IntArray
    """Per collective: time before it with nothing on the device, i.e. nothing launched in time."""
    gap_fqn: Strings
    """Per collective: layer whose work ended the longest such gap."""
    comm_ns: IntArray
    """Per collective: time before it in which only other collectives ran."""


def summarise(
    collectives: CollectiveTable,
    device: DeviceWork,
    *,
    rank: int,
    clock: str | None = None,
    base_ns: int = 0,
    group_ranks: Mapping[str, str] | None = None,
) -> RankSummary:
    """Reduce one rank's tables to a summary. ``clock`` is its host's name where known."""
    start, end = _segments(collectives)
    plain = device.take(~device.is_comm)
    gap_ns, gap_fqn, comm_ns = _gaps(start, end, plain, device.take(device.is_comm), collectives.fqn)
    return RankSummary(
        rank=rank,
        clock=f"rank {rank}" if clock is None else clock,
        base_ns=base_ns,
        collectives=collectives,
        group_ranks=group_ranks or {},
        work=_work(start, end, plain, collectives.process_group),
        gap_ns=gap_ns,
        gap_fqn=gap_fqn,
        comm_ns=comm_ns,
    )


def _segments(collectives: CollectiveTable) -> tuple[IntArray, IntArray]:
    """From the end of the group's previous collective to this one's start; empty for the first."""
    start = collectives.start_ns.copy()
    for code in np.unique(collectives.process_group.codes):
        rows = np.flatnonzero(collectives.process_group.codes == code)
        reach = np.maximum.accumulate(collectives.end_ns[rows])
        start[rows[1:]] = np.minimum(reach[:-1], collectives.start_ns[rows[1:]])
    return start, collectives.start_ns


def _work(start: IntArray, end: IntArray, plain: DeviceWork, groups: Strings) -> SegmentWork:
    parts = []
    for code in np.unique(groups.codes):
        rows = np.flatnonzero((groups.codes == code) & (end > start))
        piece, piece_start, piece_end = intervals.cut(
            plain.start_ns, plain.end_ns, np.concatenate([start[rows], end[rows]])
        )
        segment = intervals.containing(start[rows], end[rows], piece_start)
        inside = segment >= 0
        parts.append((rows[segment[inside]], piece[inside], (piece_end - piece_start)[inside]))
    row, piece, length = (
        (np.concatenate(columns) for columns in zip(*parts, strict=True))
        if parts
        else (np.empty(0, dtype=np.int64),) * 3
    )
    fqn = plain.fqn.codes[piece]
    order = np.lexsort((length, fqn, row))
    row, fqn, piece, length = row[order], fqn[order], piece[order], length[order]
    opens = np.ones(len(row), dtype=np.bool_)
    opens[1:] = (row[1:] != row[:-1]) | (fqn[1:] != fqn[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(row)) - 1 if len(row) else first
    return SegmentWork(
        collective=row[first],
        fqn=Strings(fqn[first], plain.fqn.values),
        duration_ns=np.add.reduceat(length, first) if len(first) else length,
        longest=plain.name.take(piece[last]),
    )


def _gaps(
    start: IntArray, end: IntArray, plain: DeviceWork, comm: DeviceWork, own: Strings
) -> tuple[IntArray, Strings, IntArray]:
    """Return per segment: idle time, the layer that ended its longest gap, time under other collectives."""
    busy = intervals.union(plain.start_ns, plain.end_ns)
    either = intervals.union(
        np.concatenate([plain.start_ns, comm.start_ns]), np.concatenate([plain.end_ns, comm.end_ns])
    )
    busy_ns = intervals.covered(busy, start, end)
    either_ns = intervals.covered(either, start, end)
    known = plain.take(plain.fqn.codes >= 0)
    known = known.take(np.argsort(known.start_ns, kind="stable"))
    layers = own.to_list()
    for row in np.flatnonzero(end - start > either_ns):
        low = np.searchsorted(either.end, start[row], side="right")
        high = np.searchsorted(either.start, end[row], side="left")
        opens = np.concatenate([[start[row]], either.end[low:high]])
        closes = np.concatenate([either.start[low:high], [end[row]]])
        after = int(np.searchsorted(known.start_ns, closes[np.argmax(closes - opens)], side="left"))
        if after < len(known) and known.start_ns[after] < end[row]:
            layers[row] = known.fqn[after]
    return end - start - either_ns, Strings.intern(layers), either_ns - busy_ns
