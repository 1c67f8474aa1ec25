"""Experts beside tensor, context and pipeline parallelism: bytes, operations and time by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.catalog import BUILTIN_MODELS, ExpertShape, LatentShape, TransformerConfig
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.builtin import build_builtin
from fsdp2prof.estimators.sharding.groups import parameter_groups
from fsdp2prof.estimators.simulate.program import Collective, Kernel
from fsdp2prof.estimators.step import estimate_step, program_of
from fsdp2prof.estimators.techniques.registry import check_parallelism, part_of
from fsdp2prof.estimators.timeline.costs import transfer
from fsdp2prof.estimators.timeline.operators import work_of
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal
from fsdp2prof.results.estimate import CommEstimate

pytestmark = pytest.mark.skipif(
    expert_mesh_refusal() is not None, reason="this torch has one mesh for a module"
)

EXPERTS = ExpertShape(count=8, top_k=2, ffn_dim=32, shared_ffn_dim=16, first=1, normalised=True)
LATENT = LatentShape(q_rank=16, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=8)
PLAIN = TransformerConfig(
    name="tiny-experts",
    family="llama",
    dim=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=72,
    vocab_size=96,
    context=64,
    experts=EXPERTS,
)
CONFIGS = {
    "plain": PLAIN,
    "latent": replace(PLAIN, name="tiny-latent", kv_heads=4, latent=LATENT),
    "biased": replace(
        PLAIN,
        name="tiny-biased",
        family="qwen",
        qkv_bias=True,
        sinks=True,
        experts=replace(EXPERTS, first=0, shared_ffn_dim=0, bias=True),
    ),
}
POLICY = PolicySpec(seq_len=16, batch_size=2)
TOKENS, DIM, TOP_K = 32, 32, 2


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    single = replace(PLAIN, name="tiny-single", experts=replace(EXPERTS, top_k=1))
    for config in (*CONFIGS.values(), single):
        monkeypatch.setitem(BUILTIN_MODELS, config.name, config)


def spec_of(name: str) -> ModelSpec:
    return ModelSpec(source=CONFIGS[name].name)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def exchanged(estimate: CommEstimate, dim: str = "ep", op: str = "all_to_all") -> dict[Any, tuple[int, int]]:
    rows: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for row in estimate.groups:
        if row.mesh_dim == dim and row.op == op:
            rows[row.phase, row.dtype] += row.count
            sizes[row.phase, row.dtype] += row.payload_bytes
    return {key: (rows[key], sizes[key]) for key in rows}


@pytest.mark.parametrize(
    ("name", "mesh", "shares"),
    [
        ("plain", MeshSpec(dp_shard=2, cp=2, ep=4), 2),  # half of the sequence
        ("latent", MeshSpec(dp_shard=2, cp=2, tp=2, ep=8), 4),  # of which a rank routes half
        slow("plain", MeshSpec(dp_shard=2, tp=2, ep=4), 2),
        slow("plain", MeshSpec(dp_shard=2, tp=2, ep=2), 2),
        slow("biased", MeshSpec(dp_replicate=2, dp_shard=1, tp=2, ep=2), 2),
    ],
)
def test_rows_that_are_exchanged(name: str, mesh: MeshSpec, shares: int) -> None:
    """There and back, each way in backward too, in every sparse block; and eight counts of eight bytes."""
    blocks = CONFIGS[name].sparse_layers
    one = TOKENS // shares * TOP_K * DIM * 2
    found = exchanged(estimate_comm(spec_of(name), mesh, POLICY))
    assert found == {
        ("forward", "int64"): (blocks, blocks * 8 * 8),
        ("forward", "bfloat16"): (2 * blocks, 2 * blocks * one),
        ("backward", "bfloat16"): (2 * blocks, 2 * blocks * one),
    }


@pytest.mark.parametrize(
    ("name", "ep"),
    [("biased", 1), ("latent", 2), slow("plain", 1), slow("plain", 2), slow("latent", 1), slow("biased", 2)],
)
def test_activations_and_whole_weights_under_tensor_parallelism(name: str, ep: int) -> None:
    """A gather before and a scatter after attention and feed-forward, once each way; what each rank has whole
    is summed: norms, the router, the compressed vectors' projections."""
    config, mesh = CONFIGS[name], MeshSpec(dp_shard=2, tp=2, ep=ep)
    estimate = estimate_comm(spec_of(name), mesh, POLICY)
    one = TOKENS * DIM * 2
    in_blocks = {
        op: sum(
            row.count
            for row in estimate.groups
            if row.mesh_dim == "tp" and row.op == op and row.fqn and row.fqn.startswith("layers.")
        )
        for op in ("all_gather", "reduce_scatter")
    }
    assert in_blocks == {"all_gather": 4 * config.layers, "reduce_scatter": 4 * config.layers}
    gathered = [row for row in estimate.groups if row.mesh_dim == "tp" and row.op == "all_gather"]
    assert all(row.payload_bytes == row.count * one for row in gathered)
    summed = sum(
        row.payload_bytes
        for row in estimate.groups
        if row.mesh_dim == "tp" and row.op == "all_reduce" and row.phase == "backward" and row.fqn
    )
    whole = config.layers * 2 * DIM
    router = 8 * DIM + (8 if name == "biased" else 0)
    whole += config.sparse_layers * router
    if name == "latent":
        projections = DIM * (12 + 4) + 12 + DIM * 16 + 16
        whole += config.layers * projections
    if name == "biased" and ep == 1:
        whole += config.layers * 8 * DIM  # the biases that are added to what the ranks sum
    assert summed == 2 * whole


