"""What the recorder tells about the storages of a model that is wrapped and has run."""

from __future__ import annotations

import cProfile
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.estimators.torch_rules import fsdp_method_refusal
from fsdp2prof.recorder.devices import parse_settings
from fsdp2prof.recorder.model.describe import (
    compiled_modules,
    describe_optimizers,
    describe_param_groups,
    describe_tensors,
)
from fsdp2prof.recorder.model.ownership import add_ownership, keep_told
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.rank.host import machine_info


def test_a_root_without_backward_stays_gathered_and_is_told():
    """A frozen root keeps its gathered parameters from its first forward on; its blocks reshard."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 6)).requires_grad_(False)
        for module in (model[0], model):
            fully_shard(module, mesh=fsdp_mesh(mesh))
            roots.watch(module)
        with torch.no_grad():
            model(torch.ones(4, 8))
        tensors = describe_tensors(roots, [], lambda tensor: tensor.untyped_storage().data_ptr())
    known = [(tensor.category, tensor.fqn, tensor.name, tensor.nbytes) for tensor in tensors]
    assert sorted(known) == [
        ("sharded_parameter", "", "1.bias", 3 * 4),
        ("sharded_parameter", "", "1.weight", 3 * 8 * 4),
        ("sharded_parameter", "0", "0.weight", 4 * 8 * 4),
        ("unsharded_parameter", "", "1.bias", 6 * 4),
        ("unsharded_parameter", "", "1.weight", 6 * 8 * 4),
    ]
    gathered = {tensor.address for tensor in tensors if tensor.category == "unsharded_parameter"}
    assert gathered == {model[1].weight.data_ptr(), model[1].bias.data_ptr()}


def test_buffers_ignored_parameters_and_nested_state_are_known():
    """A table beside a layer, a scale that FSDP leaves alone, and LBFGS, which keeps lists of directions."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False))
        model[0].register_buffer("table", torch.zeros(5))
        model.scale = nn.Parameter(torch.ones(3))
        model.scale.grad = torch.ones(3)
        for module in (model[0], model):
            fully_shard(module, mesh=fsdp_mesh(mesh), ignored_params={model.scale})
            roots.watch(module)
        with torch.no_grad():
            model(torch.ones(4, 8))
        optimizer = torch.optim.LBFGS([model.scale])
        optimizer.state[model.scale] = {"old_dirs": [torch.ones(3), torch.ones(3)], "d": torch.ones(3)}
        tensors = describe_tensors(roots, [optimizer], lambda tensor: tensor.untyped_storage().data_ptr())
    known = [(tensor.category, tensor.fqn, tensor.name) for tensor in tensors]
    assert ("buffer", "0", "0.table") in known
    assert ("unsharded_parameter", "", "scale") in known
    assert ("unsharded_gradient", "", "scale") in known
    assert known.count(("optimizer_state", "", "not sharded.old_dirs")) == 2
    assert len({tensor.address for tensor in tensors if tensor.category == "optimizer_state"}) == 3


def test_an_optimizer_whose_turn_has_not_come_counts():
    """Of two models only the first has been updated; the head of the second is in no optimizer at all."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        models: list[Any] = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]
        for model in models:
            for module in (model[0], model[1], model):
                fully_shard(module, mesh=fsdp_mesh(mesh))
            roots.watch(model)
            with torch.no_grad():
                model(torch.ones(2, 4))
        stepped = torch.optim.SGD(models[0].parameters())
        waiting = torch.optim.Adam(models[1][0].parameters())
        groups = describe_param_groups(roots)
        add_ownership(groups, roots, [])
        assert {one.optimized for group in groups for one in group.parameters} == {None}
        add_ownership(groups, roots, [stepped])
        found = {(group.root, one.fqn): one.optimized for group in groups for one in group.parameters}
    assert [name for name, optimized in found.items() if not optimized] == [(1, "1.weight"), (1, "1.bias")]
    assert len(found) == 8
    assert len(waiting.param_groups) == 1


def test_an_optimizer_that_is_gone_is_remembered():
    """A model that was trained first and dropped is not told to have had no optimizer."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        roots.watch(fully_shard(model, mesh=fsdp_mesh(mesh)))
        with torch.no_grad():
            model(torch.ones(2, 4))
        model.reshard()
        before, after = describe_param_groups(roots), describe_param_groups(roots)
        add_ownership(before, roots, [torch.optim.SGD(model[0].parameters())])
        add_ownership(after, roots, [torch.optim.SGD([torch.ones(1, requires_grad=True)])])
    assert {one.optimized for group in after for one in group.parameters} == {False}
    keep_told(after, before)
    assert [one.optimized for group in after for one in group.parameters] == [True, True, False, False]


