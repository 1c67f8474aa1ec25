"""``check RUN``: correct runs pass; mistakes planted in real runs and in their manifests are named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

from fsdp2prof.results.check import RunCheck
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, rank_folder
from fsdp2prof.workflows.check import check_run
from fsdp2prof.workflows.inspect import inspect_run_sharding

from .conftest import script_path, torchrun, training_environment

Plant = Callable[[dict[int, dict[str, Any]], dict[str, Any]], None]


def states(check: RunCheck) -> dict[str, str]:
    return {row.name: row.state for row in check.checks}


def ids(check: RunCheck) -> list[str]:
    return [one.id for one in check.findings]


@pytest.mark.parametrize(
    ("name", "nproc", "expected"),
    [
        ("uneven", 2, []),
        ("hsdp", 4, []),
        ("adapters", 2, []),
        ("int_reshard", 4, ["reshard_cannot_help"]),
        ("two_models", 2, ["streams_not_shared"]),
    ],
)
def test_what_is_set_up_right_passes(recorded, name: str, nproc: int, expected: list[str]) -> None:
    found = check_run(recorded(name, nproc).run)
    assert found.passed
    assert set(ids(found)) <= {*expected, "root_only", "same_inputs"}  # all ranks draw the same data
    assert set(expected) <= set(ids(found))
    assert set(states(found).values()) == {"ok"}
    (replicas,) = (one for one in found.checks if one.name == "replicas")
    assert ("a sample" in replicas.said, replicas.checked > 0) == ((name == "hsdp",) * 2)


def test_rows_of_a_recorded_run_are_what_its_ranks_hold(recorded) -> None:
    run = recorded("uneven", 2).run
    sharding = inspect_run_sharding(run)
    for rank in range(2):
        manifest = json.loads((run / rank_folder(rank) / MANIFEST_FILE).read_text())
        for group in manifest["param_groups"]:
            for told in group["parameters"]:
                (one,) = (each for each in sharding.parameters if each.fqn == told["fqn"])
                (piece,) = (each for each in one.pieces if each.first_shard <= rank <= each.last_shard)
                assert piece.rows == told["local_shape"][0]


def test_mistakes_of_a_real_run_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    record = [sys.executable, "-m", "fsdp2prof", "record", "--verify", "-o", str(run)]
    record += ["--active", "1", "--wait", "0", "--warmup", "0", "--"]
    command = [*record, *torchrun(script_path("mistakes"), 4, "--steps", "2")]
    done = subprocess.run(command, env=training_environment(), capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = check_run(run)
    assert {one.id: one.severity for one in found.findings} == {
        "replicas_differ": "high",
        "optimizer_before_fully_shard": "high",
        "unreduced_parameters": "high",
        "unreduced_dimension": "high",
        "root_only": "low",
        "half_precision_states": "medium",
        "frozen_in_fp32": "low",
        "reshard_cannot_help": "low",
        "streams_not_shared": "low",
    }
    said = {one.id: one for one in found.findings}
    assert said["optimizer_before_fully_shard"].evidence["parameters"] == 20
    unreduced = [one.message for one in found.findings if one.id == "unreduced_parameters"]
    assert any("embedding.weight" in one for one in unreduced)
    assert any("SGD[2]" in one for one in unreduced)
    assert "cp" in {one.evidence.get("dimension") for one in found.findings}
    assert "in values" in said["replicas_differ"].message
    assert all("optimizer" in one.kind or one.fqn == "embedding.weight" for one in found.unsharded)
    ended = call(capfd, "check", run, "--format", "json")
    assert ended.code == 3
    assert json.loads(ended.out)["schema"] == "fsdp2prof.check/1"
    assert "replicas_differ" in ended.err
    assert call(capfd, "check", "run", run, "--fail-at", "never").code == 0


TO_LOOK_AT = {
    "nccl_overridden",
    "transport_disabled",
    "debugging_variables",
    "device_of_another_rank",
    "another_wrapper",
}
"""Findings that do not fail a check by default."""


def wrong_rows(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    ranks[1]["param_groups"][1]["parameters"][0]["local_shape"][0] += 1


def other_order(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    ranks[2]["param_groups"].reverse()


def one_group_less(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    del ranks[3]["param_groups"][-1]


def other_members(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    name = ranks[0]["param_groups"][0]["shard_group"]
    (group,) = (one for one in ranks[0]["process_groups"] if one["name"] == name)
    group["ranks"] = [0, 2]


def no_rank_2(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    del ranks[2]


def other_torch(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    ranks[3]["versions"]["torch"] = "2.9.0"


def gradients_of_replicas(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    for rank, manifest in ranks.items():
        for group in manifest["param_groups"]:
            for one in group["parameters"]:
                one["checksum"], one["gradient_checksum"] = "same", f"of rank {rank}"


def on_gpus(ranks: dict[int, dict[str, Any]], index: Callable[[int], int]) -> None:
    for rank, manifest in ranks.items():
        manifest["device"] = {"type": "cuda", "index": index(rank), "name": "NVIDIA H100"}
        manifest["local_rank"], manifest["environment"] = rank, {}


def same_device(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    on_gpus(ranks, lambda rank: 0)


def one_device_each(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    """As under Slurm with a device a task: all have index 0."""
    on_gpus(ranks, lambda rank: 0)
    for rank, manifest in ranks.items():
        manifest["device"]["uuid"] = f"GPU-{rank}"


def global_rank(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    """Two nodes of two devices that are visible as 2 and 3 on the second."""
    on_gpus(ranks, lambda rank: rank)
    for rank, manifest in ranks.items():
        manifest["local_rank"], manifest["host"] = rank % 2, f"node{rank // 2}"


def variables(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    on_gpus(ranks, lambda rank: rank)
    for manifest in ranks.values():
        manifest["environment"] = {
            "NCCL_ALGO": "Ring",
            "NCCL_IB_DISABLE": "1",
            "CUDA_LAUNCH_BLOCKING": "1",
            "NCCL_DEBUG": "WARN",
        }


def other_variables(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    on_gpus(ranks, lambda rank: rank)
    ranks[1]["environment"] = {"NCCL_PROTO": "LL"}


def wrapped_twice(_: dict[int, dict[str, Any]], info: dict[str, Any]) -> None:
    info["wrappers"] = ["DistributedDataParallel"]


def fsdp1_instead(ranks: dict[int, dict[str, Any]], info: dict[str, Any]) -> None:
    info["wrappers"] = ["FullyShardedDataParallel (FSDP1)"]
    for manifest in ranks.values():
        manifest["param_groups"] = []


def nothing(ranks: dict[int, dict[str, Any]], _: dict[str, Any]) -> None:
    for manifest in ranks.values():
        manifest["param_groups"] = []


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (wrong_rows, {"wrong_shards", "shards_do_not_add_up"}),
        (other_order, {"groups_differ"}),
        (one_group_less, {"groups_differ"}),
        (other_members, {"shard_groups_differ"}),
        (no_rank_2, {"ranks_missing"}),
        (other_torch, {"versions_differ"}),
        (gradients_of_replicas, {"replicas_differ"}),
        (same_device, {"shared_device"}),
        (one_device_each, set()),
        (global_rank, {"device_of_another_rank"}),
        (variables, {"nccl_overridden", "transport_disabled", "debugging_variables"}),
        (other_variables, {"variables_differ"}),
        (wrapped_twice, {"another_wrapper"}),
        (fsdp1_instead, {"not_fully_shard"}),
        (nothing, {"nothing_sharded"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_planted_in_manifests_is_named(
    recorded, tmp_path: Path, plant: Plant, expected: set[str]
) -> None:
    source, run = recorded("hsdp", 4).run, tmp_path / "run"
    info = json.loads((source / RUN_FILE).read_text())
    ranks = {rank: json.loads((source / rank_folder(rank) / MANIFEST_FILE).read_text()) for rank in range(4)}
    before = set(ids(check_run(source)))
    plant(ranks, info)
    run.mkdir()
    (run / RUN_FILE).write_text(json.dumps(info))
    for rank, manifest in ranks.items():
        (run / rank_folder(rank)).mkdir()
        (run / rank_folder(rank) / MANIFEST_FILE).write_text(json.dumps(manifest))
    found = check_run(run)
    assert expected <= set(ids(found)) - before
    assert found.passed is (expected <= TO_LOOK_AT)
    if not expected:
        assert set(ids(found)) <= before


def test_what_is_no_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call(capfd, "check", tmp_path / "none").refused("no such run directory")
    shutil.copy(__file__, tmp_path / "file")
    call(capfd, "check", tmp_path / "file").refused("not a run directory")
