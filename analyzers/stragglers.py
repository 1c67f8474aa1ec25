"""Who came last, and what it was doing: a wait has a rank, a layer and a piece of work behind it.

Every nanosecond that ranks wait in a collective is charged to the rank that entered it last. What made it
late is what it did more of than its peers since the group's previous collective: kernels of one layer, or
nothing at all (its host launched late).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.matching import Matched
from fsdp2prof.analyzers.rank_summary import RankSummary
from fsdp2prof.results import Straggler
from fsdp2prof.tables import IntArray

__all__ = ["Caused", "charge", "explain"]

_EXAMINED = 500
"""Collectives examined, the costliest first."""
_PEERS = 33
"""Peers that a late rank is compared with: enough for a median."""
_REPORTED = 20
"""Stragglers reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caused:
    """Waiting charged to the ranks that came last."""

    latest: IntArray
    """Per collective: position of the last rank among the summaries."""
    caused_ns: IntArray
    """Per collective: waiting of the others, summed over them."""
    by_rank: IntArray
    """Per rank; sums to all waiting."""


def charge(matched: Matched, start: IntArray, wait: IntArray, ranks: int) -> Caused:
    """Charge each collective's waiting to its last rank. ``start`` is on aligned clocks, -1 waits unknown."""
    waited = np.maximum(wait, 0)
    collective = matched.collective
    order = np.lexsort((start, collective))
    last = order[matched.first[1:] - 1]
    caused = np.zeros(matched.count, dtype=np.int64)
    np.add.at(caused, collective, waited)
    by_rank = np.zeros(ranks, dtype=np.int64)
    np.add.at(by_rank, matched.rank[last], caused)
    return Caused(latest=matched.rank[last], caused_ns=caused, by_rank=by_rank)


def explain(summaries: Sequence[RankSummary], matched: Matched, caused: Caused) -> list[Straggler]:
    """Name the costliest stragglers with their layer and work, the worst first."""
    found: dict[tuple[int, str | None, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    names: dict[tuple[int, str | None, str], str] = {}
    costliest = np.argsort(-caused.caused_ns, kind="stable")[:_EXAMINED]
    for collective in costliest[caused.caused_ns[costliest] > 0]:
        members = slice(matched.first[collective], matched.first[collective + 1])
        fqn, kind, text, excess = _reason(
            summaries, matched.rank[members], matched.row[members], int(caused.latest[collective])
        )
        key = (summaries[int(caused.latest[collective])].rank, fqn, kind)
        total = found[key]
        total[0] += int(caused.caused_ns[collective])
        total[1] += 1
        if excess >= total[2]:
            total[2], names[key] = excess, text
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:_REPORTED]
    return [
        Straggler(
            rank=rank,
            fqn=fqn,
            wait_caused_ns=total,
            cause=names[rank, fqn, kind],
            kind=kind,
            collectives=count,
        )
        for (rank, fqn, kind), (total, count, _) in ranked
    ]


def _reason(
    summaries: Sequence[RankSummary], ranks: IntArray, rows: IntArray, latest: int
) -> tuple[str | None, str, str, int]:
    """Return (layer, kind, text, excess ns) of what the last rank did more of than its median peer."""
    peers: dict[str | None, list[int]] = defaultdict(list)
    gaps, comms = [], []
    own = int(rows[ranks == latest][0])
    ranks, rows = ranks[ranks != latest], rows[ranks != latest]
    chosen = np.unique(np.linspace(0, len(ranks) - 1, min(len(ranks), _PEERS)).astype(np.int64))
    for rank, row in zip(ranks[chosen].tolist(), rows[chosen].tolist(), strict=True):
        summary = summaries[rank]
        for fqn, duration, _ in _layers(summary, row):
            peers[fqn].append(duration)
        gaps.append(int(summary.gap_ns[row]))
        comms.append(int(summary.comm_ns[row]))
    late = summaries[latest]
    others = len(chosen)
    candidates = []
    for fqn, duration, kernel in _layers(late, own):
        excess = duration - _median([*peers[fqn], *[0] * (others - len(peers[fqn]))])
        candidates.append((excess, fqn, "kernel", f"kernels, the longest of them {kernel}"))
    gap = int(late.gap_ns[own]) - _median(gaps)
    candidates.append((gap, late.gap_fqn[own], "host", "a gap on the host: nothing was launched in time"))
    comm = int(late.comm_ns[own]) - _median(comms)
    candidates.append((comm, late.collectives.fqn[own], "communication", "waiting for another collective"))
    excess, fqn, kind, text = max(candidates, key=lambda candidate: candidate[0])
    if excess <= 0:
        known = len(candidates) > 2 or late.gap_ns[own] or late.comm_ns[own]
        since = "the group's previous collective" if known else "the recording began"
        return late.collectives.fqn[own], "unknown", f"late since before {since}", 0
    return fqn, kind, text, excess


def _layers(summary: RankSummary, row: int) -> list[tuple[str | None, int, str | None]]:
    low, high = np.searchsorted(summary.work.collective, [row, row + 1])
    work = summary.work
    return [(work.fqn[i], int(work.duration_ns[i]), work.longest[i]) for i in range(low, high)]


def _median(values: list[int]) -> int:
    return int(np.median(values)) if values else 0
