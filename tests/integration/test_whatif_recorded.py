"""Real recordings replayed: unchanged they take as long as they took, changed they change in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.whatif import what_if

REPLAYED = 0.02
"""How far off its own step time a replay may be."""


@pytest.mark.parametrize(
    "script",
    ["train_tiny_fsdp2", pytest.param("async_prefetch", marks=pytest.mark.slow), "accumulation"],
)
def test_a_recorded_run_replayed_unchanged_takes_as_long(
    recorded: Callable[[str, int], Any], script: str
) -> None:
    result = what_if(open_job(recorded(script, 2).run))
    assert abs(result.replay_error_frac) <= REPLAYED
    assert result.step_ns > 0


def test_never_resharding_gathers_each_layer_once_and_costs_its_memory(
    recorded: Callable[[str, int], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    run: Path = recorded("train_tiny_fsdp2", 2).run
    result = json.loads(call(capfd, "whatif", run, "--set", "reshard=never", "--format", "json").out)
    rows = [row for row in result["by_layer"] if (row["op"], row["fqn"]) == ("all_gather", "layers.1")]
    again = {row["phase"]: row for row in rows}
    assert (again["backward"]["count_before"], again["backward"]["count_after"]) == (1, 0)
    assert again["forward"]["count_after"] == again["forward"]["count_before"] == 1
    (tried,) = result["tried"]
    assert tried["gained_ns"] > 0
    layer = (
        395_520  # bytes of a block's 197,760 parameters in bfloat16; in the loss none of the four is there
    )
    assert tried["memory_bytes"] == 4 * layer


def test_what_a_cpu_cannot_overlap_is_refused_with_the_reason(
    recorded: Callable[[str, int], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    run: Path = recorded("train_tiny_fsdp2", 2).run
    ended = call(capfd, "whatif", run, "--set", "forward_prefetch=2")
    ended.refused("not replayed on a CPU")


def test_replicas_of_a_cpu_run_reduce_each_layer_once_more(
    recorded: Callable[[str, int], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Over two ranks gloo's reduce-scatter sends its input once; half of it is reduced over two replicas."""
    run: Path = recorded("train_tiny_fsdp2", 2).run
    mesh = "mesh=dp_replicate=2,dp_shard=2"
    result = json.loads(call(capfd, "whatif", run, "--set", mesh, "--format", "json").out)
    rows = {(row["fqn"], row["op"]): row for row in result["by_layer"] if row["phase"] == "backward"}
    scattered, reduced = rows["layers.1", "reduce_scatter"], rows["layers.1", "all_reduce"]
    assert reduced["count_after"] == scattered["count_after"] == 1
    assert reduced["count_before"] == 0
    assert reduced["total_after_ns"] <= scattered["total_before_ns"]
    (tried,) = result["tried"]
    assert tried["gained_ns"] < 0
    call(capfd, "whatif", run, "--set", mesh, "--network", "400gb-ib").refused("on CPUs", code=2)
