"""Ranks compared by their collectives: clocks, waits, transfers.

Clocks are aligned by the ends of collectives, which all ranks of a ring leave together: the offset between
two clocks is the median difference. With aligned clocks,

    wait     = latest start - own start       (at most the collective itself)
    transfer = end - latest start
    busbw    = wire bytes / transfer

A broadcast's root may leave before the last rank arrives: then no instant is common, and there is no
transfer to rate. Waiting is charged to the rank that came last (:mod:`fsdp2prof.analyzers.ranks.stragglers`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.ranks import stragglers
from fsdp2prof.analyzers.ranks.late_ranks import late_ranks
from fsdp2prof.analyzers.ranks.matching import Matched, match_collectives
from fsdp2prof.analyzers.ranks.stragglers import Lateness
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.results.communication import CrossRank, CrossRankGroup
from fsdp2prof.tables.columns import BoolArray, IntArray, concat_strings
from fsdp2prof.tables.trace import CollectiveTable
from fsdp2prof.vocabulary import op_label

_LEAVE_TOGETHER = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})
"""Operations whose ranks all end at the same instant, up to the last hop."""
_SLOWER, _TRANSFERS = 1.5, 3
"""How many times as long the transfers of a group take as those of the fastest, in so many at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankComparison:
    """Ranks compared: the result, and each rank's own waits for whoever explains its collectives."""

    result: CrossRank
    wait_ns: dict[int, IntArray]
    """Rank -> per row of its collectives, how long it waited for the last rank; -1 unmatched."""
    waits_known: dict[int, BoolArray]
    """Rank -> per row of its collectives, whether all ranks of its group were compared."""
    lateness: dict[int, dict[int, list[tuple[Lateness, int]]]]
    """Rank -> row of its collectives -> weighted causes of the last rank's lateness."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meeting:
    """Matched rows on aligned clocks."""

    start: IntArray
    wait: IntArray
    """Per row; -1 where the clocks of its collective cannot be compared."""
    transfer: IntArray
    """Per collective: from the latest start to the (median) end; -1 without a common instant."""
    start_spread: IntArray
    """Per collective: latest start minus earliest."""
    end_spread: IntArray
    """Per collective: latest end minus earliest."""


def match(summaries: Sequence[RankSummary]) -> RankComparison:
    """Compare ranks by their collectives; one rank alone gives an empty comparison.

    ``clock_offset_ns`` of the result is how far each clock is ahead of the lowest rank's.
    """
    summaries = sorted(summaries, key=lambda summary: summary.rank)
    matched = match_collectives(summaries)
    clocks = {name: i for i, name in enumerate(dict.fromkeys(s.clock for s in summaries))}
    clock = np.asarray([clocks[s.clock] for s in summaries], dtype=np.int64)
    start = matched.column([s.collectives.start_ns + s.base_ns for s in summaries])
    end = matched.column([s.collectives.end_ns + s.base_ns for s in summaries])
    offset, island = _align(
        matched, clock[matched.rank], end, _leaves_together(summaries, matched), len(clocks)
    )
    shift = offset[clock[matched.rank]]
    meeting = _meet(matched, start - shift, end - shift, island[clock[matched.rank]])
    step = matched.column([s.collectives.step for s in summaries])
    caused = stragglers.charge(matched, meeting.start, meeting.wait, step, len(summaries))
    slower = _slower(summaries, matched, meeting.transfer)
    explained, lateness = stragglers.explain(summaries, matched, meeting.start, meeting.wait, caused, slower)
    waits = _per_rank(summaries, matched, meeting.wait)
    whole = {
        s.rank: _waits_known(s, waits[s.rank], met)
        for s, met in zip(summaries, _met(summaries, matched), strict=True)
    }
    timed = {rank: wait[wait >= 0] for rank, wait in waits.items() if (wait >= 0).any()}
    result = CrossRank(
        match_key=next(iter(matched.keys), None),
        matched=matched.count,
        unmatched=sum(matched.unmatched.values()),
        clock_offset_ns={name: int(offset[i]) for name, i in clocks.items()} if timed else {},
        wait_ns={str(rank): int(wait.sum()) for rank, wait in timed.items()},
        stragglers=explained,
        matched_by=matched.keys,
        unmatched_reasons=matched.unmatched,
        wait_caused_ns={
            str(s.rank): int(caused.by_rank[i]) for i, s in enumerate(summaries) if s.rank in timed
        },
        late=late_ranks(summaries, matched, meeting.wait, caused),
        waits_unknown_ns=sum(_unknown_ns(s.collectives, whole[s.rank]) for s in summaries),
        wait_caused_in_steps_ns={
            str(s.rank): caused.by_step[i].tolist() for i, s in enumerate(summaries) if s.rank in timed
        },
        start_spread_ns=_median(meeting.start_spread),
        end_spread_ns=_median(meeting.end_spread),
        groups=_groups(summaries, matched, meeting),
    )
    warnings = list(matched.warnings)
    if np.any(meeting.wait < 0):
        warnings.append(
            "some ranks share no all-gather, reduce-scatter or all-reduce: their clocks cannot be aligned, "
            "and waits between them are unknown"
        )
    return RankComparison(
        result=result,
        wait_ns=waits,
        waits_known=whole,
        lateness=_lateness(summaries, matched, caused, lateness),
        warnings=warnings,
    )


def _slower(
    summaries: Sequence[RankSummary], matched: Matched, transfer: IntArray
) -> dict[int, tuple[int, str]]:
    """Return collectives of groups in which transfers take clearly longer than the same ones in other
    groups.

    The same collectives are those of one mesh dimension with equal operation, dtype and bytes. For each,
    the time beyond the median of the fastest group, and the text about it.
    """
    head = matched.first[:-1]
    if not len(head):
        return {}
    tables = [s.collectives for s in summaries]
    op = concat_strings([table.op for table in tables])
    texts = [op, *(concat_strings([getattr(t, name) for t in tables]) for name in ("dtype", "mesh_dim"))]
    lengths = np.cumsum([0, *(len(table) for table in tables)])
    at = (lengths[matched.rank] + matched.row)[head]
    sizes = [
        np.concatenate([getattr(t, name) for t in tables])[at] for name in ("payload_bytes", "group_size")
    ]
    codes = [column.codes[at] for column in texts]
    rated = np.flatnonzero((transfer > 0) & (sizes[0] >= 0) & (codes[2] >= 0))
    kinds = np.stack([*codes, *sizes])[:, rated]
    kind = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
    group = np.minimum.reduceat(matched.rank, head)[rated]
    found: dict[int, tuple[int, str]] = {}
    for one in range(int(kind.max(initial=-1)) + 1):
        mine = kind == one
        groups = {first: rated[mine & (group == first)] for first in np.unique(group[mine]).tolist()}
        usual = min(int(np.median(transfer[numbers])) for numbers in groups.values())
        for numbers in groups.values() if len(groups) > 1 else ():
            middle = int(np.median(transfer[numbers]))
            if len(numbers) >= _TRANSFERS and middle >= _SLOWER * usual:
                name = op_label(op[int(at[numbers[0]])] or "other")
                text = f"{name}s take {middle / usual:.2g} times as long as in other groups"
                more = (transfer[numbers] - usual).tolist()
                found |= {
                    number: (ns, text) for number, ns in zip(numbers.tolist(), more, strict=True) if ns > 0
                }
    return found


def _lateness(
    summaries: Sequence[RankSummary],
    matched: Matched,
    caused: stragglers.Caused,
    explained: dict[int, list[tuple[Lateness, int]]],
) -> dict[int, dict[int, list[tuple[Lateness, int]]]]:
    """Give every rank's row the causes of its collective's last rank being late."""
    found: dict[int, dict[int, list[tuple[Lateness, int]]]] = {one.rank: {} for one in summaries}
    rows = zip(matched.rank.tolist(), matched.row.tolist(), matched.collective.tolist(), strict=True)
    for rank, row, collective in rows:
        last = summaries[int(caused.latest[collective])].rank
        unknown = [(Lateness(last, None, "unknown", None), 1)]
        found[summaries[rank].rank][row] = explained.get(collective, unknown)
    return found


def _leaves_together(summaries: Sequence[RankSummary], matched: Matched) -> BoolArray:
    """Per row: whether its collective's end is an instant common to all ranks."""
    return matched.column(
        [s.collectives.op.matches(_LEAVE_TOGETHER.__contains__).astype(np.int64) for s in summaries]
    ).astype(np.bool_)


