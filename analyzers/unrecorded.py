"""How long a step takes where nothing is recorded, and how many times as long tracing makes it.

Tracing slows the host down, often by more than the training's own work takes: the step of a training is the
unrecorded one, and the traced one shows what it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, quantiles

from fsdp2prof.manifest import StepInfo
from fsdp2prof.results.run import StepTime
from fsdp2prof.results.step import UnrecordedStep

_APART = 1.1
"""Times as long as the other kind, from which on traced and unrecorded steps are called different."""


def unrecorded_step(ranks: Iterable[Sequence[StepInfo | StepTime]]) -> UnrecordedStep | None:
    """Return the unrecorded step of some ranks, each with its steps in order; None where there is none."""
    plain: list[int] = []
    traced: list[int] = []
    for steps in ranks:
        mine = [step.duration_ns for step in steps if step.kind == "plain"]
        begins_plain = bool(steps) and steps[0].kind == "plain"
        plain += mine[1:] if begins_plain and len(mine) > 1 else mine
        traced += [step.duration_ns for step in steps if step.kind == "traced"]
    if not plain:
        return None
    lower, middle, upper = quantiles(plain, n=4, method="inclusive") if len(plain) > 1 else plain * 3
    slow = median(traced) if traced else None
    return UnrecordedStep(
        steps=len(plain),
        median_ns=middle,
        lower_quartile_ns=lower,
        upper_quartile_ns=upper,
        min_ns=min(plain),
        max_ns=max(plain),
        traced_median_ns=slow,
        slowdown=None if slow is None or not middle else slow / middle,
    )


def added_ns(step: UnrecordedStep | None) -> float:
    """Return what tracing added to a step; 0 where that is unknown or nothing."""
    if step is None or step.traced_median_ns is None:
        return 0
    return max(0, step.traced_median_ns - step.median_ns)


def differs_traced(traced_ns: float, unrecorded_ns: float | None) -> bool:
    """Whether traced steps are longer or shorter than unrecorded ones by more than steps vary."""
    return unrecorded_ns is not None and not unrecorded_ns <= _APART * traced_ns <= _APART**2 * unrecorded_ns
