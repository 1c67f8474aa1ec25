"""What a pipeline's schedule adds to one rank's own work: waiting for the other ranks' stages."""

from __future__ import annotations

from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.estimators.timeline.commands import Enter, Kernel, Leave, Program
from fsdp2prof.estimators.timeline.simulate import Timeline
from fsdp2prof.estimators.traffic.pipeline_order import interleaved_order, waiting_ns
from fsdp2prof.labels import AUTOGRAD_NODE

__all__ = ["bubble_ns_of"]


def bubble_ns_of(
    program: Program, timeline: Timeline, mesh: MeshSpec, policy: PolicySpec, whole: PolicySpec | None = None
) -> int:
    """What a pipeline's schedule adds to a rank's own work: waiting for the other ranks' stages.

    ``whole`` is the policy with all of its micro-batches, where ``policy`` has some.
    """
    if mesh.pp == 1:
        return 0
    whole = whole or policy
    backwards = [
        position
        for position, command in enumerate(program.commands)
        if isinstance(command, Enter) and command.name.startswith(AUTOGRAD_NODE)
    ]
    end = int(timeline.end_ns[: _matching_leave(program, backwards[-1])].max())
    started = timeline.start_ns[timeline.start_ns >= 0]
    each = (end - int(started.min())) // policy.grad_accum
    stages = whole.stages_per_rank
    if stages == 1:
        return (mesh.pp - 1) * each
    forward = round(each * _forward_frac(program, timeline) / stages)
    orders = interleaved_order(mesh.pp, stages, whole.grad_accum)
    return waiting_ns(orders, whole.pp_stage, forward, each // stages - forward)


def _forward_frac(program: Program, timeline: Timeline) -> float:
    """Share of the forwards in the compute stream's time of forwards and backwards."""
    sums = [0, 0]
    spans = (timeline.end_ns - timeline.start_ns).tolist()
    depth = since = 0
    for command, span in zip(program.commands, spans, strict=True):
        if isinstance(command, Enter):
            depth += 1
            if command.name.startswith(AUTOGRAD_NODE) and not since:
                since = depth
        elif isinstance(command, Leave):
            since = 0 if since == depth else since
            depth -= 1
        elif (
            isinstance(command, Kernel)
            and command.stream == 0
            and not command.op.startswith("aten::_foreach")
        ):
            sums[since > 0] += span
    return sums[0] / max(1, sum(sums))


def _matching_leave(program: Program, enter: int) -> int:
    depth = 0
    for position in range(enter, len(program.commands)):
        command = program.commands[position]
        depth += isinstance(command, Enter) - isinstance(command, Leave)
        if depth == 0:
            return position
    return len(program.commands)
