"""The step of two sides, its parts, and whether its change is more than its steps differ among themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from fsdp2prof.analyzers.steps import mean
from fsdp2prof.results.comparison import StepSpread, TimeChange
from fsdp2prof.results.step import LayerPace, StepBreakdown, UnrecordedStep
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import EXPOSED_PARTS

_ENOUGH = 3
"""Steps of a side from which its spread says something."""


def exposed_change(breakdown: Sequence[TimeChange]) -> TimeChange | None:
    """Sum the parts that are exposed communication."""
    parts = [row for row in breakdown if row.part in EXPOSED_PARTS]
    if not parts:
        return None
    return time_change("exposed", sum(row.before_ns for row in parts), sum(row.after_ns for row in parts))


def unrecorded_change(before: UnrecordedStep | None, after: UnrecordedStep | None) -> TimeChange | None:
    """Compare the medians; None unless both are known."""
    if before is None or after is None:
        return None
    return time_change("unrecorded_step", before.median_ns, after.median_ns)


def _steps(trace: TraceAnalysis | None) -> list[StepBreakdown]:
    return [] if trace is None else [step for rank in trace.ranks for step in rank.steps]


def _mean(values: Sequence[int]) -> float:
    return mean(sum(values), len(values))


def time_change(part: str, before: float, after: float) -> TimeChange:
    """Return a change and its fraction of before; no fraction of 0."""
    return TimeChange(
        part=part,
        before_ns=before,
        after_ns=after,
        delta_ns=after - before,
        delta_frac=(after - before) / before if before else None,
    )


def is_cut(trace: TraceAnalysis | None) -> bool:
    """Whether the windows of a trace are as long as its capture, not as long as steps."""
    return trace is not None and any(rank.paces is not None for rank in trace.ranks)


def layer_pace(
    before: TraceAnalysis | None, after: TraceAnalysis | None
) -> tuple[TimeChange, StepSpread, StepSpread] | None:
    """Compare the time from layer to layer, of those with the most intervals; None without shared layers."""
    sides = [_paces(before), _paces(after)]
    shared = set(sides[0]) & set(sides[1])
    if not shared:
        return None
    layer = max(sorted(shared), key=lambda name: min(side[name].steps for side in sides))
    first, second = (side[layer] for side in sides)
    return time_change(layer, first.typical_ns, second.typical_ns), first, second


def _paces(trace: TraceAnalysis | None) -> dict[str, StepSpread]:
    """Return the paces of layers over all ranks: medians of the ranks' own."""
    found: dict[str, list[LayerPace]] = defaultdict(list)
    for rank in [] if trace is None else trace.ranks:
        for pace in rank.paces or ():
            found[pace.layer].append(pace)
    return {
        layer: StepSpread(
            measured_on="layers",
            steps=sum(pace.intervals for pace in paces),
            typical_ns=median(pace.median_ns for pace in paces),
            low_ns=median(pace.lower_quartile_ns for pace in paces),
            high_ns=median(pace.upper_quartile_ns for pace in paces),
        )
        for layer, paces in found.items()
    }


def unrecorded_spread(step: UnrecordedStep | None) -> StepSpread | None:
    """Return between which times half of the unrecorded steps lie; None without any."""
    if step is None:
        return None
    return StepSpread(
        measured_on="unrecorded",
        steps=step.steps,
        typical_ns=step.median_ns,
        low_ns=step.lower_quartile_ns,
        high_ns=step.upper_quartile_ns,
    )


def traced_spread(trace: TraceAnalysis | None) -> StepSpread | None:
    """Return between which times the traced windows of all ranks lie; None without any."""
    durations = [step.duration_ns for step in _steps(trace)]
    if not durations:
        return None
    return StepSpread(
        measured_on="traced",
        steps=len(durations),
        typical_ns=_mean(durations),
        low_ns=min(durations),
        high_ns=max(durations),
    )


def beyond_spread(before: StepSpread | None, after: StepSpread | None) -> bool | None:
    """Whether two spreads do not overlap; None where one has too few steps to say."""
    if before is None or after is None or min(before.steps, after.steps) < _ENOUGH:
        return None
    return after.low_ns > before.high_ns or after.high_ns < before.low_ns
