"""Whether a difference is rounding: ranks' results against a plain training, judged by the precision used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from fsdp2prof.results.check import ParityCheck, ParityRow, ParityStep
from fsdp2prof.tables.probes import Measured, ParityMeasurements
from fsdp2prof.units import plural

TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Relative errors that sums in another order leave after a few steps: some thousand units in the last place
in fp64 and fp32, some ten in half precision, where every intermediate is rounded."""
_ALIKE = 1e-3
"""How far ratios of one scale may lie apart."""
_LOOSEST = 0.25
"""Of dtypes below half precision: fp8 has 2 or 3 bits."""
_KINDS = ("parameter", "batch", "loss", "gradient")
"""The order in which a step could go wrong; parameters before the first step come first of all."""
_SMALL = 1e-4
"""Of the norm of all tensors of a kind: below it a tensor is noise, as the gradient of a key's bias is."""


def judge_parity(measured: ParityMeasurements) -> ParityCheck:
    """Say whether two trainings are the same but for rounding, and where they first differ."""
    rows = _rows(measured)
    wrong = [row for row in rows if row.state in ("differs", "missing")]
    first = wrong[0] if wrong else None
    hint = None if first is None else _hint(first, wrong, measured)
    return ParityCheck(
        passed=first is None,
        verdict=_verdict(measured, rows, first, hint),
        model=measured.model,
        mesh=measured.mesh,
        world_size=measured.world_size,
        micro_batches=measured.micro_batches,
        tolerances={row.dtype: row.tolerance for row in rows},
        first=first,
        hint=hint,
        steps=[_step(measured, rows, step) for step in range(measured.steps)],
        rows=rows,
        warnings=_warnings(rows, measured),
    )


def _rows(measured: ParityMeasurements) -> list[ParityRow]:
    """One row per tensor, of the rank with the largest difference, in the order in which they are made."""
    found: dict[tuple[int, str, str], list[tuple[int, Measured]]] = defaultdict(list)
    for rank, rows in enumerate(measured.by_rank):
        for one in rows:
            found[one.step, one.kind, one.name].append((rank, one))
    totals: dict[tuple[int, str], float] = defaultdict(float)
    for (step, kind, _), members in found.items():
        totals[step, kind] += max(one.norm for _, one in members) ** 2
    keyed = []
    for (step, kind, _), members in found.items():
        floor = _SMALL * math.sqrt(totals[step, kind])
        judged = [_judge(rank, one, floor) for rank, one in members]
        worst = max(judged, key=lambda row: (_BADNESS[row.state], row.relative_error or 0.0, -row.rank))
        order = _KINDS.index(kind) if kind != "parameter" or step < 0 else len(_KINDS)
        keyed.append(((step, order, members[0][1].position), worst))
    return [row for _, row in sorted(keyed, key=lambda item: item[0])]


_BADNESS = {"equal": 0, "close": 1, "differs": 2, "missing": 3}


def _judge(rank: int, one: Measured, floor: float) -> ParityRow:
    tolerance = TOLERANCES.get(one.dtype, _LOOSEST)
    scale = max(one.norm, floor)
    finite = math.isfinite(one.error) and math.isfinite(one.norm)
    relative = one.error / scale if finite and scale else (0.0 if one.error == 0 else None)
    if one.missing:
        state = "missing"
    elif one.error == 0:
        state = "equal"
    else:
        state = "close" if relative is not None and relative <= tolerance else "differs"
    square = one.norm**2
    ratio = one.product / square if finite and square and math.isfinite(one.product) else None
    return ParityRow(
        step=one.step,
        kind=one.kind,
        name=one.name,
        rank=rank,
        dtype=one.dtype,
        error=one.error if finite and not one.missing else None,
        norm=one.norm if math.isfinite(one.norm) else None,
        relative_error=None if one.missing else relative,
        ratio=None if one.missing else ratio,
        tolerance=tolerance,
        state=state,
    )