def _align(
    matched: Matched, clock: IntArray, end: IntArray, usable: BoolArray, clocks: int
) -> tuple[IntArray, IntArray]:
    """Return each clock's offset, and the island of mutually aligned clocks it belongs to.

    Clocks are nodes, medians of end differences are edges; a tree of the edges with most evidence reaches
    every clock that can be reached from the first one of its island.
    """
    head = np.repeat(matched.first[:-1], np.diff(matched.first))
    pairs = usable & (clock != clock[head])
    pair = np.stack([clock[head][pairs], clock[pairs]], axis=1)
    difference = (end - end[head])[pairs]
    edges: dict[int, list[tuple[int, int, int]]] = {node: [] for node in range(clocks)}
    order = np.lexsort((pair[:, 1], pair[:, 0]))
    pair, difference = pair[order], difference[order]
    opens = np.flatnonzero(np.any(np.diff(pair, axis=0, prepend=-1) != 0, axis=1))
    for first, last in itertools.pairwise([*opens.tolist(), len(pair)]):
        a, b = pair[first].tolist()
        values = difference[first:last]
        median = int(np.median(values - values[0])) + int(values[0])
        edges[a].append((-len(values), b, median))
        edges[b].append((-len(values), a, -median))
    offset = np.zeros(clocks, dtype=np.int64)
    island = np.full(clocks, -1, dtype=np.int64)
    for root in range(clocks):
        if island[root] >= 0:
            continue
        frontier = [(0, root, 0)]
        while frontier:
            _, node, value = heapq.heappop(frontier)
            if island[node] >= 0:
                continue
            island[node], offset[node] = root, value
            for weight, other, step in edges[node]:
                heapq.heappush(frontier, (weight, other, value + step))
    return offset, island


