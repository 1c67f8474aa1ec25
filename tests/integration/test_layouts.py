"""Real traces and snapshots in the folders that training programs write, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

pytestmark = pytest.mark.real_data


@pytest.fixture
def outputs(real_data: Path, tmp_path: Path) -> Path:
    """Two iterations as torchtitan writes them: traces of four ranks, snapshots of two."""
    root = tmp_path / "outputs"
    for step in (10, 20):
        traces = root / "profile_trace" / f"iteration_{step}"
        memory = root / "memory_snapshot" / f"step_{step:012d}_exit"
        traces.mkdir(parents=True)
        memory.mkdir(parents=True)
        for rank in range(4):
            shutil.copy(
                real_data / "traces" / "ddp4-mi300" / f"rank{rank}.json.gz",
                traces / f"rank{rank}_trace.json.gz",
            )
        for rank in range(2):
            recorded = real_data / "snapshots" / "fsdp2-llama8b-a100-oom"
            shutil.copy(
                recorded / f"rank{rank}_memory_snapshot.pickle", memory / f"{rank:06d}_step_{step}.pickle"
            )
    return root


def result(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    ended = call(capfd, *arguments, "--format", "json")
    assert (ended.code, ended.err) == (0, "")
    document: dict[str, Any] = json.loads(ended.out)
    return document


def test_the_output_folder_is_a_run_of_its_newest_iteration(
    capfd: pytest.CaptureFixture[str], outputs: Path
) -> None:
    found = result(capfd, "analyze", "run", outputs)
    newest = outputs / "profile_trace" / "iteration_20"
    assert [rank["source"] for rank in found["trace"]["ranks"]] == [
        str(newest / f"rank{rank}_trace.json.gz") for rank in range(4)
    ]
    assert [rank["rank"] for rank in found["memory"]["ranks"]] == [0, 1]
    assert f"reading the newest of iterations 10, 20: {newest}" in found["trace"]["warnings"][0]
    assert found["run"]["state"] == "unknown"
    assert [(r["has_trace"], r["has_memory"]) for r in found["run"]["ranks"]] == [(True, True)] * 2 + [
        (True, False)
    ] * 2


def test_each_part_alone_and_another_iteration(capfd: pytest.CaptureFixture[str], outputs: Path) -> None:
    trace = result(capfd, "analyze", "trace", outputs, "--iteration", "10")
    assert trace["ranks"][3]["source"].endswith("iteration_10/rank3_trace.json.gz")
    assert not any("iteration" in line for line in trace["warnings"])
    memory = result(capfd, "analyze", "memory", outputs, "--ranks", "1")
    assert [rank["rank"] for rank in memory["ranks"]] == [1]
    compared = result(
        capfd, "compare", outputs / "profile_trace" / "iteration_10", outputs / "profile_trace/iteration_20"
    )
    assert compared["step"]["delta_ns"] == 0
    call(capfd, "analyze", "memory", outputs, "--iteration", "7").refused("iteration 7", "10, 20")
    call(capfd, "analyze", "memory", outputs, "--ranks", "0,3").refused("rank 3 is not here", "0, 1")


def test_a_report_of_both(capfd: pytest.CaptureFixture[str], outputs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call(capfd, "report", outputs, "-o", page).code == 0
    assert "iteration_20" in page.read_text().replace("<wbr>", "")
