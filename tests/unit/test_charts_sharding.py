"""The picture of who holds which rows: shards by hand, uneven parameters first."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs
from support.nccl_files import manifest
from support.shards import sharding_table

from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.recorded import mesh_of_run, shards_of_run
from fsdp2prof.manifest import MeshInfo
from fsdp2prof.reporters.charts.sharding import sharding_chart
from fsdp2prof.reporters.document import Table
from fsdp2prof.reporters.documents.sharding import rows_blocks


def test_full_short_and_empty_shards() -> None:
    figure = sharding_chart(lay_out_shards(sharding_table(4, even=8, uneven=5)))
    assert figure is not None
    cells = figure["data"][0]
    assert cells["y"] == ["uneven", "even"]
    assert cells["z"] == [[1, 1, 0.5, 0], [1, 1, 1, 1]]
    assert cells["text"][0] == ["rows 0 to 1", "rows 2 to 3", "rows 4 to 4", "nothing"]


def test_layers_that_are_cut_alike_share_a_row() -> None:
    figure = sharding_chart(
        lay_out_shards(sharding_table(2, layers_0_w=8, layers_1_w=8, layers_2_w=8, head=8))
    )
    assert figure is not None
    assert figure["data"][0]["y"] == ["layers.0-2.w", "head"]


def test_one_shard_is_no_picture() -> None:
    assert sharding_chart(lay_out_shards(sharding_table(1, even=8))) is None


def test_a_run_without_parameter_groups_has_neither() -> None:
    assert shards_of_run("x", {}) is None
    assert mesh_of_run({}) is None


def test_dimensions_of_any_name_carry_what_their_process_groups_do() -> None:
    """HSDP on a mesh with the user's own names: what shards is read from the groups, not from names."""
    mesh = MeshInfo(device_type="cuda", shape=[2, 2], dim_names=["outer", "inner"], dim_groups=["5", "7"])
    ranks = {}
    for rank in range(4):
        plain = manifest(rank, size=4)
        group = structs.replace(plain.param_groups[0], mesh=mesh, shard_group="7", all_reduce_group="5")
        ranks[rank] = structs.replace(plain, param_groups=[group])
    found = mesh_of_run(ranks)
    assert found is not None
    carried = {one.name: one.carries for one in found.dimensions}
    assert carried == {
        "outer": "all-reduce of the sharded gradients (HSDP)",
        "inner": "FSDP's all-gathers and reduce-scatters",
    }


def test_ranks_that_hold_the_same_shard_stand_in_brackets() -> None:
    sharding = lay_out_shards(sharding_table(4, even=8))
    pairs = [replace(mesh, ranks_of_shard=[[i, i + 4] for i in range(4)]) for mesh in sharding.meshes]
    blocks = rows_blocks(replace(sharding, meshes=pairs))
    (table,) = (block for block in blocks if isinstance(block, Table))
    assert [row[2] for row in table.rows] == ["(0,4) to (3,7)"]
