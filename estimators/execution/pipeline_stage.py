"""One rank of a pipeline, trained by a schedule: what ``torch.distributed.pipelining`` keeps there.

With one stage a rank the order is the schedule's own: under 1F1B the forwards of ``min(stages - stage, M)``
of the M micro-batches run ahead, so that that many micro-batches' activations are alive at once. Where a
backward is split, torch's own functions make the gradients of the stage's input first and those of its
weights later. Activations from the stage before and gradients from the stage after are received in buffers
of their own per micro-batch, made in the first step and kept: (B, S, D) in the compute dtype, S divided by
tp. Gradients are accumulated unsharded and reduced after the last backward.

Of several stages on a rank the layers are run as one stage, with as many micro-batches under way as torch's
order has of all stages together; each stage has receive buffers of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import has_ends
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import stand_in_device
from fsdp2prof.estimators.models.decoder import RECEIVED_AS
from fsdp2prof.estimators.models.losses import logits_loss, logits_of
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.techniques.pipeline import micro_batches_under_way
from fsdp2prof.estimators.techniques.pipeline_order import (
    Kind,
    neighbours_of,
    order_of,
)
from fsdp2prof.labels import PIPELINE_ACTION


class PipelineStage:
    """Runs the micro-batches of a step through the layers of one rank, cut out and sharded before."""

    def __init__(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        self._model = model
        self._policy = policy
        self._is_first, self._is_last = has_ends(policy.pp_schedule, mesh.pp, policy.pp_stage)
        self._work = list(_order(mesh, policy))
        self._received = neighbours_of(policy.pp_schedule, mesh.pp, policy.pp_stage)
        assert model.width is not None
        self._shape = (policy.sequences, model.hidden_length(mesh.tp, policy.seq_len), model.width)
        self._output: Tensor | None = None
        self._sent: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        """Of a last stage, which keeps them until their backward has run, whatever the loss has saved."""
        self._deferred: dict[int, Callable[[], object]] = {}
        self.activations: list[Tensor] = []
        """Buffers that receive the activations of the stage before; none on the first stage."""
        self.gradients: list[Tensor] = []
        """Buffers that receive the gradients of the stage after; none on the last stage."""

    def forward_backward(self) -> None:
        """Run every micro-batch forward and backward in the order of the schedule."""
        if not self.activations and not self.gradients:
            self._make_buffers(self._policy.grad_accum)
        root = self._model.module
        assert isinstance(root, FSDPModule)
        _expect_last_backward(root, False)
        is_labelled = self._policy.splits_backward
        for kind, micro_batch in self._work:
            label = f"{PIPELINE_ACTION}{self._policy.pp_stage}{kind}{micro_batch}"
            with record_function(label) if is_labelled else nullcontext():
                self._run(kind, micro_batch)
        _reduce_gradients(root)
        self._output = self._sent = None

    def _run(self, kind: Kind, micro_batch: int) -> None:
        if kind == "F":
            self._outputs[micro_batch] = self._forward(micro_batch)
        elif kind == "B":
            self._backward(self._outputs.pop(micro_batch), micro_batch)
        elif kind == "I":
            self._backward_of_input(self._outputs.pop(micro_batch), micro_batch)
        else:
            self._deferred.pop(micro_batch)()
        if kind in "BI":
            self._logits.pop(micro_batch, None)

    def _make_buffers(self, micro_batches: int) -> None:
        dtype = getattr(torch, self._policy.compute_dtype)

        def make(stages: int, requires_grad: bool) -> list[Tensor]:
            return [
                torch.empty(self._shape, dtype=dtype, device=stand_in_device(), requires_grad=requires_grad)
                for _ in range(stages * micro_batches)
            ]

        before, after = self._received
        self.activations = make(before, True)
        self.gradients = make(after, False)

    def _forward(self, micro_batch: int) -> Tensor:
        """Return the stage's output, or its loss on the last stage, and keep the output till the next."""
        policy, root = self._policy, self._model.module
        if not self._is_first and not self._is_last:
            self._output = self._run_stage(self._received_batch(micro_batch))
            return self._output
        batch = self._model.make_batch(policy.sequences, policy.seq_len, stand_in_device())
        if self._is_first and self._is_last:
            return self._model.loss(root, batch, policy.loss)
        if self._is_first:
            self._output = self._run_stage(batch)
            return self._output
        received = replace(self._received_batch(micro_batch), targets=batch.targets)
        if policy.loss not in ("full", "native"):
            return self._model.loss(root, received, policy.loss)
        assert batch.targets is not None
        self._output = self._logits[micro_batch] = self._run_stage(received)
        return logits_loss(self._output, batch.targets, policy.loss)

    def _received_batch(self, micro_batch: int) -> Batch:
        """The previous stage's output, as the model takes it."""
        hidden = self.activations[micro_batch]
        return Batch(args=(hidden,)) if self._model.decoder is None else Batch(named={RECEIVED_AS: hidden})

    def _run_stage(self, batch: Batch) -> Tensor:
        return logits_of(self._model.module(*batch.args, **batch.named))

    def _gradient(self, micro_batch: int) -> Tensor | None:
        """Of the output: received, or none of a loss."""
        return None if self._is_last else self.gradients[micro_batch]

    def _backward(self, output: Tensor, micro_batch: int) -> None:
        """Run a micro-batch backward and keep its input's gradient, which is sent, till the next."""
        output.backward(self._gradient(micro_batch))  # type: ignore[no-untyped-call]
        self._send_gradient(micro_batch)

    def _backward_of_input(self, output: Tensor, micro_batch: int) -> None:
        """Make the gradient of the stage's input, and leave the weights' for later.

        The first stage has no input to make one for: all of its backward is left, as torch leaves it.
        """
        from torch.distributed.pipelining import _backward as torch_backward

        weights = self._model.module.parameters
        gradient = self._gradient(micro_batch)
        if self._is_first:
            self._deferred[micro_batch] = lambda: torch.autograd.backward([output], [gradient])
            return
        _, groups = torch_backward.stage_backward_input(
            [output], None if gradient is None else [gradient], [self.activations[micro_batch]], weights()
        )
        self._deferred[micro_batch] = lambda: torch_backward.stage_backward_weight(weights(), groups)
        self._send_gradient(micro_batch)

    def _send_gradient(self, micro_batch: int) -> None:
        if not self._is_first:
            received = self.activations[micro_batch]
            self._sent, received.grad = received.grad, None