def test_experts_of_a_later_stage_are_its_own() -> None:
    """Two stages of three blocks, of which the first is dense: one sparse block in each."""
    policy = replace(POLICY, reshard="never", grad_accum=2)
    for stage, owners in ((0, {"layers.1"}), (1, {"layers.2"})):
        estimate = estimate_comm(
            spec_of("plain"), MeshSpec(pp=2, dp_shard=2, ep=2), replace(policy, pp_stage=stage)
        )
        assert {row.fqn for row in estimate.groups if row.mesh_dim == "ep" and row.fqn} == owners
        assert exchanged(estimate)["forward", "bfloat16"] == (4, 4 * TOKENS * TOP_K * DIM * 2)


def test_latent_attention_around_a_ring_moves_keys_and_values_of_every_head() -> None:
    """Four heads of 8 + 4 and 8 in bf16 forward and backward, their gradients in fp32 piece by piece."""
    estimate = estimate_comm(spec_of("latent"), MeshSpec(dp_shard=2, cp=2), POLICY)
    elements = TOKENS * 4 * (8 + 4 + 8)
    assert exchanged(estimate, "cp", "all_gather") == {
        (phase, "bfloat16"): (3, 3 * elements * 2) for phase in ("forward", "backward")
    }
    assert exchanged(estimate, "cp") == {("backward", "float32"): (6, 3 * elements * 4)}


