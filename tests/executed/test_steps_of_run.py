"""What the recorder counts of a step's micro-batches, and the collectives predicted from it alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.interception import Interception
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.estimators.of_run.communication import estimate_comm_of_run
from fsdp2prof.estimators.of_run.policy import values_of_run
from fsdp2prof.manifest import DeviceInfo, RankManifest, RootInfo
from fsdp2prof.recorder.model.describe import (
    add_forward_order,
    describe_param_groups,
    describe_process_groups,
)
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.model.step_counts import RootSteps

Step = Callable[[Any], None]


def backward(model: Any) -> None:
    model(torch.ones(4, 8)).sum().backward()


def once(model: Any) -> None:
    backward(model)


def accumulated(model: Any) -> None:
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        backward(model)


def kept_between(model: Any) -> None:
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        backward(model)


def replicas_last(model: Any) -> None:
    for last in (False, True):
        model.set_requires_all_reduce(last)
        backward(model)


def replicas_never(model: Any) -> None:
    model.set_requires_all_reduce(False)
    backward(model)


def pipelined(model: Any) -> None:
    """As ``torch.distributed.pipelining`` does: two forwards ahead, one reduction behind all backwards."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    waiting = [model(torch.ones(4, 8)), model(torch.ones(4, 8))]
    for _ in range(2):
        waiting.pop(0).sum().backward()
        waiting.append(model(torch.ones(4, 8)))
    for output in waiting:
        output.sum().backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]):
            group.post_backward()
    root._root_post_backward_final_callback()


def root_info(*counts: int | None, unreduced: int | None = 0) -> RootInfo:
    """Micro-batches, gradient syncs, all-reduces and reshards of the only root."""
    names = ("micro_batches", "gradient_syncs", "all_reduces", "reshards")
    told = {"unreduced": unreduced, "method_forwards": 0, "evaluations": 0, "updates": 0}
    return RootInfo(root=0, **told, **dict(zip(names, counts, strict=True)))


def recorded(*steps: Step, reshard: bool = True) -> tuple[RankManifest, Counter[tuple[str, int]]]:
    """The manifest that these steps leave, and what the last of them sent: (op, payload, count)."""
    roots, history, told = Roots(lambda: None), RootSteps(), Interception()
    with fake_process_group(MeshSpec(dp_replicate=2, dp_shard=2)) as mesh:
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 5))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=fsdp_mesh(mesh), reshard_after_forward=reshard)
            roots.watch(module)
        backward(model)
        roots.mark(True)
        roots.end_step()
        for step in steps:
            with told:
                told.counts.clear()
                step(model)
            model.zero_grad()
            history.add(roots.end_step())
        groups = describe_param_groups(roots)
        add_forward_order(groups, roots)
        manifest = RankManifest(
            world_size=4,
            device=DeviceInfo(type="cpu"),
            param_groups=groups,
            process_groups=describe_process_groups(groups),
            roots=history.describe(),
        )
    sent: Counter[tuple[str, int]] = Counter()
    for (_, op, _, payload), count in told.counts.items():
        sent[op, payload] += count
    return manifest, sent


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (once, (1, 1, 1, 1)),
        (accumulated, (3, 1, 1, 3)),
        (kept_between, (3, 1, 1, 1)),
        (replicas_last, (2, 2, 1, 2)),
        (replicas_never, (1, 1, 0, 1)),
        (pipelined, (4, 1, 1, 1)),
    ],
)
def test_collectives_are_those_of_the_recorded_micro_batches(
    step: Step, counts: tuple[int, ...], reshard: bool
) -> None:
    manifest, sent = recorded(step, step, reshard=reshard)
    assert manifest.roots == [root_info(*counts)]
    predicted: Counter[tuple[str, int]] = Counter()
    for row in estimate_comm_of_run(manifest).groups:
        predicted[row.op, row.payload_bytes // row.count] += row.count
    assert predicted == sent
    assert sent


@pytest.mark.parametrize("step", [kept_between, replicas_last, pipelined])
def test_no_option_says_it(step: Step) -> None:
    with pytest.raises(ModelError, match=r"set_reshard_after_backward|set_requires_all_reduce"):
        values_of_run(recorded(step)[0])


class InTwoParts(nn.Sequential):
    """Runs by two methods, never by its forward."""

    def begin(self, x: torch.Tensor) -> Any:
        return self[1](self[0](x))

    def end(self, x: torch.Tensor) -> Any:
        return self[2](x)


@pytest.mark.parametrize(("names", "forwards"), [(("begin", "end"), 2), (("begin",), 1)])
def test_methods_registered_as_forward_are_forwards(names: tuple[str, ...], forwards: int) -> None:
    steps: list[int] = []
    roots = Roots(lambda: steps.append(len(steps)))
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = InTwoParts(nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 5))
        for module in (model[0], model):
            fully_shard(module, mesh=fsdp_mesh(mesh))
            roots.watch(module)
        for name in names:
            register_fsdp_forward_method(model, name)
        roots.mark(True)
        output = torch.ones(4, 8)
        for name in names:
            output = getattr(model, name)(output)
        output.sum().backward()
        (root,) = roots
        assert (root.counts.forwards, root.counts.backwards, root.ranges) == (forwards, 1, [])
        history = RootSteps()
        history.add(roots.end_step())
        groups = describe_param_groups(roots)
        state = model._get_fsdp_state()
        assert "_pre_forward" in vars(state)
        roots.remove()
        assert not {"_pre_forward", "_post_forward"} & vars(state).keys()
    assert len(steps) == forwards
    manifest = RankManifest(world_size=2, param_groups=groups, roots=history.describe())
    if forwards == 1:
        assert estimate_comm_of_run(manifest).policy.grad_accum == 1
        return
    with pytest.raises(ModelError, match="register_fsdp_forward_method"):
        estimate_comm_of_run(manifest)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        shared = self.trunk(x)
        return [self.first(shared), self.second(shared)]


@pytest.mark.parametrize(("losses", "left_out"), [((0, 1), 0), ((0,), 2 * 8 + 2), ((0, 0), 2 * 8 + 2)])
def test_a_parameter_is_trained_by_any_of_several_backwards(losses: tuple[int, ...], left_out: int) -> None:
    """Two ranks: a rank's shards hold half of the elements."""
    roots, history = Roots(lambda: None), RootSteps()
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = TwoHeads()
        fully_shard(model, mesh=fsdp_mesh(mesh))
        roots.watch(model)
        roots.mark(True)
        for _ in range(2):  # the first is not watched from its beginning
            outputs = model(torch.ones(4, 8))
            for loss in losses:
                outputs[loss].sum().backward(retain_graph=True)
            step = roots.end_step()
        history.add(step)
        (group,) = describe_param_groups(roots)
        roots.remove()
    history.describe_groups([group])
    assert group.reductions == len(losses)
    assert group.distinct_numel == (sum(one.numel() for one in TwoHeads().parameters()) - left_out) // 2


def test_steps_that_differ_are_refused_unless_their_micro_batches_are_told() -> None:
    manifest, _ = recorded(accumulated, once)
    assert manifest.roots == [root_info(None, 1, 1, None)]
    with pytest.raises(ModelError, match="the run does not run equally often in each recorded step"):
        estimate_comm_of_run(manifest)
    _, sent = recorded(accumulated, accumulated)
    estimate = estimate_comm_of_run(manifest, grad_accum=3)
    assert sum(row.count for row in estimate.groups) == sum(sent.values())
