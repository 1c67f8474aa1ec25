"""The time that a pipeline's schedule adds to a rank's own work: waiting for other ranks' stages."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.program import Kernel, Program, ends_of_backward, in_backward, labelled
from fsdp2prof.estimators.simulate.streams import Timeline
from fsdp2prof.estimators.techniques.pipeline_order import Kind, enough_micro_batches, order_of, waiting_ns
from fsdp2prof.labels import PIPELINE_ACTION
from fsdp2prof.tables.columns import IntArray

_ACTION = re.compile(rf"{re.escape(PIPELINE_ACTION)}\d+([FBIW])\d+")
_ONLY_OF_WHOLE = ("aten::add_", "aten::embedding_dense_backward")


def bubble_ns_of(
    program: Program, timeline: Timeline, mesh: MeshSpec, policy: PolicySpec, whole: PolicySpec | None = None
) -> int:
    """Return the time that the schedule adds to a rank's own work: waiting for other ranks' stages.

    ``whole`` is the policy with all of its micro-batches, where ``policy`` has some.
    """
    if mesh.pp == 1:
        return 0
    whole = whole or policy
    end = int(timeline.end_ns[: _end_of_backwards(program)].max())
    started = timeline.start_ns[timeline.start_ns >= 0]
    each = (end - int(started.min())) // policy.grad_accum
    if whole.pp_schedule in ("1f1b", "gpipe"):
        return whole.pp_runs * (mesh.pp - 1) * each
    of_stage = each // whole.stages_per_rank
    enough = enough_micro_batches(whole.pp_schedule, mesh.pp, whole.pipelined)
    orders = order_of(whole.pp_schedule, mesh.pp, enough)
    durations = stage_durations(program, timeline, of_stage, whole)
    return whole.pp_runs * waiting_ns(orders, whole.pp_stage, durations)


def with_waiting(program: Program, timeline: Timeline, bubble_ns: int) -> Timeline:
    """Return the times of a step with its waits for other ranks: one gap, before its reductions."""
    cut = _end_of_backwards(program)

    def later(times: IntArray) -> IntArray:
        moved = np.where(times < 0, times, times + bubble_ns)
        return np.concatenate([times[:cut], moved[cut:]])

    return Timeline(
        host_ns=later(timeline.host_ns),
        host_end_ns=later(timeline.host_end_ns),
        start_ns=later(timeline.start_ns),
        end_ns=later(timeline.end_ns),
    )


def stage_durations(
    program: Program, timeline: Timeline, of_stage: int, policy: PolicySpec
) -> dict[Kind, int]:
    """Divide a stage's time of a micro-batch among its forward and the parts of its backward."""
    if not policy.splits_backward:
        forward = round(of_stage * _forward_frac(program, timeline))
        return {"F": forward, "B": of_stage - forward}
    sums = _by_action(program, timeline)
    if not sums["I"]:  # the first stage's backward is one, and that of the others is to be divided
        sums["W"], only_here = _of_weights(program, timeline)
        sums["I"] = sums["B"] - sums["W"] - only_here
    scale = of_stage / max(1, sums["F"] + sums["B"])
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    return {kind: round(sums[kind] * scale) for kind in kinds}


def _by_action(program: Program, timeline: Timeline) -> dict[str, int]:
    """Time of the compute stream's kernels in each kind of action; B is the backward, whichever part."""
    sums = dict.fromkeys("FBIW", 0)
    for kernel, span, names in _kernels(program, timeline):
        actions = [match[1] for name in names if (match := _ACTION.fullmatch(name))]
        if kernel.stream == 0 and actions:
            sums[actions[-1]] += span
    sums["B"] += sums["I"] + sums["W"]
    return sums


def _of_weights(program: Program, timeline: Timeline) -> tuple[int, int]:
    """Time of the weights' part of a whole backward: half of its products, and the parts that only a whole
    one has.

    These are the embedding's gradient, and FSDP's accumulation where autograd's hooks run.
    """
    products = only_here = 0
    for kernel, span, names in _kernels(program, timeline):
        if kernel.work is not None and in_backward(names):
            products += span * (kernel.work.kind == "matmul")
            only_here += span * (kernel.op in _ONLY_OF_WHOLE)
    return products // 2, only_here


def _forward_frac(program: Program, timeline: Timeline) -> float:
    """Share of the forwards in the compute stream's time of forwards and backwards."""
    sums = [0, 0]
    for kernel, span, names in _kernels(program, timeline):
        if kernel.stream == 0 and not kernel.op.startswith("aten::_foreach"):
            sums[in_backward(names)] += span
    return sums[0] / max(1, sum(sums))


def _kernels(program: Program, timeline: Timeline) -> Iterator[tuple[Kernel, int, list[str]]]:
    """Yield the kernels with their time and the names of the ranges around them."""
    spans = (timeline.end_ns - timeline.start_ns).tolist()
    for (command, names), span in zip(labelled(program.commands), spans, strict=True):
        if isinstance(command, Kernel):
            yield command, span, names


def _end_of_backwards(program: Program) -> int:
    """Position of the end of the last backward."""
    return ends_of_backward(program.commands)[-1]
