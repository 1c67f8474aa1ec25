"""The table of optimizers says what torch does: what it keeps, where it counts, what it runs on shards."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.optimizers import HELD, IMPLEMENTATIONS, OPTIMIZERS
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.fake_world import fake_process_group
from fsdp2prof.estimators.sharding.groups import optimizer_state_bytes, step_counter_bytes

SPEC = ModelSpec(source="support.linear_model:factory")
MESH = MeshSpec(dp_shard=4)
ALL = list(product(OPTIMIZERS, IMPLEMENTATIONS))
TRAINS = [pair for pair in ALL if OPTIMIZERS[pair[0]].refusal(pair[1]) is None]
NOT_ON_SHARDS = [pair for pair in ALL if pair[1] in OPTIMIZERS[pair[0]].unsharded]
MISSING = [pair for pair in ALL if pair[1] in OPTIMIZERS[pair[0]].missing]


@pytest.mark.parametrize(("name", "implementation"), TRAINS)
def test_what_a_real_optimizer_keeps(name, implementation):
    kind = OPTIMIZERS[name]
    policy = PolicySpec(seq_len=64, optimizer=name, optimizer_impl=implementation)
    run = execute(SPEC, MESH, policy)
    shards = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "sharded_parameter"}
    states = [tensor for tensor in run.tensors if tensor.category == "optimizer_state"]
    keys = [*kind.state, *["step"] * kind.counts_steps]
    assert sorted(state.name for state in states) == sorted(
        f"{name}.{key}" for name in shards for key in keys
    )
    for state in states:
        parameter, _, key = state.name.rpartition(".")
        is_counter = key == "step"
        assert state.nbytes == (step_counter_bytes(policy) if is_counter else shards[parameter])
        on_host = is_counter and IMPLEMENTATIONS[implementation].counts_on_host
        assert (state.address in run.host) == on_host
    numel = sum(shards.values()) // 4
    assert optimizer_state_bytes(policy, (numel,), "float32") == sum(
        state.nbytes for state in states if not state.name.endswith(".step")
    )


def foreach_adamw(parameters):
    """torch's own, as a user's, which gets the DTensors."""
    return OPTIMIZERS["adamw"].build(parameters, "foreach")


def test_an_update_of_plain_shards_holds_what_one_of_dtensors_does():
    own = execute(SPEC, MESH, PolicySpec(seq_len=64, optimizer=f"{__name__}:foreach_adamw"))
    known = execute(SPEC, MESH, PolicySpec(seq_len=64))
    ours, theirs = known.recording.allocations, own.recording.allocations
    assert ours.op.to_list() == theirs.op.to_list()
    for column in ("size", "address", "stream", "alloc_order", "free_order"):
        assert getattr(ours, column).tolist() == getattr(theirs, column).tolist()
    assert known.tensors == own.tensors
    assert known.host == own.host


@pytest.mark.parametrize(("name", "implementation"), NOT_ON_SHARDS)
def test_what_is_said_not_to_run_on_shards_does_not(name, implementation):
    module = torch.nn.Linear(8, 8)
    with fake_process_group(MESH) as mesh:
        fully_shard(module, mesh=mesh["dp_shard"])
        optimizer = OPTIMIZERS[name].build(module.parameters(), implementation)
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
        with pytest.raises((RuntimeError, AssertionError), match=r"sharding strategy|no DeviceMesh"):
            optimizer.step()


@pytest.mark.parametrize(("name", "implementation"), MISSING)
def test_what_is_said_to_be_missing_is(name, implementation):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        OPTIMIZERS[name].build([torch.nn.Parameter(torch.ones(1))], implementation)


def test_nothing_is_kept_where_nothing_is_trained():
    policy = PolicySpec(optimizer="none")
    assert (optimizer_state_bytes(policy, (8, 8), "float32"), step_counter_bytes(policy)) == (0, 0)
    run = execute(SPEC, MESH, replace(policy, seq_len=64))
    assert not [tensor for tensor in run.tensors if tensor.category == "optimizer_state"]


def own(parameters):
    """An optimizer that keeps one byte an element and one fp32 number a parameter."""

    class Own(torch.optim.Optimizer):
        """State in step."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not self.state[parameter]:
                        local = parameter.to_local()
                        self.state[parameter]["codes"] = torch.zeros_like(local, dtype=torch.uint8)
                        self.state[parameter]["scale"] = torch.zeros(1)

    return Own(parameters, {})