def test_a_rank_holds_its_part_of_the_experts() -> None:
    """By ep, by what FSDP makes of the rest, and by tp inside each without ep: a quarter on four ranks."""
    experts = 2 * 8 * 3 * DIM * 32
    for mesh in (
        MeshSpec(dp_shard=4),
        MeshSpec(dp_shard=2, tp=2),
        MeshSpec(dp_shard=2, tp=2, ep=2),
        MeshSpec(dp_shard=1, tp=4, ep=4),
        MeshSpec(dp_shard=1, cp=2, tp=2, ep=2),
    ):
        model = part_of(build_builtin(CONFIGS["latent"], 16, "float32"), mesh, POLICY)
        held = [one for group in parameter_groups(model, mesh, POLICY) for one in group.parameters]
        assert sum(one.shard_numel(0) for one in held if one.is_expert) == experts // 4
        apart = {group.shards for group in parameter_groups(model, mesh, POLICY) if group.is_expert}
        assert apart == ({4 // mesh.ep} if mesh.ep > 1 else set())


@pytest.mark.slow
def test_memory_of_every_combination_is_estimated() -> None:
    for name in CONFIGS:
        for mesh in (
            MeshSpec(dp_shard=2, tp=2, ep=4),
            MeshSpec(dp_shard=2, tp=2),
            MeshSpec(dp_shard=2, cp=2, ep=4),
            MeshSpec(pp=2, dp_shard=2, ep=2),
        ):
            policy = replace(POLICY, reshard="never" if mesh.pp > 1 else "default")
            estimate = estimate_memory(spec_of(name), mesh, policy)
            assert estimate.peak.active_bytes > estimate.peak.categories["sharded_parameter"] > 0


def test_operations_of_another_expert_a_token() -> None:
    """Three grouped products a row, in two sparse blocks, three times as many with backward."""
    mesh = MeshSpec(dp_shard=2)
    one, two = (
        program_of(ModelSpec(source=name), mesh, POLICY).model_flops
        for name in ("tiny-single", "tiny-experts")
    )
    assert two - one == 3 * 2 * TOKENS * 3 * 2 * DIM * 32


@pytest.mark.parametrize(
    ("left", "right", "flops", "shape"),
    [
        ((24, 16), (3, 16, 8), 2 * 24 * 16 * 8, (3, 8, 8, 16)),
        ((16, 24), (24, 8), 2 * 16 * 24 * 8, (3, 16, 8, 8)),
    ],
)
def test_a_grouped_product_by_hand(
    left: tuple[int, ...], right: tuple[int, ...], flops: int, shape: tuple[int, ...]
) -> None:
    """Rows with a matrix a group, and the gradients of these: bytes of all operands once."""
    a, b = torch.empty(left, dtype=torch.bfloat16), torch.empty(right, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)
    b = b.transpose(-2, -1).contiguous().transpose(-2, -1)
    out = torch.empty((24, 8) if len(right) == 3 else (3, 16, 8), dtype=torch.bfloat16)
    work = work_of(torch.ops.aten._grouped_mm.default, (a, b, ends), {}, out)
    assert work is not None
    assert (work.kind, work.flops, work.shape) == ("matmul", flops, shape)
    assert work.bytes == 2 * (a.numel() + b.numel() + out.numel()) + 3 * 4


def test_captured_exchanges_know_their_ranks_and_the_busiest_takes_longer() -> None:
    mesh = MeshSpec(dp_shard=4, ep=2)
    program = program_of(spec_of("plain"), mesh, POLICY)
    dims = {command.mesh_dim for command in program.commands if isinstance(command, Collective)}
    assert dims == {"dp_shard", "ep", "efsdp"}
    cluster = Cluster(hardware=HardwareSpec.parse("h100"))
    spec = ModelSpec(source="qwen3-30b-a3b", layers=1)
    times = [
        estimate_step(
            spec, MeshSpec(dp_shard=2, ep=2), PolicySpec(seq_len=512, imbalance=load), cluster
        ).step_ns
        for load in (1.0, 3.0)
    ]
    assert times[0] < times[1]
    products = [
        sum(
            one.work.flops
            for one in program_of(
                spec, MeshSpec(dp_shard=2, ep=2), PolicySpec(seq_len=512, imbalance=load)
            ).commands
            if isinstance(one, Kernel) and one.op == "aten::_grouped_mm" and one.work is not None
        )
        for load in (1.0, 3.0)
    ]
    assert products[1] == 3 * products[0]


def test_an_exchange_between_nodes_fills_every_ranks_own_share() -> None:
    """Sixteen ranks on two nodes: eight send half of theirs through the node's eight adapters."""
    cluster = Cluster(hardware=HardwareSpec.parse("h100"), network=NetworkSpec.parse("400gb-ib"))
    mesh = MeshSpec(dp_shard=16, ep=16)
    place = cluster.placement(mesh, "ep")
    assert (place.ranks, place.nodes, place.per_node) == (16, 2, 8)
    size = 1 << 33
    seconds = transfer("all_to_all", size, place, cluster).ns / 1e9
    network = cluster.network_bytes_per_s(place)
    assert seconds == pytest.approx(8 * size * 8 / 16 / network, rel=0.01)
    gathered = transfer("all_gather", size, place, cluster).ns / 1e9
    assert gathered == pytest.approx(size * 15 / 16 / cluster.bus_bytes_per_s(place), rel=0.01)
    across = cluster.placement(MeshSpec(dp_shard=16, ep=8), "efsdp")
    assert (across.ranks, across.nodes, across.groups_per_node) == (2, 2, 8)


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (MeshSpec(dp_shard=2, tp=2, ep=8), "ep=8 does not divide the 4 ranks of dp_shard x cp x tp"),
        (MeshSpec(dp_shard=2, tp=2), "tp=2 cuts the 24 of an expert of tiny-experts into parts"),
        (MeshSpec(dp_shard=2, tp=4, ep=4), "tp=4 does not divide the 2 kv_heads"),
    ],
)
def test_what_does_not_divide(mesh: MeshSpec, reason: str) -> None:
    config = replace(PLAIN, experts=replace(EXPERTS, ffn_dim=24))
    with pytest.raises(ModelError, match=reason):
        check_parallelism(build_builtin(config, 16, "float32"), mesh, POLICY)


def test_experts_apart_in_checkpointed_blocks_are_prefetched() -> None:
    """Prefetching issues every gather after as few kernels or fewer; the bytes are the same."""
    spec, mesh = ModelSpec(source="tiny-experts"), MeshSpec(dp_shard=4, ep=2)
    apart = replace(POLICY, wrap=("block", "GroupedExperts"), ac="full")
    issued: list[list[int]] = []
    for policy in (apart, replace(apart, forward_prefetch=2, backward_prefetch=2)):
        issued.append([])
        kernels = 0
        for command in program_of(spec, mesh, policy).commands:
            kernels += isinstance(command, Kernel)
            if isinstance(command, Collective) and command.op == "all_gather":
                issued[-1].append(kernels)
    late, early = issued
    assert len(late) == len(early)
    assert all(one >= other for one, other in zip(late, early, strict=True))
    assert sum(late) > sum(early)
