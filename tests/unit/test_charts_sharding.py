"""The picture of who holds which rows: shards by hand, uneven parameters first."""

from __future__ import annotations

from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.run_layout import mesh_of_run, shards_of_run
from fsdp2prof.reporters.charts.sharding import sharding_chart
from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh


def layout(fqn: str, rows: int) -> ParameterLayout:
    return ParameterLayout(
        root=0, group="", fqn=fqn, global_shape=(rows, 4), shape=(rows, 4), dim=0, dtype="float32",
        reduce_dtype=None, gather_dtype="float32", requires_grad=True, placements=("Shard(dim=0)",), mesh=0,
    )  # fmt: skip


def table(shards: int, **rows: int) -> ShardingTable:
    mesh = ShardMesh(
        text=f"dp={shards}", shard_dim="dp", ranks=tuple((rank,) for rank in range(shards)), replicas=1
    )
    parameters = tuple(layout(name.replace("_", "."), size) for name, size in rows.items())
    return ShardingTable(source="x", world_size=shards, meshes=(mesh,), parameters=parameters, warnings=())


def test_full_short_and_empty_shards() -> None:
    figure = sharding_chart(lay_out_shards(table(4, even=8, uneven=5)))
    assert figure is not None
    cells = figure["data"][0]
    assert cells["y"] == ["uneven", "even"]
    assert cells["z"] == [[1, 1, 0.5, 0], [1, 1, 1, 1]]
    assert cells["text"][0] == ["rows 0 to 1", "rows 2 to 3", "rows 4 to 4", "nothing"]


def test_layers_that_are_cut_alike_share_a_row() -> None:
    figure = sharding_chart(lay_out_shards(table(2, layers_0_w=8, layers_1_w=8, layers_2_w=8, head=8)))
    assert figure is not None
    assert figure["data"][0]["y"] == ["layers.0-2.w", "head"]


def test_one_shard_is_no_picture() -> None:
    assert sharding_chart(lay_out_shards(table(1, even=8))) is None


def test_a_run_without_parameter_groups_has_neither() -> None:
    assert shards_of_run("x", {}) is None
    assert mesh_of_run({}) is None
