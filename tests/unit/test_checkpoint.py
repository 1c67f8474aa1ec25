"""Checkpoint sizes by hand, and against what torch.distributed.checkpoint plans to write."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.checkpoint import estimate_checkpoint
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.gpt import GptTransformer
from fsdp2prof.estimators.optimizer_state import optimizer_state_bytes
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec

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
