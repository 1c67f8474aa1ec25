"""The picture of who holds which rows: shards by hand, uneven parameters first."""

from __future__ import annotations

from support.shards import sharding_table

from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.run_layout import mesh_of_run, shards_of_run
from fsdp2prof.reporters.charts.sharding import sharding_chart


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