def _order(mesh: MeshSpec, policy: PolicySpec) -> Iterator[tuple[Kind, int]]:
    """Yield a rank's work: of one stage in torch's order, of several as if they were one."""
    if policy.stages_per_rank == 1:
        order = order_of(policy.pp_schedule, mesh.pp, policy.grad_accum)[policy.pp_stage]
        yield from ((work.kind, work.micro_batch) for work in order)
        return
    most = micro_batches_under_way(mesh, policy)
    first: Kind = "I" if policy.splits_backward else "B"
    waiting: deque[int] = deque()
    later: deque[int] = deque()
    for micro_batch in range(policy.grad_accum):
        while later and len(waiting) + len(later) >= most.alive:
            yield "W", later.popleft()
        yield "F", micro_batch
        waiting.append(micro_batch)
        while waiting and (len(waiting) >= most.forwards or micro_batch == policy.grad_accum - 1):
            yield first, waiting[0]
            done = waiting.popleft()
            if policy.splits_backward:
                later.append(done)
            while later and len(later) >= most.weights:
                yield "W", later.popleft()
    yield from (("W", micro_batch) for micro_batch in later)


def _expect_last_backward(root: FSDPModule, expected: bool) -> None:
    root.set_is_last_backward(expected)
    root.set_reshard_after_backward(expected)
    root.set_requires_gradient_sync(expected)


def _reduce_gradients(root: FSDPModule) -> None:
    """Reduce the accumulated gradients, group by group, and reshard, as the schedule does."""
    _expect_last_backward(root, True)
    state = root._get_fsdp_state()
    for part in state._state_ctx.all_states:
        groups = getattr(part, "_fsdp_param_groups", None)  # several from torch 2.10 on
        for group in (part._fsdp_param_group,) if groups is None else groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()
