"""One rank of a pipeline, trained by a schedule: what ``torch.distributed.pipelining`` keeps there.

The order is the schedule's own: under 1F1B the forwards of ``min(stages - stage, M)`` of the M micro-batches
run ahead, so that that many micro-batches' activations are alive at once. Where a backward is split, torch's
own functions make the gradients of the stage's input first and those of its weights later. Activations from
the stage before and gradients from the stage after are received in buffers of their own per micro-batch,
made in the first step and kept: (B, S, D) in the compute dtype, S divided by tp. Neighbours on the same rank
pass tensors on instead. A stage's gradients are accumulated unsharded and reduced after its last backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import stand_in_device
from fsdp2prof.estimators.models.decoder import RECEIVED_AS
from fsdp2prof.estimators.models.losses import logits_loss, logits_of
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.techniques.pipeline_order import (
    Order,
    StageWork,
    gathered_at,
    order_of,
    stages_of_rank,
)
from fsdp2prof.labels import PIPELINE_ACTION

_Key: TypeAlias = tuple[int, int]
"""A stage and a micro-batch."""


class PipelineRank:
    """Runs the micro-batches of a step through the stages of one rank, cut out and sharded before."""

    def __init__(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        self._model = model
        self._policy = policy
        own = stages_of_rank(policy.pp_schedule, mesh.pp, policy.pp_stage)
        self._roots: dict[int, Any] = dict(zip(own, model.roots, strict=True))
        self._last = mesh.pp * len(own) - 1
        self._gathers = len(own) > 1 and policy.rules.pipelines_gather_stages
        self.take_order(order_of(policy.pp_schedule, mesh.pp, policy.pipelined)[policy.pp_stage])
        assert model.width is not None
        tokens = model.hidden_length(mesh.tp, policy.seq_len, policy.sequence_parallel)
        self._shape = (policy.sequences, tokens, model.width)
        self._output: Tensor | None = None
        self._sent: Tensor | None = None
        self._outputs: dict[_Key, Tensor] = {}
        self._logits: dict[_Key, Tensor] = {}
        """Of a last stage, which keeps them until their backward has run, whatever the loss has saved."""
        self._deferred: dict[_Key, Callable[[], object]] = {}
        self._passed: dict[_Key, Tensor] = {}
        """Inputs that the stage before made on this rank."""
        self._passed_back: dict[_Key, Tensor] = {}
        """Gradients of outputs that the stage after made on this rank."""
        self.activations: dict[_Key, Tensor] = {}
        """Buffers that receive the activations of a stage before on another rank."""
        self.gradients: dict[_Key, Tensor] = {}
        """Buffers that receive the gradients of a stage after on another rank."""
        self.before_work: Callable[[], object] = lambda: None
        """Called before each work of the schedule, and at its end."""

    def take_order(self, order: Order) -> None:
        """Work in an order, of all micro-batches or of fewer; there are buffers for all."""
        self._work = order
        self._ends = {work.stage: at for at, work in enumerate(order)}
        self._gathered = gathered_at(order) if self._gathers else []

    def forward_backward(self) -> None:
        """Run every micro-batch forward and backward in the order of the schedule."""
        if not self.activations and not self.gradients:
            self._make_buffers(self._policy.pipelined)
        for _ in range(self._policy.pp_runs):
            self._run_schedule()
        self._output = self._sent = None

    def _run_schedule(self) -> None:
        for root in self._roots.values():
            _expect_last_backward(root, False)
        is_labelled = self._policy.splits_backward
        for at, work in enumerate(self._work):
            self.before_work()
            if self._gathered:
                self._gather(*self._gathered[at])
            label = f"{PIPELINE_ACTION}{work.stage}{work.kind}{work.micro_batch}"
            with record_function(label) if is_labelled else nullcontext():
                self._run(work)
            if at == self._ends[work.stage]:
                _reduce_gradients(self._roots[work.stage])
        if self._gathered:
            self._gather(list(self._roots), [])
        self.before_work()

    def _gather(self, dropped: list[int], fetched: list[int]) -> None:
        """Reshard some stages and gather others, all units of each at once."""
        for stage in dropped:
            for unit in _units(self._roots[stage]):
                unit.reshard()
        for stage in fetched:
            self._roots[stage]._get_fsdp_state()._lazy_init()
            handles = [unit.unshard(async_op=True) for unit in _units(self._roots[stage])]
            for handle in handles:
                assert handle is not None
                handle.wait()

    def _run(self, work: StageWork) -> None:
        key = work.stage, work.micro_batch
        if work.kind == "F":
            self._outputs[key] = self._forward(key)
        elif work.kind == "B":
            self._backward(key)
        elif work.kind == "I":
            self._backward_of_input(key)
        else:
            self._deferred.pop(key)()
        if work.kind in ("B", "I"):
            self._logits.pop(key, None)

    def _make_buffers(self, micro_batches: int) -> None:
        dtype = getattr(torch, self._policy.compute_dtype)

        def make(stages: list[int], requires_grad: bool) -> dict[_Key, Tensor]:
            return {
                (stage, at): torch.empty(
                    self._shape, dtype=dtype, device=stand_in_device(), requires_grad=requires_grad
                )
                for stage in stages
                for at in range(micro_batches)
            }

        own = self._roots
        self.activations = make([stage for stage in own if stage and stage - 1 not in own], True)
        self.gradients = make([stage for stage in own if stage < self._last and stage + 1 not in own], False)

    def _forward(self, key: _Key) -> Tensor:
        """Return the stage's output, or its loss on the last stage, and keep the output till the next."""
        policy, stage = self._policy, key[0]
        root = self._roots[stage]
        batch = self._batch(key)
        if stage < self._last:
            self._output = output = _run_stage(root, batch)
            if stage + 1 in self._roots:
                self._passed[stage + 1, key[1]] = output.detach().requires_grad_()
            return output
        if policy.loss not in ("full", "native"):
            return self._model.loss(root, batch, policy.loss)
        assert batch.targets is not None
        self._output = self._logits[key] = _run_stage(root, batch)
        return logits_loss(self._output, batch.targets, policy.loss)

    def _batch(self, key: _Key) -> Batch:
        """The model's batch, where a stage is an end of it, around the output of the stage before."""
        stage = key[0]
        is_end = stage in (0, self._last)
        made = (
            self._model.make_batch(self._policy.sequences, self._policy.seq_len, stand_in_device())
            if is_end
            else None
        )
        if stage == 0:
            assert made is not None
            return made
        hidden = self._input(key)
        own = Batch(args=(hidden,)) if self._model.decoder is None else Batch(named={RECEIVED_AS: hidden})
        return own if made is None else replace(own, targets=made.targets)

    def _input(self, key: _Key) -> Tensor:
        return self._passed[key] if key in self._passed else self.activations[key]

    def _gradient(self, key: _Key) -> Tensor | None:
        """Of the output: received or passed back, or none of a loss."""
        if key[0] == self._last:
            return None
        return self._passed_back.pop(key) if key in self._passed_back else self.gradients[key]

    def _backward(self, key: _Key) -> None:
        """Run a micro-batch backward and keep its input's gradient, which is sent, till the next."""
        self._outputs.pop(key).backward(self._gradient(key))  # type: ignore[no-untyped-call]
        self._send_gradient(key)

    def _backward_of_input(self, key: _Key) -> None:
        """Make the gradient of the stage's input, and leave the weights' for later.

        The first stage has no input to make one for: all of its backward is left, as torch leaves it.
        """
        from torch.distributed.pipelining import _backward as torch_backward

        weights = self._roots[key[0]].parameters
        output, gradient = self._outputs.pop(key), self._gradient(key)
        if key[0] == 0:
            self._deferred[key] = lambda: torch.autograd.backward([output], [gradient])
            return
        _, groups = torch_backward.stage_backward_input(
            [output], None if gradient is None else [gradient], [self._input(key)], weights()
        )
        self._deferred[key] = lambda: torch_backward.stage_backward_weight(weights(), groups)
        self._send_gradient(key)

    def _send_gradient(self, key: _Key) -> None:
        if key[0] == 0:
            return
        received = self._input(key)
        gradient, received.grad = received.grad, None
        if self._passed.pop(key, None) is None:
            self._sent = gradient
        else:
            assert gradient is not None
            self._passed_back[key[0] - 1, key[1]] = gradient


def _run_stage(root: nn.Module, batch: Batch) -> Tensor:
    return logits_of(root(*batch.args, **batch.named))


def _units(root: nn.Module) -> list[FSDPModule]:
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


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
