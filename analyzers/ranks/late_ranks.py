"""Which ranks are late together, in how many steps, and whether that can be chance.

In every step some rank comes last, so whoever caused most waiting is not yet slow. A set of ranks explains
the waiting if the ranks outside waited for each of its members clearly longer than that member waited for
them, and if this held in most steps. Waiting of the members for one another counts for nothing: two slow
ranks that take turns in being the last are both to blame.

If all ranks were alike, each set of *k* among *n* would be the late one with the same chance, so that some
set is late in *m* of *s* steps has a chance of at most ``C P(m or more of s)`` with ``C = n over k``, each
step having the chance ``1 / C``. Too few steps for that still tell a rank that causes nearly all waiting in
each of them, where each rank has its own device: on a busy CPU equal ranks also do that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.ranks.matching import Matched
from fsdp2prof.analyzers.ranks.stragglers import Caused
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.results.communication import LateRank, LateRanks
from fsdp2prof.tables.columns import BoolArray, IntArray

_CLEARLY = 2
"""How many times as long the others wait for a late rank as it waits for them."""
_SHARE = 0.1
"""Part of all waiting that a rank of the set has to cause."""
_MOST_STEPS = 0.75
"""Part of the steps in which every rank of the set has to be late."""
_CHANCE = 0.1
"""Probability of the same among equal ranks above which no rank is called slow."""
_NEARLY_ALL, _IN_STEPS = 0.95, 3
"""Part of the waiting of each step, of so many at least, that settles it whatever the chance."""
_LARGEST = 16
"""Ranks in the largest set that is looked for."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Waiting by step (rows) and position among the compared ranks (columns), in nanoseconds."""

    own: IntArray
    caused: IntArray
    between: IntArray
    """Step x causing x waiting rank, among the candidates only, in their order."""
    candidates: IntArray
    """Positions, the one that the others waited for longest first, net of its own waiting."""


def late_ranks(
    summaries: Sequence[RankSummary], matched: Matched, wait: IntArray, caused: Caused
) -> LateRanks | None:
    """Return the largest set of ranks that is late in most steps, otherwise the largest that caused the
    waiting.

    ``None`` if no rank is waited for clearly longer than it waits itself. A set is at most half the ranks.
    """
    known = np.flatnonzero(wait >= 0)
    compared = np.unique(matched.rank[known])
    if len(compared) < 2 or not int(wait[known].sum()):
        return None
    waiting = _sum_up(summaries, matched, wait, caused, known, compared)
    sets = [_set(summaries, compared, waiting, size) for size in range(1, len(waiting.candidates) + 1)]
    clear = [one for one in sets if one is not None]
    return max(clear, key=lambda one: (one.steady, len(one.ranks)), default=None)


def _sum_up(
    summaries: Sequence[RankSummary],
    matched: Matched,
    wait: IntArray,
    caused: Caused,
    known: IntArray,
    compared: IntArray,
) -> _Waiting:
    numbers = matched.column([summary.collectives.step for summary in summaries])
    step = np.unique(numbers[known], return_inverse=True)[1].reshape(-1)
    waits = np.searchsorted(compared, matched.rank[known])
    causes = np.searchsorted(compared, caused.latest[matched.collective[known]])
    shape = (int(step.max()) + 1, len(compared))
    own, charged = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    np.add.at(own, (step, waits), wait[known])
    np.add.at(charged, (step, causes), wait[known])
    net = charged.sum(axis=0) / (len(compared) - 1) - own.sum(axis=0)
    candidates = np.argsort(-net, kind="stable")[: min(len(compared) // 2, _LARGEST)]
    place = np.full(len(compared), -1, dtype=np.int64)
    place[candidates] = np.arange(len(candidates))
    among = (place[waits] >= 0) & (place[causes] >= 0)
    between = np.zeros((shape[0], len(candidates), len(candidates)), dtype=np.int64)
    np.add.at(between, (step[among], place[causes[among]], place[waits[among]]), wait[known][among])
    return _Waiting(own=own, caused=charged, between=between, candidates=candidates)


def _set(
    summaries: Sequence[RankSummary], compared: IntArray, waiting: _Waiting, size: int
) -> LateRanks | None:
    """Judge the first candidates; ``None`` if one of them does not cause its part of the waiting."""
    members, between = waiting.candidates[:size], waiting.between[:, :size, :size]
    outside = len(compared) - size
    caused = waiting.caused[:, members] - between.sum(axis=2)
    own = waiting.own[:, members] - between.sum(axis=1)
    total = int(waiting.own.sum())
    clear = caused.sum(axis=0) >= _CLEARLY * outside * own.sum(axis=0)
    if not np.all(clear & (caused.sum(axis=0) >= _SHARE * total)):
        return None
    late: BoolArray = caused > outside * own
    steps, together = len(late), int(late.all(axis=1).sum())
    by_step, charged = waiting.own.sum(axis=1), waiting.caused[:, members].sum(axis=1)
    least = float((charged[by_step > 0] / by_step[by_step > 0]).min())
    alike = math.comb(len(compared), size)
    odds = chance(steps, together, alike)
    return LateRanks(
        ranks=[
            LateRank(
                rank=summaries[int(compared[member])].rank,
                wait_caused_ns=int(caused[:, i].sum()),
                wait_ns=int(own[:, i].sum()),
                late_steps=int(late[:, i].sum()),
            )
            for i, member in enumerate(members)
        ],
        compared=len(compared),
        steps=steps,
        late_steps=together,
        explained_frac=int(charged.sum()) / total,
        least_explained_frac=least,
        chance=odds,
        steps_needed=_steps_needed(alike),
        steady=together >= _MOST_STEPS * steps
        and (odds <= _CHANCE or (steps >= _IN_STEPS and least >= _NEARLY_ALL)),
    )


def chance(steps: int, late: int, alike: int) -> float:
    """Bound the chance that one of so many like sets is late in so many steps or more."""
    some = sum(
        math.comb(steps, n) * (1 / alike) ** n * (1 - 1 / alike) ** (steps - n)
        for n in range(late, steps + 1)
    )
    return min(1.0, alike * some)


def _steps_needed(alike: int) -> int:
    """Least number of steps, late in each, that is not a coincidence."""
    return next(steps for steps in range(2, 64) if chance(steps, steps, alike) <= _CHANCE)
