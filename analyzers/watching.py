"""``watch``: the last steps of every rank, and which rank the others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from fsdp2prof.manifest import WatchedStep
from fsdp2prof.results import WatchedRank, WatchedRun, WatchedTime
from fsdp2prof.units import format_bytes, format_frac, format_ns

__all__ = ["watch_steps"]

_WORTH_NAMING = 0.05
"""Share of a step from which a rank is called slow."""


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
    needs itself, ``busy``, is compared.
    """
    ranks = [_rank(rank, lines[-window:]) for rank, lines in sorted(steps.items())]
    busy = [rank.busy_ns for rank in ranks if rank.busy_ns is not None]
    if len(busy) > 1:
        typical = median(busy)
        ranks = [
            rank if rank.busy_ns is None else _behind(rank, round(rank.busy_ns - typical)) for rank in ranks
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
    return _with_verdict(result)


def _rank(rank: int, lines: Sequence[WatchedStep]) -> WatchedRank:
    measured = [line for line in lines if line.kind == "plain"] or list(lines)
    known = [(line.exposed_ns, line.duration_ns) for line in measured if line.exposed_ns is not None]
    newest, oldest = lines[-1], lines[0]
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


def _behind(rank: WatchedRank, behind_ns: int) -> WatchedRank:
    return replace(rank, behind_ns=behind_ns)


def _times(steps: Mapping[int, Sequence[WatchedStep]], window: int) -> list[WatchedTime]:
    durations: dict[int, list[int]] = defaultdict(list)
    for lines in steps.values():
        for line in lines[-window:]:
            durations[line.step].append(line.duration_ns)
    return [WatchedTime(step=step, duration_ns=round(median(durations[step]))) for step in sorted(durations)]


def _with_verdict(run: WatchedRun) -> WatchedRun:
    exposed = (
        ""
        if run.exposed_frac is None
        else f", {format_frac(run.exposed_frac)} of it waiting for communication"
    )
    lines = [f"A step takes {format_ns(run.step_ns)} (median of the last {len(run.steps)}){exposed}."]
    slowest = run.ranks[0]
    if slowest.behind_ns is not None and slowest.behind_ns > _WORTH_NAMING * run.step_ns:
        lines.append(
            f"Rank {slowest.rank} needs {format_ns(slowest.behind_ns)} more for its own work than the median "
            "of ranks: the others wait for it."
        )
    grown = max(run.ranks, key=lambda rank: rank.growth_bytes or 0)
    if grown.growth_bytes:
        lines.append(
            f"The peak of rank {grown.rank} grew by {format_bytes(grown.growth_bytes)} to "
            f"{format_bytes(grown.peak_bytes or 0)} over these steps."
        )
    return replace(run, verdict=lines)
