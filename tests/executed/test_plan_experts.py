"""Plans of models whose blocks are not all alike: experts on ranks of their own, dense blocks first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.planner.confirm import Check, check_memory, check_step
from fsdp2prof.estimators.planner.fast import FastModel
from fsdp2prof.estimators.planner.fast_costs import padded_numel
from fsdp2prof.estimators.planner.profile import measure, probes, repeated_kinds, units_of_ends
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest, family_of, parse_fixed
from fsdp2prof.estimators.planner.search import candidates, meshes
from fsdp2prof.estimators.sharding.groups import parameter_groups
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.estimators.timeline.capture import capture_step, execute_and_capture
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal

CLUSTER = Cluster(hardware=HardwareSpec.parse("h100"), network=NetworkSpec.parse("400gb-ib"))
MIXTRAL = PlanRequest(
    model=ModelSpec(source="mixtral-8x7b"),
    cluster=CLUSTER,
    gpus=16,
    global_batch=32,
    policy=PolicySpec(seq_len=256),
)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama3-8b", {1: 32}),
        ("deepseek-v3-16b", {0: 1, 1: 26}),  # one dense block
        ("deepseek-v3-671b", {0: 1, 1: 1, 2: 1, 3: 58}),
        ("llama4-maverick", {1: 24, 2: 24}),  # dense and sparse in turn
    ],
)
def test_blocks_stand_for_all_of_their_kind(model: str, kinds: Mapping[int, int]) -> None:
    assert repeated_kinds(build_model(ModelSpec(source=model), seq_len=256)) == kinds


@pytest.mark.skipif(expert_mesh_refusal() is not None, reason="this torch has one mesh for a module")
def test_experts_are_divided_inside_a_node_unless_it_is_fixed() -> None:
    model = build_model(MIXTRAL.model, seq_len=256)
    found = list(meshes(MIXTRAL, model))
    assert len(set(found)) == len(found)
    assert {mesh.ep for mesh in found} == {1, 2, 4, 8}
    assert all(mesh.fsdp_size * mesh.tp % mesh.ep == 0 and mesh.world_size == 16 for mesh in found)
    assert {family_of(mesh) for mesh in found} >= {"FSDP", "FSDP + EP", "HSDP + EP"}
    fixed, _ = parse_fixed("ep=4")
    assert {mesh.ep for mesh in meshes(replace(MIXTRAL, fixed_mesh=fixed), model)} == {4}
    dense = replace(MIXTRAL, model=ModelSpec(source="llama3-8b"))
    assert {mesh.ep for mesh in meshes(dense, build_model(dense.model, seq_len=256))} == {1}


def test_too_few_experts_for_the_ranks_may_be_cut_along_their_hidden_dimension() -> None:
    model = build_model(MIXTRAL.model, seq_len=256)
    for mesh, ways in (
        (MeshSpec(dp_shard=16), {"auto", "hidden"}),
        (MeshSpec(dp_shard=8, dp_replicate=2), {"auto"}),
        (MeshSpec(dp_shard=16, ep=8), {"auto"}),
    ):
        assert {one.policy.expert_shards for one in candidates(MIXTRAL, model, mesh)} == ways


def test_ends_are_groups_of_their_own_where_the_model_allows_it() -> None:
    plain = build_model(ModelSpec(source="llama3-8b"), seq_len=256)
    assert units_of_ends(plain) == ("block", "tok_embeddings", "norm+output")
    assert units_of_ends(build_model(ModelSpec(source="gpt2"), seq_len=256)) is None  # shares its embedding
    request = replace(MIXTRAL, model=ModelSpec(source="llama3-8b"))
    found = {
        (one.policy.wrap, one.policy.reshard) for one in candidates(request, plain, MeshSpec(dp_shard=16))
    }
    assert found == {
        (("block",), "default"),
        (("block",), "never"),
        (("block",), 8),
        (("block", "tok_embeddings", "norm+output"), "torchtitan"),
    }
    stages = {one.policy.reshard for one in candidates(request, plain, MeshSpec(pp=2, dp_shard=8))}
    assert stages == {"never"}


@pytest.mark.parametrize("mesh", ["dp_shard=16", "dp_shard=16,ep=8", "dp_shard=8,dp_replicate=2,ep=2"])
def test_padded_sizes_are_those_of_the_groups(mesh: str) -> None:
    """Eight experts over sixteen ranks are padded to sixteen."""
    spec = MeshSpec.parse(mesh)
    model = part_of(build_model(ModelSpec(source="mixtral-8x7b", layers=1), seq_len=256), spec, PolicySpec())
    for group in parameter_groups(model, spec, PolicySpec()):
        shapes = tuple(parameter.shape for parameter in group.parameters)
        dim = group.parameters[0].dim
        assert padded_numel(shapes, group.shards, dim=dim) == sum(p.padded_numel for p in group.parameters)


@pytest.mark.skipif(expert_mesh_refusal() is not None, reason="this torch has one mesh for a module")
def test_a_probe_shows_experts_and_what_they_exchange() -> None:
    """Each of 256 x 3 tokens goes to two of eight experts, of which a rank of two has four."""
    model = build_model(MIXTRAL.model, seq_len=256)
    request = replace(MIXTRAL, fixed_policy={"ac": "none"})
    (probe,) = probes(request, [(1, 2)], model)
    profile = measure(probe)
    (kind,) = profile.kinds
    assert kind.experts == ((4, 14_336, 4096), (4, 4096, 14_336), (4, 14_336, 4096))
    tokens = profile.batch_size * profile.seq_len
    rows = [payload for op, payload, dim in kind.forward.exchanges if (op, dim) == ("all_to_all", "ep")]
    assert rows.count(2 * tokens * 4096 * 2) == 2  # there and back, in bf16
    assert sum(map(prod, kind.dense)) == 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 + 8 * 4096


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard=16", "dp_shard=16,ep=8"])
def test_the_search_is_near_the_engine_for_experts(mesh: str) -> None:
    model = build_model(MIXTRAL.model, seq_len=2048)
    request = replace(MIXTRAL, policy=PolicySpec(seq_len=2048), fixed_policy={"ac": "full"})
    spec = MeshSpec.parse(mesh)
    wanted = probes(request, [(1, spec.ep)], model)
    profiles = {(probe.tp, probe.ep, str(probe.policy.ac)): measure(probe) for probe in wanted}
    policy = PolicySpec(seq_len=2048, batch_size=2, ac="full")
    one = Candidate(spec, policy)
    fast = FastModel(request, profiles, model).score(one)
    check = Check(model=request.model, candidate=one, cluster=CLUSTER)
    assert fast.reserved_bytes == pytest.approx(check_memory(check).reserved_bytes, rel=0.15)
    assert fast.step_ns == pytest.approx(check_step(check).step_ns, rel=0.25)


def test_one_execution_says_what_two_say() -> None:
    spec = ModelSpec(source="llama3-8b", layers=2)
    mesh, policy = MeshSpec(dp_shard=2, tp=2), PolicySpec(seq_len=64, ac="op")
    model = build_model(spec, seq_len=64, orig_dtype="float32")
    made = execute_and_capture(spec, mesh, policy, model)
    assert made is not None
    execution, program = made
    assert program == capture_step(spec, mesh, policy)
    assert estimate_memory(spec, mesh, policy, executed=execution) == estimate_memory(spec, mesh, policy)
    assert execute_and_capture(spec, mesh, replace(policy, compile=True), model) is None


def test_a_checkpointed_block_saves_its_input_wherever_the_peak_is() -> None:
    """A small vocabulary puts the peak into a block, whose recomputed activations are alive then. Its input:
    3 x 256 tokens of 4096 in bf16."""
    model = build_model(MIXTRAL.model, seq_len=256)
    full = probes(replace(MIXTRAL, fixed_policy={"ac": "full"}), [(1, 1)], model)[-1]
    assert full.policy.ac == "full"
    profile = measure(full)
    assert profile.kinds[0].saved_bytes == 3 * 256 * 4096 * 2
    logits = 3 * 256 * 32_000
    assert profile.held_at_loss[0].of_tokens >= logits * 4  # in fp32, for the loss