def _step(measured: ParityMeasurements, rows: Iterable[ParityRow], step: int) -> ParityStep:
    mine = [row for row in rows if row.step == step]
    gradient, parameter = (_worst(mine, kind) for kind in ("gradient", "parameter"))
    return ParityStep(
        step=step,
        plain_loss=_finite(measured.plain_losses[step]),
        sharded_loss=_finite(measured.sharded_losses[step]),
        worst_gradient=None if gradient is None else gradient.name,
        worst_gradient_error=None if gradient is None else gradient.relative_error,
        worst_parameter=None if parameter is None else parameter.name,
        worst_parameter_error=None if parameter is None else parameter.relative_error,
        differing=sum(row.state in ("differs", "missing") for row in mine),
    )


def _worst(rows: Iterable[ParityRow], kind: str) -> ParityRow | None:
    of_kind = [row for row in rows if row.kind == kind]
    return max(of_kind, key=lambda row: (_BADNESS[row.state], row.relative_error or 0.0), default=None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hint(first: ParityRow, wrong: Sequence[ParityRow], measured: ParityMeasurements) -> str | None:
    """Usual causes of such a difference; None if there are many."""
    if first.step < 0:
        return (
            "ranks begin with different weights: use the same seed in the factory, or load the same weights"
        )
    if first.kind == "batch":
        return "a rank trains on different data: its batch depends on more than its arguments"
    if first.kind == "loss":
        return "the forward differs on the same weights and data: a layer does not work when sharded"
    gradients = [row for row in wrong if row.kind == "gradient" and row.step == first.step]
    total = sum(row.kind == "gradient" and row.step == first.step for row in wrong)
    if first.kind != "gradient":
        return "gradients agree but parameters differ: something else updates the parameters"
    if all(row.state == "missing" for row in gradients):
        return "no gradient was reduced: set_requires_gradient_sync(False) is still on in the last backward"
    ratios = [row.ratio for row in gradients if row.ratio is not None and _is_scaled(row)]
    if len(ratios) == len(gradients) and max(ratios) - min(ratios) < _ALIKE * abs(ratios[0]):
        return (
            f"every gradient is {ratios[0]:.4g} times the plain one: check set_gradient_divide_factor and "
            "the scale of the loss"
        )
    compared = sum(1 for one in measured.by_rank[0] if (one.step, one.kind) == (first.step, "gradient"))
    if total < compared:
        names = ", ".join(row.name for row in gradients[:4])
        return (
            f"only {total} of {plural(compared, 'gradient')} differ ({names}): gradients of parameters in no "
            "group are not reduced"
        )
    return "all gradients differ: they are reduced over too few ranks, or over ranks with the same data"


def _is_scaled(row: ParityRow) -> bool:
    """Whether the difference is all in the scale: |a - b| = |ratio - 1| |b|."""
    if row.error is None or row.norm is None or row.ratio is None:
        return False
    return abs(row.error - abs(row.ratio - 1) * row.norm) <= 1e-2 * row.error


def _verdict(
    measured: ParityMeasurements, rows: Sequence[ParityRow], first: ParityRow | None, hint: str | None
) -> list[str]:
    how = f"{plural(measured.world_size, 'rank')} ({measured.mesh})"
    if first is None:
        worst = max((row.relative_error or 0.0 for row in rows), default=0.0)
        close = f"to {worst:.1e} at worst" if worst else "all of them exactly"
        return [
            f"{plural(measured.steps, 'step')} on {how} match one plain process: {len(rows):,} "
            f"losses, gradients and parameters agree, {close}."
        ]
    when = "before the first step" if first.step < 0 else f"in step {first.step}"
    what = f"{first.kind} {first.name}" if first.kind != "loss" else "the loss"
    if first.state == "missing":
        how_much = "it exists on one side only"
    elif first.relative_error is None:
        how_much = "it is not finite"
    else:
        how_much = f"by {first.relative_error:.2g} of its norm; rounding explains up to {first.tolerance:.0e}"
    said = [
        f"Training on {how} does not match one plain process: {what} differs first, {when}, "
        f"on rank {first.rank}: {how_much}."
    ]
    return [*said, f"Likely: {hint}."] if hint else said


def _warnings(rows: Sequence[ParityRow], measured: ParityMeasurements) -> list[str]:
    said = []
    if not any(row.kind == "gradient" for row in rows):
        said.append("No parameter had a gradient on either side: nothing was trained.")
    losses = [*measured.plain_losses, *measured.sharded_losses]
    if not all(map(math.isfinite, losses)):
        said.append("A loss is not finite.")
    return said