def test_settings_of_a_group_that_change_its_memory_or_traffic():
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
        for module in (model[0], model):
            fully_shard(module, mesh=fsdp_mesh(mesh))
            roots.watch(module)
        model[0].set_unshard_in_backward(False)
        model[0].set_modules_to_backward_prefetch([model])
        model.set_modules_to_forward_prefetch([model[0]])
        model[0]._set_unshard_async_op(True)
        model.set_reshard_after_backward(False, recurse=False)
        buffers = 1
        if fsdp_method_refusal("set_reduce_scatter_max_input_buffers") is None:
            buffers = 3
            model.set_reduce_scatter_max_input_buffers(buffers)
        with torch.no_grad():
            model(torch.ones(4, 8))
        root, first = describe_param_groups(roots)
    assert (first.fqn, first.unshard_in_backward, first.reshard_after_backward) == ("0", False, True)
    assert (root.fqn, root.unshard_in_backward, root.reshard_after_backward) == ("", True, False)
    assert {root.reduce_scatter_max_input_buffers, first.reduce_scatter_max_input_buffers} == {buffers}
    assert (root.all_gather_comm, root.reduce_scatter_comm) == (None, None)
    assert (root.forward_prefetch, first.backward_prefetch) == (["0"], [""])
    assert (root.backward_prefetch, first.forward_prefetch) == ([], [])
    assert (root.unshard_async_op, first.unshard_async_op) == (False, True)


def test_compiled_modules(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())
    try:
        roots = Roots(lambda: None)
        with fake_process_group(MeshSpec(dp_shard=2)) as mesh:
            model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
            roots.watch(fully_shard(model, mesh=fsdp_mesh(mesh)))
            model(torch.ones(4, 8))
            assert compiled_modules(roots) is None
            relu = torch.compile(lambda x: torch.relu(x), backend="eager")
            assert compiled_modules(roots) is None, "it has not run"
            relu(torch.ones(3))
            assert compiled_modules(roots) == []
            model[1].compile(backend="eager")
            assert compiled_modules(roots) == ["1"]
            outer = torch.compile(model, backend="eager")
            assert compiled_modules(roots) == ["", "1"]
            del outer
    finally:
        torch._dynamo.reset()


def test_allocator_configurations():
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4], max_split_size_mb:64"
    assert parse_settings(text) == {
        "expandable_segments": "True",
        "roundup_power2_divisions": "[256:1,512:2,>:4]",
        "max_split_size_mb": "64",
    }
    assert parse_settings("") == {}


def test_a_profiler_of_python_is_named():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        found = machine_info().python_hooks
    finally:
        profiler.disable()
    assert found == sorted({"cProfile", *machine_info().python_hooks})


class Momentum(torch.optim.Optimizer):
    """Keeps its state in its groups."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["momentum"] = [torch.zeros_like(one) for one in group["params"]]


def test_state_in_the_groups_of_an_optimizer_is_its_state() -> None:
    optimizer = Momentum([torch.ones(5), torch.ones(7)], {"betas": (0.9, 0.99)})
    optimizer.begin()
    (found,) = describe_optimizers([optimizer])
    assert (found.state_bytes, found.state_dtypes) == (4 * 12, {"float32": 4 * 12})
