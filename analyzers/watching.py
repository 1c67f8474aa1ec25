"""``watch``: the last steps of every rank, and which rank the others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low

from fsdp2prof.analyzers.ranks.late_ranks import chance
from fsdp2prof.manifest import WatchedStep
from fsdp2prof.results.watch import WatchedRank, WatchedRun, WatchedTime
from fsdp2prof.units import format_bytes, format_frac, format_ns

_WORTH_NAMING = 0.05
"""Share of a step from which a rank is called slow."""
_MOST_STEPS = 0.75
"""Part of the steps in which a slow rank has to need most."""
_CHANCE = 0.01
"""Chance of the same among ranks that are alike, up to which one is called slow: a job is looked at often."""
_WORTH_GROWTH = 0.01
"""Share of the peak from which the verdict names its growth."""
_STATES_MADE = 2
"""Step in which the optimizer's states and the allocator's blocks are there."""


def watch_steps(
    steps: Mapping[int, Sequence[WatchedStep]],
    *,
    path: str,
    state: str,
    window: int,
    tokens_per_step: int | None = None,
    warnings: Sequence[str] = (),
) -> WatchedRun:
    """Sum up the last ``window`` steps of each rank; every rank has one or more.

    Collectives make all ranks equally slow. So the slow one is the rank whose step is least waiting: what it
    needs itself, ``busy``, is compared step by step. It is named if it needs most in so many steps that ranks
    that are alike would hardly.
    """
    behind = _behind(steps, window)
    ranks = [
        replace(
            _rank(rank, lines[-window:]), behind_ns=round(median(behind[rank])) if rank in behind else None
        )
        for rank, lines in sorted(steps.items())
    ]
    step_ns = round(median(rank.step_ns for rank in ranks))
    exposed = [
        rank.exposed_ns / rank.step_ns for rank in ranks if rank.exposed_ns is not None and rank.step_ns
    ]
    last = [rank.last_step for rank in ranks]
    result = WatchedRun(
        path=path,
        state=state,
        window=window,
        last_step=min(last),
        step_ns=step_ns,
        exposed_frac=median(exposed) if exposed else None,
        tokens_per_s=tokens_per_step * 1e9 / step_ns if tokens_per_step is not None and step_ns else None,
        step_spread=max(last) - min(last),
        ranks=sorted(ranks, key=lambda rank: (-(rank.behind_ns or 0), rank.rank)),
        steps=_times(steps, window),
        warnings=list(warnings),
    )
    return _with_verdict(result, behind)


def _behind(steps: Mapping[int, Sequence[WatchedStep]], window: int) -> dict[int, list[int]]:
    """Rank -> what it needed itself beyond the typical rank, in each step that all of them measured.

    Typical is the median, of two in the middle the lower one; empty where fewer than two ranks compare.
    """
    busy = {
        rank: {
            line.step: line.duration_ns - line.exposed_ns
            for line in _measured(lines[-window:])
            if line.exposed_ns is not None
        }
        for rank, lines in steps.items()
    }
    known = {rank: needed for rank, needed in busy.items() if needed}
    common = sorted(set.intersection(*(set(needed) for needed in known.values()))) if known else []
    if len(known) < 2 or not common:
        return {}
    typical = {step: median_low(needed[step] for needed in known.values()) for step in common}
    return {rank: [needed[step] - typical[step] for step in common] for rank, needed in known.items()}


def _measured(lines: Sequence[WatchedStep]) -> list[WatchedStep]:
    """Steps in which nothing was recorded; all steps if there are none."""
    return [line for line in lines if line.kind == "plain"] or list(lines)


def _rank(rank: int, lines: Sequence[WatchedStep]) -> WatchedRank:
    measured = _measured(lines)
    known = [(line.exposed_ns, line.duration_ns) for line in measured if line.exposed_ns is not None]
    newest, oldest = lines[-1], _settled(lines)
    peak, first_peak = (
        line.reserved_peak_bytes if line.reserved_peak_bytes is not None else line.resident_peak_bytes
        for line in (newest, oldest)
    )
    return WatchedRank(
        rank=rank,
        last_step=newest.step,
        step_ns=round(median(line.duration_ns for line in measured)),
        exposed_ns=round(median(exposed for exposed, _ in known)) if known else None,
        busy_ns=round(median(duration - exposed for exposed, duration in known)) if known else None,
        behind_ns=None,
        allocated_peak_bytes=newest.allocated_peak_bytes,
        reserved_peak_bytes=newest.reserved_peak_bytes,
        resident_peak_bytes=newest.resident_peak_bytes,
        peak_bytes=peak,
        growth_bytes=None if peak is None or first_peak is None else peak - first_peak,
        retries=newest.retries,
    )


def _settled(lines: Sequence[WatchedStep]) -> WatchedStep:
    """Return the first step from which on memory should not grow: states are made, nothing is recorded."""
    recorded = [at for at, line in enumerate(lines) if line.kind != "plain"]
    after = lines[recorded[-1] + 1 if recorded else 0 :]
    return next((line for line in after if line.step >= _STATES_MADE), lines[-1])


def _times(steps: Mapping[int, Sequence[WatchedStep]], window: int) -> list[WatchedTime]:
    durations: dict[int, list[int]] = defaultdict(list)
    for lines in steps.values():
        for line in lines[-window:]:
            durations[line.step].append(line.duration_ns)
    return [WatchedTime(step=step, duration_ns=round(median(durations[step]))) for step in sorted(durations)]


def _with_verdict(run: WatchedRun, behind: Mapping[int, Sequence[int]]) -> WatchedRun:
    exposed = (
        ""
        if run.exposed_frac is None
        else f", {format_frac(run.exposed_frac)} of it waiting for communication"
    )
    lines = [f"A step takes {format_ns(run.step_ns)} (median of the last {len(run.steps)}){exposed}."]
    slowest = run.ranks[0]
    if (slowest.behind_ns or 0) > _WORTH_NAMING * run.step_ns and _steadily(slowest.rank, behind):
        others = "the other" if len(behind) == 2 else "the median rank"
        lines.append(
            f"Rank {slowest.rank} needs {format_ns(slowest.behind_ns or 0)} more for its own work than "
            f"{others}: the others wait for it."
        )
    return replace(run, verdict=[*lines, *_growth(run)])


def _growth(run: WatchedRun) -> list[str]:
    """Name the ranks whose peak grew, and the memory that it is the peak of."""
    grown = [one for one in run.ranks if (one.growth_bytes or 0) > _WORTH_GROWTH * (one.peak_bytes or 0)]
    if not grown:
        return []
    most = max(grown, key=lambda one: one.growth_bytes or 0)
    numbers = ", ".join(str(rank) for rank in sorted(one.rank for one in grown))
    whose = f"rank {numbers}" if len(grown) == 1 else f"ranks {numbers}"
    if len(grown) == len(run.ranks) > 1:
        whose = f"all {len(grown)} ranks"
    memory = "reserved" if most.reserved_peak_bytes is not None else "resident"
    up_to = "up to " if len(grown) > 1 else ""
    return [
        f"Peak {memory} memory of {whose} grew over these steps by {up_to}"
        f"{format_bytes(most.growth_bytes or 0)} to {format_bytes(most.peak_bytes or 0)} (rank {most.rank})."
    ]


def _steadily(rank: int, behind: Mapping[int, Sequence[int]]) -> bool:
    """Whether a rank needs most in most steps, in more of them than by chance."""
    steps = range(len(behind[rank]))
    most = sum(all(behind[rank][at] > behind[other][at] for other in behind if other != rank) for at in steps)
    return most >= _MOST_STEPS * len(steps) and chance(len(steps), most, len(behind)) <= _CHANCE
