"""``inspect mesh``: beside torch's own mesh, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.cli import call
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.analyzers.sharding.mesh_map import map_mesh
from fsdp2prof.errors import UsageError
from fsdp2prof.estimators.execution.fake_world import forget_meshes

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 3}


@pytest.mark.parametrize("rank", [0, 7, 29, 47])
def test_coordinates_and_groups_are_those_of_torch(rank: int) -> None:
    found = map_mesh(SIZES, gpus_per_node=8)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=48)
    try:
        mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
        flat = mesh["dp_shard", "cp"]._flatten()
        coordinate = mesh.get_coordinate()
        expected = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in SIZES}
        expected["dp_shard_cp"] = dist.get_process_group_ranks(flat.get_group())
    finally:
        dist.destroy_process_group()
        forget_meshes()  # torch 2.7 would give the next rank's equal mesh this one's groups
    mine = found.ranks[rank]
    assert list(mine.coordinate.values()) == list(coordinate or ())
    groups = {(group.dimension, group.index): group.ranks for group in found.groups}
    assert {name: groups[name, index] for name, index in mine.groups.items()} == expected


def test_groups_cross_nodes_where_their_ranks_are_on_several() -> None:
    found = map_mesh({"dp_replicate": 2, "dp_shard": 4, "tp": 2}, gpus_per_node=8)
    rows = {one.name: (one.groups_across_nodes, one.nodes_per_group) for one in found.dimensions}
    assert rows == {"dp_replicate": (8, 2), "dp_shard": (0, 1), "tp": (0, 1)}
    assert [group.ranks for group in found.groups if group.dimension == "dp_shard"] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]
    assert not found.warnings


def test_a_node_that_is_not_filled_and_tp_that_leaves_its_node_are_said() -> None:
    found = map_mesh({"dp_shard": 3, "tp": 4}, gpus_per_node=8)
    assert found.nodes == 2
    assert found.warnings == ["12 ranks do not fill nodes of 8 GPUs: the last has 4."]
    split = map_mesh({"dp_shard": 3, "tp": 4}, gpus_per_node=6)
    assert split.warnings == [
        "1 of 3 groups of tp cross nodes: it communicates inside every layer; keep its groups on one node."
    ]


def test_ranks_are_found_by_their_coordinate() -> None:
    found = map_mesh(SIZES, gpus_per_node=8, at={"pp": 1, "tp": 2, "cp": 0})
    # 24 * pp + 12 * dp_replicate + 6 * dp_shard + 3 * cp + tp
    assert [one.rank for one in found.ranks] == [26, 32, 38, 44]
    assert all(set(group.ranks) & {26, 32, 38, 44} for group in found.groups)


@pytest.mark.parametrize("wrong", [{"at": {"ep": 0}}, {"at": {"tp": 3}}, {"ranks": {48}}])
def test_what_the_mesh_does_not_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        map_mesh(SIZES, gpus_per_node=8, **wrong)


def test_the_command_refuses_what_is_no_mesh_and_no_coordinate(capfd: pytest.CaptureFixture[str]) -> None:
    call(capfd, "inspect", "mesh", "dp_shard").refused("NAME=SIZE")
    call(capfd, "inspect", "mesh", "dp_shard=4", "--at", "dp_shard").refused("DIM=I", code=2)
    call(capfd, "inspect", "mesh", "dp_shard=99999999").refused("more than")
    call(capfd, "inspect", "mesh", "dp_shard=6,ep=4").refused("ep=4 does not divide the 6 ranks", code=2)


def test_expert_parallelism_regroups_the_ranks_that_fsdp_shards_over() -> None:
    """Eight ranks, ep 4: neighbours exchange tokens; FSDP shards each quarter of the experts over two."""
    found = map_mesh({"dp_shard": 8}, gpus_per_node=4, ep=4)
    by_name = {one.name: one for one in found.dimensions}
    groups = {name: [one.ranks for one in found.groups if one.dimension == name] for name in by_name}
    assert groups["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["efsdp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [(by_name[name].stride, by_name[name].groups_across_nodes) for name in ("ep", "efsdp")] == [
        (1, 0),
        (4, 4),
    ]
    assert found.mesh == "dp_shard=8,ep=4"
    assert found.ranks[5].groups == {"dp_shard": 0, "ep": 1, "efsdp": 1}


def test_expert_groups_beside_other_dimensions_are_torchs_own() -> None:
    """As a mesh whose dp_shard x cp x tp is cut in two gives them, the last part the fastest."""
    import torch

    found = map_mesh({"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 3}, gpus_per_node=8, ep=4)
    mesh = torch.arange(48).view(2, 6, 4)  # dp_replicate, efsdp, ep
    for name, dim in (("ep", 2), ("efsdp", 1)):
        expected = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
        assert sorted(one.ranks for one in found.groups if one.dimension == name) == sorted(expected)
