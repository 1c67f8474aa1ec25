"""A check of a run of two ranks, made by hand: a group each rank describes, a parameter left out."""

from __future__ import annotations

from pathlib import Path

from fsdp2prof.analyzers.sharding.check import check_run
from fsdp2prof.manifest import (
    MeshInfo,
    ParameterInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    RankManifest,
    RankRecord,
    RunDirectory,
    RunInfo,
    UnshardedInfo,
)
from fsdp2prof.results import RunCheck


def run_check() -> RunCheck:
    """Two ranks, five rows."""
    return check_run(two_ranks())


def two_ranks() -> RunDirectory:
    """As the recorder would describe them."""
    ranks = tuple(
        RankRecord(rank=rank, path=Path(), manifest=_manifest(rank), trace=None, memory=None)
        for rank in range(2)
    )
    return RunDirectory(path=Path("run"), info=RunInfo(world_size=2), ranks=ranks)


def _manifest(rank: int) -> RankManifest:
    parameter = ParameterInfo(
        fqn="weight",
        global_shape=[5, 4],
        local_shape=[3 - rank, 4],
        padded_local_shape=[3, 4],
        dtype="float32",
        placement="Shard(0)",
        requires_grad=True,
    )
    group = ParamGroupInfo(
        root=0,
        fqn="",
        index=0,
        group_count=1,
        mesh=MeshInfo(device_type="cpu", shape=[2], dim_names=["dp_shard"], dim_groups=["1"]),
        shard_group="1",
        reduce_scatter_group="1",
        all_reduce_group=None,
        post_forward_group=None,
        shard_world_size=2,
        replicate_world_size=1,
        param_dtype=None,
        reduce_dtype=None,
        output_dtype=None,
        reshard_after_forward=True,
        offload=False,
        offload_pin_memory=False,
        unshard_async_op=False,
        requires_grad=True,
        parameters=[parameter],
    )
    left_out = UnshardedInfo(
        kind="parameter", fqn="scale", root=0, shape=[4], dtype="float32", nbytes=16, requires_grad=True
    )
    return RankManifest(
        rank=rank,
        world_size=2,
        state="complete",
        versions={"torch": "2.13.0"},
        param_groups=[group],
        process_groups=[
            ProcessGroupInfo(
                name="1", desc="mesh_dp_shard", backend="gloo", ranks=[0, 1], mesh_dim="dp_shard"
            )
        ],
        unsharded=[left_out],
    )