def nothing(parameters):
    """No optimizer."""


def test_an_optimizer_of_the_users_own_is_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    run = execute(SPEC, MESH, PolicySpec(seq_len=64, optimizer="users_own:own"))
    shards = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "sharded_parameter"}
    states = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "optimizer_state"}
    assert states == {f"{name}.codes": size // 4 for name, size in shards.items()} | {
        f"{name}.scale": 4 for name in shards
    }
    for name, message in (
        ("nothing", "made a NoneType"),
        ("absent", "AttributeError"),
        ("own.a", "unknown value"),
    ):
        with pytest.raises(ModelError, match=message):
            execute(SPEC, MESH, PolicySpec(seq_len=64, optimizer=f"users_own:{name}"))
    policy = PolicySpec(optimizer="users_own:own")
    with pytest.raises(ModelError, match="by running it alone"):
        optimizer_state_bytes(policy, (4,), "float32")
    with pytest.raises(ModelError, match="decides itself"):
        PolicySpec(optimizer="users_own:own", optimizer_impl="fused")


@pytest.mark.parametrize(
    ("name", "of_fp32", "of_bf16"),
    [  # two moments, and fp32 weights, or two bytes of what bf16 ones lack of them
        ("adamw-master", 12, 12),
        ("adamw-master-bf16", 8, 8),
        ("adamw-remainders", 12, 10),
        ("adamw-remainders-bf16", 8, 6),
    ],
)
def test_states_beside_master_weights_by_hand(name, of_fp32, of_bf16):
    policy = PolicySpec(seq_len=32, optimizer=name)
    assert optimizer_state_bytes(policy, (5, 2), "float32") == 10 * of_fp32
    assert optimizer_state_bytes(policy, (5, 2), "bfloat16") == 10 * of_bf16
    run = execute(ModelSpec(source="gpt2", layers=1), MESH, replace(policy, orig_dtype="bfloat16"))
    held = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "optimizer_state"}
    states = ("exp_avg", "exp_avg_sq", "master_param")
    assert sum(held[f"norm.weight.{state}"] for state in states) == 768 // 4 * of_bf16


@pytest.mark.parametrize("name", [name for name in HELD if "bit" in name])
def test_states_of_few_bits_by_hand(name):
    """Codes, fp32 for every 256 or 128 elements, a table of all codes; small shards keep fp32 (torchao)."""
    block, codes = (256, 256) if "8bit" in name else (128, 16)
    run = execute(ModelSpec(source="gpt2", layers=1), MESH, PolicySpec(seq_len=32, optimizer=name))
    shards = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "sharded_parameter"}
    states = {tensor.name: tensor.nbytes for tensor in run.tensors if tensor.category == "optimizer_state"}
    weight, norm = "layers.0.proj.weight", "norm.weight"
    elements = 768 * 768 // 4
    assert (shards[weight], shards[norm]) == (4 * elements, 4 * 192)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert states[f"{weight}.{moment}"] == (elements if codes == 256 else elements // 2)
        assert states[f"{weight}.{moment}_scale"] == 4 * elements // block
        assert states[f"{weight}.{moment}_map"] == 4 * codes
        assert states[f"{norm}.{moment}"] == 4 * 192
    with pytest.raises(ModelError, match="has no fused implementation"):
        PolicySpec(optimizer=name, optimizer_impl="fused")
