"""``inspect sharding``: beside ``torch.chunk``, which ``fully_shard`` cuts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cli import call

from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.sharding_table import shard_model
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal
from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh


def table(shape: tuple[int, ...], shards: int, dim: int = 0) -> ShardingTable:
    mesh = ShardMesh(text="dp", shard_dim="dp", ranks=tuple((rank,) for rank in range(shards)), replicas=1)
    parameter = ParameterLayout(
        root=0,
        group="",
        fqn="weight",
        global_shape=shape,
        shape=shape,
        dim=dim,
        dtype="float32",
        reduce_dtype=None,
        gather_dtype="bfloat16",
        requires_grad=True,
        placements=(f"Shard(dim={dim})",),
        mesh=0,
    )
    return ShardingTable(source="test", world_size=shards, meshes=(mesh,), parameters=(parameter,))


@given(st.integers(1, 40), st.integers(1, 24))
def test_every_rank_holds_the_rows_that_chunk_gives_it(rows: int, shards: int) -> None:
    sharding = lay_out_shards(table((3, rows), shards, dim=1))
    held = {
        shard: list(
            range(
                piece.first_row + (shard - piece.first_shard) * piece.rows,
                piece.first_row + (shard - piece.first_shard + 1) * piece.rows,
            )
        )
        for piece in sharding.parameters[0].pieces
        for shard in range(piece.first_shard, piece.last_shard + 1)
    }
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(shards)]
    assert [held[shard] for shard in range(shards)] == chunks + [[]] * (shards - len(chunks))
    assert [one.bytes for one in sharding.ranks] == [4 * 3 * len(held[shard]) for shard in range(shards)]
    padded = len(chunks[0]) * shards
    assert sharding.padding_bytes == 4 * 3 * (padded - rows)


def test_redistribution_costs_by_hand() -> None:
    """A 5 x 4 fp32 parameter on 4 ranks: 2 rows a shard, so 8 x 4 are gathered, in bf16 by FSDP."""
    costs = {
        (one.op, one.meaning.split()[0]): one for one in lay_out_shards(table((5, 4), 4)).redistributions
    }
    unshard = costs["all_gather", "FSDP's"]
    assert (unshard.payload_bytes, unshard.wire_bytes) == (8 * 4 * 2, 8 * 4 * 2 * 3 // 4)
    gradients = costs["reduce_scatter", "FSDP's"]
    assert (gradients.payload_bytes, gradients.result_bytes) == (8 * 4 * 2, 2 * 4 * 2)
    turn = next(one for (op, _), one in costs.items() if op == "all_to_all")
    assert (turn.payload_bytes, turn.wire_bytes) == (5 * 4 * 4, 5 * 4 * 4 * 3 // 16)


def test_replicas_and_tensor_parallel_ranks_hold_the_same_rows() -> None:
    mesh = MeshSpec(dp_replicate=2, dp_shard=2, tp=2)
    model = ModelSpec(source="llama3-8b", layers=1)
    sharding = lay_out_shards(shard_model(model, mesh, PolicySpec(seq_len=4)))
    assert sharding.meshes[0].ranks_of_shard == [[0, 1, 4, 5], [2, 3, 6, 7]]
    embedding = next(one for one in sharding.parameters if one.fqn == "tok_embeddings.weight")
    assert embedding.global_shape[0] == 2 * embedding.shape[0]
    assert embedding.placements == ["Replicate()", "_StridedShard(dim=0, sf=2)", "Shard(dim=0)"]


def test_the_command_wants_a_run_or_a_model(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call(capfd, "inspect", "sharding").refused("one of the two", code=2)
    call(capfd, "inspect", "sharding", tmp_path, "--model", "gpt2").refused("one of the two", code=2)
    call(capfd, "inspect", "sharding", tmp_path / "none").refused("no such run directory")
    done = call(capfd, "inspect", "sharding", "--model", "gpt2", "--layers", "1", "--mesh", "dp_shard=5")
    assert done.code == 0
    assert "tok_embeddings." in done.out


@pytest.mark.skipif(expert_mesh_refusal() is not None, reason="this torch has one mesh for a module")
def test_experts_have_a_mesh_of_their_own() -> None:
    """Mixtral, 8 ranks, ep 2: a rank has 4 of 8 experts, and a shard one of them."""
    sharding = lay_out_shards(
        shard_model(ModelSpec(source="mixtral-8x7b", layers=1), MeshSpec(dp_shard=8, ep=2), PolicySpec())
    )
    assert [one.shard_dim for one in sharding.meshes] == ["dp_shard", "efsdp"]
    experts = [one for one in sharding.parameters if one.mesh == 1]
    assert experts
    for one in experts:
        assert (one.global_shape[0], one.shape[0], one.shards, one.rows_per_shard) == (8, 4, 4, 1)
        assert one.placements == ["_StridedShard(dim=0, sf=2)", "Shard(dim=0)"]
    whole = sum(one.bytes for one in sharding.parameters if one.mesh == 0)
    parts = sum(one.bytes for one in experts)
    assert sum(one.bytes for one in sharding.ranks) == whole + 2 * parts
