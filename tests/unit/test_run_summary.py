"""What was run, in one record: ranks that left nothing, shards, padding, unknown dtypes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.results import run_summary, trace_analysis

from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.run_summary import combine, summarize_run
from fsdp2prof.analyzers.sharding.run_evidence import finding
from fsdp2prof.manifest import (
    DeviceInfo,
    MeshInfo,
    OptimizerInfo,
    ParameterInfo,
    ParamGroupInfo,
    RankManifest,
    RunInfo,
    StepInfo,
)
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.results.run import RunSummary
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, rank_folder


def parameter(rows: int, local: int, padded: int, dtype: str = "float32") -> ParameterInfo:
    """A (rows, 3) matrix of which this rank holds ``local`` rows and gathers ``padded``."""
    return ParameterInfo(
        fqn="w",
        global_shape=[rows, 3],
        local_shape=[local, 3],
        padded_local_shape=[padded, 3],
        dtype=dtype,
        placement="Shard(0)",
        requires_grad=True,
    )


def param_group(*parameters: ParameterInfo) -> ParamGroupInfo:
    return ParamGroupInfo(
        root=0,
        fqn="layers.0",
        index=0,
        group_count=1,
        mesh=MeshInfo(device_type="cpu", shape=[2, 2], dim_names=["dp_replicate", "dp_shard"]),
        shard_group="1",
        reduce_scatter_group="1",
        all_reduce_group="2",
        post_forward_group=None,
        shard_world_size=2,
        replicate_world_size=2,
        param_dtype="bfloat16",
        reduce_dtype=None,
        output_dtype=None,
        reshard_after_forward=True,
        offload=False,
        offload_pin_memory=False,
        unshard_async_op=False,
        requires_grad=True,
        parameters=list(parameters),
    )


def summary(folder: Path, *groups: ParamGroupInfo) -> RunSummary:
    """A run of four ranks, of which only rank 1 left anything."""
    (folder / rank_folder(1)).mkdir()
    info = RunInfo(command=["python", "train.py"], state="crashed", exit_code=1, world_size=4, hosts=["a"])
    (folder / RUN_FILE).write_bytes(msgspec.json.encode(info))
    manifest = RankManifest(
        rank=1,
        world_size=4,
        state="crashed",
        host="a",
        device=DeviceInfo(type="cuda", name="NVIDIA H100"),
        param_groups=list(groups),
        optimizers=[OptimizerInfo(class_name="AdamW", state_bytes=3 << 20, param_groups=1, parameters=2)],
        steps=[StepInfo(step=0, start_ns=5, duration_ns=7)],
        error="RuntimeError: x",
    )
    (folder / rank_folder(1) / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    return summarize_run(open_run(folder))


def test_ranks_that_left_nothing_are_missing(tmp_path: Path) -> None:
    found = summary(tmp_path)
    states = [(rank.rank, rank.state) for rank in found.ranks]
    assert states == [(0, "missing"), (1, "crashed"), (2, "missing"), (3, "missing")]
    crashed = next(rank for rank in found.ranks if rank.rank == 1)
    assert (crashed.device, crashed.error) == ("NVIDIA H100", "RuntimeError: x")
    assert [(step.step, step.duration_ns, step.kind) for step in crashed.steps] == [(0, 7, "plain")]
    assert (crashed.has_trace, crashed.has_memory) == (False, False)
    assert found.optimizers == ["AdamW, 3.00 MiB of state"]


def test_shards_and_padding(tmp_path: Path) -> None:
    """5 rows over 2 ranks: 3 and 2, padded to 3. Rank 1 holds 2 * 3 * 4 B and sends 3 * 3 * 4 B."""
    (group,) = summary(tmp_path, param_group(parameter(5, 2, 3))).shard_groups
    assert (group.numel, group.sharded_bytes, group.padding_bytes) == (15, 36, 12)
    assert group.mesh == "dp_replicate=2, dp_shard=2"


def test_several_dtypes_and_an_unknown_one(tmp_path: Path) -> None:
    (group,) = summary(tmp_path, param_group(parameter(2, 1, 1), parameter(2, 1, 1, "float3"))).shard_groups
    assert group.dtype == "float32, float3"
    assert (group.sharded_bytes, group.padding_bytes) == (None, None)


@pytest.mark.parametrize(("gathered", "named"), [(1 << 20, False), (256 << 20, True)])
def test_a_small_model_in_one_unit_is_fast_enough_for_a_long_step(gathered: int, named: bool) -> None:
    """1 MiB takes 0.3 ms of a step of 50 ms at 10 GB/s, with its reduction; 256 MiB take 80 ms."""
    trace = with_ledger(trace_analysis())
    found = finding("root_only", {"gathered_bytes": gathered}, severity="medium", fqn="", parameters=17)
    findings = combine(run_summary(), trace, None, [], [found]).findings
    assert ("root_only" in [one.id for one in findings]) is named


def test_a_crashed_run_begins_with_its_error_and_what_the_dumps_show(tmp_path: Path) -> None:
    found = combine(summary(tmp_path), None, None, [], [], ["Rank 1 skipped a collective."])
    assert found.verdict[:2] == ["Rank 1 crashed: RuntimeError: x.", "Rank 1 skipped a collective."]
