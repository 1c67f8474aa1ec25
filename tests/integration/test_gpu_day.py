"""What ``make gpu`` leaves behind: made here on two gloo ranks; made on a GPU where ``tests/data/gpu`` is."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

from .conftest import REPOSITORY, training_environment

FROM_A_GPU = REPOSITORY / "tests" / "data" / "gpu"


@dataclass(frozen=True)
class Made:
    """A folder of ``make gpu``."""

    folder: Path
    printed: str
    """By the run that made it; empty where it was made elsewhere."""

    def table(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def unpacked(self, name: str, target: Path) -> Path:
        """Copy a recording and unpack its snapshots."""
        run = target / name
        shutil.copytree(self.folder / "recordings" / name, run)
        for packed in run.glob("rank-*/*.pickle.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        return run


def gpu_day(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run what ``make gpu`` runs, as on a machine without a GPU."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_day", "-o", str(folder), *options],
        cwd=REPOSITORY,
        env=training_environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module", params=[pytest.param("made here", marks=pytest.mark.slow), "from a GPU"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    if request.param == "from a GPU":
        if not FROM_A_GPU.is_dir():
            pytest.skip(
                "no recordings from a GPU: run `make gpu` on one and copy its folder to tests/data/gpu"
            )
        return Made(FROM_A_GPU, "")
    folder = tmp_path_factory.mktemp("gpu-day")
    done = gpu_day(folder, "--quick", "--parts", "recordings,memory,tests")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return Made(folder, done.stdout)


def analysed(capfd: pytest.CaptureFixture[str], what: str, run: Path) -> Any:
    ended = call(capfd, "analyze", what, run, "--format", "json", "-q")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_every_recording_is_analysed_without_remainder(
    made: Made, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recordings = made.table("recordings")
    assert recordings
    for row in recordings:
        run = made.unpacked(row["name"], tmp_path)
        memory = analysed(capfd, "memory", run) if row["memory"] else {"ranks": []}
        # A peer of the rank that ran out of memory may be killed before it has written its own.
        least = 1 if row["out_of_memory"] else row["ranks"]
        assert least * row["memory"] <= len(memory["ranks"]) <= row["ranks"]
        for rank in memory["ranks"]:
            peak = rank["peak"]
            assert sum(peak["categories"].values()) == peak["allocated_bytes"] > 0
            assert sum(layer["bytes"] for layer in peak["by_layer"]) == peak["allocated_bytes"]
        assert any(rank["oom"] for rank in memory["ranks"]) == row["out_of_memory"]
        assert analysed(capfd, "run", run)["run"]["world_size"] == row["ranks"]
        if row["out_of_memory"]:
            continue
        trace = analysed(capfd, "trace", run)
        assert {rank["device_type"] for rank in trace["ranks"]} == {row["device"]}
        for rank in trace["ranks"]:
            for step in rank["steps"]:
                assert sum(step["breakdown_ns"].values()) == step["duration_ns"]
        attribution = trace["attribution"]
        assert attribution["attributed_ns"] == attribution["comm_ns"]
        assert (attribution["comm_ns"] > 0) == (row["ranks"] > 1)


def test_estimates_are_within_the_stated_error(made: Made) -> None:
    table = made.table("memory")
    assert table["rows"]
    for row in table["rows"]:
        for name, error in row["error_frac"].items():
            assert row["estimated_bytes"][name] / row["measured_bytes"][name] - 1 == error
            assert abs(error) <= table["stated_error_frac"], row


@pytest.fixture
def from_a_gpu(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Made(FROM_A_GPU, "").unpacked(name, tmp_path)


def test_ranks_that_share_a_gpu_explain_their_waits(
    from_a_gpu: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    analysis = analysed(capfd, "run", from_a_gpu("plain"))
    assert [one["id"] for one in analysis["findings"] if one["severity"] == "high"] == ["shared_device"]
    entries = analysis["trace"]["ledger"]["entries"]
    assert entries[0]["id"] == "sharing_a_device"
    assert entries[0]["frac"] > 0.9
    assert not [one["id"] for one in entries if one["told"]]
    assert not [step for rank in analysis["trace"]["ranks"] for step in rank["incomplete_steps"] or ()]


@pytest.mark.parametrize(("name", "recomputes"), [("checkpointing", True), ("plain", False)])
def test_recomputed_forwards_are_seen_without_labels(
    name: str, recomputes: bool, from_a_gpu: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """FSDP2's hooks leave no label in a forward that a checkpoint inside or around its module runs again."""
    causes = analysed(capfd, "run", from_a_gpu(name))["trace"]["ledger"]["causes_ns"]
    assert (causes.get("recompute", 0) > 0) == recomputes


def test_cuda_graphs_that_are_recorded_again_come_first(
    from_a_gpu: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    ledger = analysed(capfd, "run", from_a_gpu("cuda-graphs"))["trace"]["ledger"]
    told = [one for one in ledger["entries"] if one["told"]]
    assert [one["title"] for one in told] == ["capturing CUDA graphs"]
    assert 'mode="default"' in told[0]["remedy"]["change"]


def test_blas_workspaces_are_not_what_a_script_keeps(
    from_a_gpu: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    peak = analysed(capfd, "memory", from_a_gpu("plain"))["ranks"][0]["peak"]
    workspaces = [one for one in peak["largest_blocks"] if one["op"] == "cuBLAS (workspace)"]
    assert [(one["bytes"], one["category"]) for one in workspaces] == [(32 << 20, "temporary")] * 2
    assert peak["categories"]["unattributed"] < 2 << 20


def test_nothing_failed_and_what_was_skipped_says_why(made: Made) -> None:
    outcomes = made.table("summary")["outcomes"]
    assert {outcome["part"] for outcome in outcomes} >= {"recordings", "memory", "tests"}
    assert {outcome["state"] for outcome in outcomes} <= {"done", "skipped"}
    assert all(outcome["detail"] for outcome in outcomes)
    if made.printed:
        assert "skipped  tests: tests/gpu: no CUDA device" in made.printed
        assert made.printed.splitlines()[-1].startswith("2 done, 1 skipped")


def test_nothing_names_the_machine_it_was_made_on(made: Made) -> None:
    files = [path for path in made.folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        assert str(REPOSITORY).encode() not in content, path


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "recordings").write_text("in the way of the folder")
    done = gpu_day(tmp_path, "--quick", "--parts", "recordings,tests")
    assert done.returncode == 1
    assert "failed   recordings: plain: exit code" in done.stdout
    assert "skipped  tests: tests/gpu: no CUDA device" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 skipped")


def test_without_time_everything_is_skipped(tmp_path: Path) -> None:
    done = gpu_day(tmp_path, "--minutes", "0", "--parts", "recordings,memory,overhead")
    assert done.returncode == 0
    states = {
        (one["state"], one["detail"])
        for one in json.loads((tmp_path / "summary.json").read_text())["outcomes"]
    }
    assert ("skipped", "out of time") in states
    assert {state for state, _ in states} == {"skipped"}
