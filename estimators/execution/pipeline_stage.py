"""One stage of a pipeline, trained by the 1F1B schedule: what ``torch.distributed.pipelining`` keeps there.

The stage runs the forwards of ``min(stages - stage, M)`` of the M micro-batches ahead, then one backward and
one forward in turn, so that that many micro-batches' activations are alive at once. Activations from the
stage before and gradients from the stage after are received in buffers of their own per micro-batch, made in
the first step and kept: (B, S, D) in the compute dtype, S divided by tp. Gradients
are accumulated unsharded and reduced after the last backward.

Of interleaved 1F1B's stages on a rank the layers are run as one stage, with as many micro-batches alive as
torch's order has of all stages together; each stage has receive buffers of its own.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp2prof.estimators.execution.fake_world import stand_in_device
from fsdp2prof.estimators.models.losses import logits_loss
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.estimators.traffic.pipeline_order import interleaved_order, most_in_flight

__all__ = ["PipelineStage", "micro_batches_in_flight"]


def micro_batches_in_flight(mesh: MeshSpec, policy: PolicySpec) -> int:
    """Most micro-batches whose forward has run and whose backward has not.

    Under interleaved 1F1B a rank's stages count as parts of one, rounded up to whole micro-batches.
    """
    stages = policy.stages_per_rank
    if stages > 1:
        order = interleaved_order(mesh.pp, stages, policy.grad_accum)[policy.pp_stage]
        return min(-(-most_in_flight(order) // stages), policy.grad_accum)
    return min(mesh.pp - policy.pp_stage, policy.grad_accum)


class PipelineStage:
    """Runs the micro-batches of a step through the model of one stage, cut out and sharded before."""

    def __init__(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        self._model = model
        self._policy = policy
        self._is_first = policy.pp_stage == 0
        self._is_last = policy.pp_stage == mesh.pp - 1
        self._in_flight = micro_batches_in_flight(mesh, policy)
        self._stages = policy.stages_per_rank
        assert model.config is not None
        self._shape = (policy.sequences, policy.seq_len // mesh.tp, model.config.dim)
        self._output: Tensor | None = None
        self._sent: Tensor | None = None
        self.activations: list[Tensor] = []
        """Buffers that receive the activations of the stage before; none on the first stage."""
        self.gradients: list[Tensor] = []
        """Buffers that receive the gradients of the stage after; none on the last stage."""

    def forward_backward(self) -> None:
        """Run every micro-batch forward and backward in the order of the schedule."""
        micro_batches = self._policy.grad_accum
        if not self.activations and not self.gradients:
            self._make_buffers(micro_batches)
        root = self._model.module
        assert isinstance(root, FSDPModule)
        _expect_last_backward(root, False)
        waiting: deque[Tensor] = deque()
        for micro_batch in range(micro_batches):
            waiting.append(self._forward(micro_batch))
            if len(waiting) == self._in_flight:
                self._backward(waiting.popleft(), micro_batch - self._in_flight + 1)
        while waiting:
            self._backward(waiting.popleft(), micro_batches - len(waiting) - 1)
        _reduce_gradients(root)
        self._output = self._sent = None

    def _make_buffers(self, micro_batches: int) -> None:
        dtype = getattr(torch, self._policy.compute_dtype)

        def make(stages: int, requires_grad: bool) -> list[Tensor]:
            return [
                torch.empty(self._shape, dtype=dtype, device=stand_in_device(), requires_grad=requires_grad)
                for _ in range(stages * micro_batches)
            ]

        self.activations = make(self._stages - self._is_first, True)
        self.gradients = make(self._stages - self._is_last, False)

    def _forward(self, micro_batch: int) -> Tensor:
        """Return the stage's output, or its loss on the last stage, and keep the output till the next."""
        policy, root = self._policy, self._model.module
        if not self._is_first and not self._is_last:
            self._output = root(self.activations[micro_batch])
            return self._output
        batch = self._model.make_batch(policy.sequences, policy.seq_len, stand_in_device())
        if self._is_first:
            self._output = root(*batch.args)
            return self._output
        received = Batch(args=(self.activations[micro_batch],), targets=batch.targets)
        if policy.loss != "full":
            return self._model.loss(root, received, policy.loss)
        assert batch.targets is not None
        self._output = root(*received.args)
        return logits_loss(self._output, batch.targets)

    def _backward(self, output: Tensor, micro_batch: int) -> None:
        """Run a micro-batch backward and keep its input's gradient, which is sent, till the next."""
        gradient = None if self._is_last else self.gradients[micro_batch]
        output.backward(gradient)  # type: ignore[no-untyped-call]
        if not self._is_first:
            received = self.activations[micro_batch]
            self._sent, received.grad = received.grad, None


def _expect_last_backward(root: FSDPModule, expected: bool) -> None:
    root.set_is_last_backward(expected)
    root.set_reshard_after_backward(expected)
    root.set_requires_gradient_sync(expected)


def _reduce_gradients(root: FSDPModule) -> None:
    """Reduce what the backwards have accumulated, group by group, and reshard, as the schedule does."""
    _expect_last_backward(root, True)
    state = root._get_fsdp_state()
    for part in state._state_ctx.all_states:
        groups = getattr(part, "_fsdp_param_groups", None)  # several from torch 2.10 on
        for group in (part._fsdp_param_group,) if groups is None else groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()
