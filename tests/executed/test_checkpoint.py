"""Checkpoint sizes by hand, and against what torch.distributed.checkpoint plans to write."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.checkpoint import estimate_checkpoint
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.builtin import GptTransformer
from fsdp2prof.estimators.sharding.groups import ShardedParameter, optimizer_state_bytes

LLAMA = ModelSpec(source="llama3-8b")
PARAMETERS = 8_030_261_248


def test_llama3_8b_with_adamw():
    estimate = estimate_checkpoint(
        LLAMA, MeshSpec(dp_shard=8), PolicySpec(), bandwidth_bytes_per_s=2_000_000_000
    )
    states, counters = 8 * PARAMETERS, 4 * 291  # two fp32 moments; a step counter for each parameter
    assert estimate.parameter_bytes == 4 * PARAMETERS == estimate.full_parameter_bytes
    assert estimate.optimizer_bytes == states + counters
    assert estimate.sharded_bytes == estimate.full_bytes == 12 * PARAMETERS + counters
    assert estimate.rank_bytes_max == estimate.rank_bytes_min == 12 * PARAMETERS // 8
    assert (estimate.writers, estimate.files) == (8, 9)
    assert estimate.sharded_seconds == pytest.approx(12 * PARAMETERS / 8 / 2e9)


def test_frozen_parameters_have_no_optimizer_state():
    estimate = estimate_checkpoint(LLAMA, MeshSpec(dp_shard=8), PolicySpec(trainable="norm"))
    assert estimate.parameter_bytes == 4 * PARAMETERS
    assert estimate.optimizer_bytes == 8 * 65 * 4096 + 4 * 65


def test_replicas_share_the_writing():
    estimate = estimate_checkpoint(LLAMA, MeshSpec(dp_replicate=2, dp_shard=4), PolicySpec())
    assert (estimate.writers, estimate.files) == (8, 9)
    assert estimate.rank_bytes_max == 12 * PARAMETERS // 8


@pytest.mark.parametrize(
    ("optimizer", "shape", "expected"),
    [
        ("adamw", (6, 4), 2 * 24 * 4),
        ("sgd", (6, 4), 0),
        ("sgd-momentum", (6, 4), 24 * 4),
        ("none", (6, 4), 0),
    ],
)
def test_state_of_one_parameter(optimizer, shape, expected):
    assert optimizer_state_bytes(PolicySpec(optimizer=optimizer), shape, "float32") == expected


def test_eight_bit_states_by_hand():
    """A byte an element, 4 bytes for 256, and a table of 256 fp32 values for each moment of each shard.

    Of 65 norms of 4096 elements a rank of 8 has 512: their moments stay in fp32.
    """
    norms = 65 * 4096
    matrices, weights = 291 - 65, PARAMETERS - norms
    estimate = estimate_checkpoint(LLAMA, MeshSpec(dp_shard=8), PolicySpec(optimizer="adamw8bit"))
    states = 2 * (weights + weights // 64 + 4 * norms) + 4 * 291
    assert estimate.optimizer_bytes == states + 2 * matrices * 1024
    assert estimate.full_bytes == 4 * PARAMETERS + states + 2 * matrices * 1024
    assert estimate.sharded_bytes == 4 * PARAMETERS + states + 8 * 2 * matrices * 1024
    assert estimate.rank_bytes_max == (estimate.sharded_bytes - 4 * 291) // 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("bits", "held"), [(8, 96 * 128 + 96 * 128 // 64 + 1024), (4, 96 * 64 + 96 * 4 + 64)]
)
def test_states_of_few_bits_are_as_large_as_torchao_writes_them(bits, held, tmp_path):
    """One shard of a weight and one of a norm, written by torch.distributed.checkpoint."""
    optim = pytest.importorskip("torchao.optim", reason="needs torchao")
    weight, norm = torch.nn.Parameter(torch.ones(96, 128)), torch.nn.Parameter(torch.ones(96))
    optimizer = getattr(optim, f"AdamW{bits}bit")([weight, norm])
    moments = {
        f"{name}.{signed}": optimizer._new_buffer(parameter, signed)
        for name, parameter in (("weight", weight), ("norm", norm))
        for signed in (True, False)
    }
    dcp.save(moments, checkpoint_id=tmp_path, no_dist=True)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    policy = PolicySpec(optimizer=f"adamw{bits}bit")
    said = sum(optimizer_state_bytes(policy, p.shape, "float32") for p in (weight, norm))
    assert said == 2 * held + 2 * 96 * 4
    assert said < written < said + 4 * 4096  # each tensor is a pickle of its own


def adamw(parameters):
    """What ``adamw`` is, made by a function."""
    return torch.optim.AdamW(parameters, foreach=True)


def row_statistics(parameters):
    """A DTensor of rows, and a plain tensor of the shard's size."""

    class RowStatistics(torch.optim.Optimizer):
        """State in step."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    local = parameter.to_local()
                    self.state[parameter]["rows"] = (
                        parameter.norm(dim=-1) if parameter.ndim > 1 else parameter.abs()
                    )
                    self.state[parameter]["codes"] = torch.zeros_like(local, dtype=torch.uint8)

    return RowStatistics(parameters, {})


def test_an_optimizer_by_factory_is_run(monkeypatch):
    """One that is AdamW writes what adamw does, on ranks with short and with empty shards too."""
    monkeypatch.setitem(sys.modules, "checkpoint_factories", sys.modules[__name__])
    spec, mesh = ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=5)
    policy = PolicySpec(seq_len=16, optimizer="checkpoint_factories:adamw")
    named, made = (estimate_checkpoint(spec, mesh, one) for one in (PolicySpec(seq_len=16), policy))
    for key in ("optimizer_bytes", "sharded_bytes", "full_bytes"):
        assert getattr(made, key) == getattr(named, key)
    counters = -(-4 * 16 // 5)  # spread over the writers
    assert made.rank_bytes_max == named.rank_bytes_max + counters
    assert made.rank_bytes_min == named.rank_bytes_min + 4 * 16 // 5
    assert "its state as of one step" in made.assumptions[-1]
    other = estimate_checkpoint(spec, mesh, replace(policy, optimizer="checkpoint_factories:row_statistics"))
    assert any("in plain tensors, no DTensors" in line for line in other.assumptions)


def chunk_bytes(item):
    """Bytes of one write item: its own chunk of a tensor."""
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def test_the_last_rank_plans_to_write_its_short_shard():
    """Tensor bytes of rank 2 of 3; DTensor caches plans by mesh, so only one rank is asked."""
    mesh, policy = MeshSpec(dp_shard=3), PolicySpec(seq_len=16)
    spec = ModelSpec(source="gpt2", layers=1)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        module = build_model(spec, seq_len=16).module
        device_mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        fully_shard(module.get_submodule("layers.0"), mesh=device_mesh)
        fully_shard(module, mesh=device_mesh)
        module.to_empty(device="cpu")
        assert isinstance(module, GptTransformer)
        module.tie_weights()
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        tensors = dict(module.named_parameters())
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{key}": tensor for key, tensor in state.items() if key != "step"}
        planned = sum(
            chunk_bytes(item) for item in create_default_local_save_plan(tensors, is_coordinator=False).items
        )
    finally:
        dist.destroy_process_group()
    estimate = estimate_checkpoint(spec, mesh, policy)
    assert planned == estimate.rank_bytes_min < estimate.rank_bytes_max


@pytest.mark.parametrize("mesh", [MeshSpec(tp=2), MeshSpec(pp=2)])
def test_other_meshes_are_refused(mesh):
    with pytest.raises(ModelError, match="leave tp and pp at 1"):
        estimate_checkpoint(LLAMA, mesh, PolicySpec())


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_one_size_are_counted(rows: int, dim: int) -> None:
    parameter = ShardedParameter(
        fqn="w", shape=(rows, 8), dtype="float32", requires_grad=True, shards=8,
        gather_dtype="bfloat16", position=0, dim=dim,
    )  # fmt: skip
    one_by_one = Counter(parameter.shard_numel(rank) for rank in range(8))
    assert dict(parameter.shard_numels()) == {numel: count for numel, count in one_by_one.items() if numel}