def _meet(matched: Matched, start: IntArray, end: IntArray, island: IntArray) -> _Meeting:
    """Compute waits and transfers on aligned times."""
    collective, first = matched.collective, matched.first[:-1]
    if not len(first):
        empty = np.empty(0, dtype=np.int64)
        return _Meeting(start=start, wait=start, transfer=empty, start_spread=empty, end_spread=empty)
    latest = np.maximum.reduceat(start, first)
    earliest_end = np.minimum.reduceat(end, first)
    latest_end = np.maximum.reduceat(end, first)
    together = np.minimum.reduceat(island, first) == np.maximum.reduceat(island, first)
    wait = np.maximum(np.minimum(latest[collective], end) - start, 0)
    common = together & (earliest_end > latest)
    return _Meeting(
        start=start,
        wait=np.where(together[collective], wait, -1),
        transfer=np.where(common, _medians(end, collective, matched.first) - latest, -1),
        start_spread=(latest - np.minimum.reduceat(start, first))[together],
        end_spread=(latest_end - earliest_end)[together],
    )


def _medians(values: IntArray, collective: IntArray, first: IntArray) -> IntArray:
    """Lower median of each collective's values."""
    order = np.lexsort((values, collective))
    middle: IntArray = values[order[(first[:-1] + first[1:] - 1) // 2]]
    return middle


def _median(values: IntArray) -> int | None:
    return int(np.median(values)) if len(values) else None


def _per_rank(summaries: Sequence[RankSummary], matched: Matched, wait: IntArray) -> dict[int, IntArray]:
    order = np.argsort(matched.rank, kind="stable")
    bounds = np.searchsorted(matched.rank[order], np.arange(len(summaries) + 1))
    waits = {}
    for index, summary in enumerate(summaries):
        column = np.full(len(summary.collectives), -1, dtype=np.int64)
        mine = order[bounds[index] : bounds[index + 1]]
        column[matched.row[mine]] = wait[mine]
        waits[summary.rank] = column
    return waits


def _met(summaries: Sequence[RankSummary], matched: Matched) -> list[IntArray]:
    """Per rank and row of its collectives, how many ranks were compared in it."""
    ranks = np.diff(matched.first)[matched.collective]
    met = [np.ones(len(summary.collectives), dtype=np.int64) for summary in summaries]
    for index, column in enumerate(met):
        mine = matched.rank == index
        column[matched.row[mine]] = ranks[mine]
    return met


def _waits_known(summary: RankSummary, wait: IntArray, met: IntArray) -> BoolArray:
    """Whether each row met all ranks of its group; of unknown size, a group is taken for the whole world."""
    size = summary.collectives.group_size
    needed = np.where(size > 0, size, summary.world_size or 2)
    known: BoolArray = (needed == 1) | ((wait >= 0) & (met >= needed))
    return known


def _unknown_ns(collectives: CollectiveTable, known: BoolArray) -> int:
    return int((collectives.end_ns - collectives.start_ns)[~known].sum())


def _groups(summaries: Sequence[RankSummary], matched: Matched, meeting: _Meeting) -> list[CrossRankGroup]:
    """Sum matched collectives by (layer, phase, op, process group), the largest total wait first."""
    tables = [s.collectives for s in summaries]
    head = matched.first[:-1]

    def codes(name: str) -> tuple[IntArray, tuple[str, ...]]:
        column = concat_strings([getattr(table, name) for table in tables])
        starts = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        rows = (starts[matched.rank] + matched.row)[head]
        return column.codes[rows].astype(np.int64), column.values

    if not len(head):
        return []
    names = ("fqn", "phase", "op", "process_group")
    columns = [codes(name) for name in names]
    distinct, inverse = np.unique(np.stack([c for c, _ in columns], axis=1), axis=0, return_inverse=True)
    wait = np.add.reduceat(np.maximum(meeting.wait, 0), head)
    wire = matched.column([table.wire_bytes for table in tables])[head]
    rows = []
    for i, key in enumerate(distinct.tolist()):
        mine = inverse.reshape(-1) == i
        fqn, phase, op, group = (
            values[code] if code >= 0 else None for code, (_, values) in zip(key, columns, strict=True)
        )
        rated = mine & (meeting.transfer > 0)
        known = rated & (wire >= 0)
        rows.append(
            CrossRankGroup(
                fqn=fqn,
                phase=phase or "other",
                op=op or "other",
                process_group=group,
                count=int(mine.sum()),
                wait_ns=int(wait[mine].sum()),
                transfer_ns=int(meeting.transfer[rated].sum()) if rated.any() else None,
                busbw_bytes_per_s=float(wire[known].sum() * 1e9 / meeting.transfer[known].sum())
                if known.any()
                else None,
            )
        )
    return sorted(rows, key=lambda row: -row.wait_ns)
