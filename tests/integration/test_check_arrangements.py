"""``check RUN`` on arrangements that are right, which raise nothing, and on mistakes, which are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2prof.workflows.check import check_run

from .conftest import script_path, torchrun, training_environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "ranks", "expected"),
    [
        ("layer_lists", 2, {}),
        ("context_parallel", 4, {}),
        ("skipped_blocks", 2, {}),
        ("offloaded", 2, {}),
        ("vision", 2, {}),
        ("two_optimizers", 2, {}),
        ("in_backward", 2, {}),
        ("reduced_by_script", 2, {}),
        ("stages", 4, {}),
        ("experts", 4, {}),
        ("seeds_alike", 4, {}),
        ("seeds_of_ranks", 4, {"replicas_differ": "high"}),
        ("partly_covered", 2, {"unreduced_parameters": "high", "streams_not_shared": "low"}),
    ],
)
def test_findings(tmp_path: Path, way: str, ranks: int, expected: dict[str, str]) -> None:
    judge(tmp_path, "arrangements", way, ranks, expected)


@pytest.mark.parametrize(
    ("way", "ranks", "expected"),
    [
        ("tied", 2, {}),
        ("frozen_encoder", 2, {}),
        ("hybrid", 4, {}),
        ("tensor_parallel", 4, {}),
        ("norms_in_float32", 2, {}),
        ("float8", 2, {}),
        ("two_parameter_groups", 2, {}),
        ("pipeline", 4, {}),
        ("head_in_no_optimizer", 2, {"not_optimized": "medium"}),
        ("optimizer_of_copies", 2, {"optimizer_before_fully_shard": "high"}),
        ("no_sync_left_on", 2, {"gradients_never_reduced": "high"}),
        ("sync_too_early", 2, {"gradients_reduced_too_early": "high"}),
        ("large_root", 2, {"root_holds_most": "low"}),
        ("sharded_over_one", 4, {"sharded_over_one_rank": "medium"}),
        ("context_forgotten", 4, {"unreduced_dimension": "high"}),
        ("half_precision", 2, {"half_precision_states": "medium"}),
    ],
)
def test_findings_of_set_ups(tmp_path: Path, way: str, ranks: int, expected: dict[str, str]) -> None:
    judge(tmp_path, "setups", way, ranks, expected)


def judge(tmp_path: Path, script: str, way: str, ranks: int, expected: dict[str, str]) -> None:
    """Record a way of a script, and hold its findings against those expected."""
    record = [sys.executable, "-m", "fsdp2prof", "record", "--verify", "-o", str(tmp_path / "run")]
    record += ["--active", "1", "--wait", "0", "--warmup", "0", "--no-memory", "--"]
    command = [*record, *torchrun(script_path(script), ranks, "--way", way)]
    done = subprocess.run(command, env=training_environment(), capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = check_run(tmp_path / "run")
    assert {one.id: one.severity for one in found.findings} == expected
    assert found.passed is ("high" not in expected.values())
