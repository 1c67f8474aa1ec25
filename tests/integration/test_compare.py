"""A recorded run against its estimate, against itself kept as JSON, and rank against rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import call
from support.recordings import STEPS

from .conftest import REPOSITORY, Recorded, script_path, torchrun, training_environment

FACTORY = """
from train_tiny_fsdp2 import TinyTransformer

def tiny():
    return TinyTransformer(vocab=1024, dim=128, layers=4, heads=4)
"""


@pytest.fixture(scope="module")
def run(recorded: Callable[[str, int], Recorded]) -> Path:
    return recorded("train_tiny_fsdp2", 2).run


def test_an_estimate_says_the_collectives_and_the_shards_of_the_run(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    what = ["--model", "tiny_model:tiny", "--mesh", "dp_shard=2", "--batch-size", "4", "--seq-len", "64"]
    kept: list[str | Path] = ["--save-run", tmp_path / "estimate", "-o", tmp_path / "estimate.json"]
    saved = call(capfd, "estimate", "memory", *what, "--no-clip-grad", *kept)
    assert saved.code == 0, saved.err
    exactly = ["--fail-on", "peak_allocated_frac!=0", "--fail-on", "peak_reserved_frac!=0"]
    same = call(capfd, "compare", tmp_path / "estimate", tmp_path / "estimate.json", *exactly, "--full")
    assert (same.code, "the whole peak" in same.out) == (0, True), same.err
    gate = ["--fail-on", "unequal_collectives>0"]
    ended = call(capfd, "compare", run, tmp_path / "estimate", *gate, "--format", "json")
    assert ended.code == 0, ended.err
    compared = json.loads(ended.out)
    assert compared["after"]["kind"] == "estimate"
    assert compared["communication_equal"] is True
    assert len(compared["communication"]) == 14
    changes = {row["category"]: row["delta_bytes"] for row in compared["memory"]["by_category"]}
    assert changes["sharded_parameter"] == 0
    assert compared["step"] is None
    assert any("ran on a CPU" in line for line in compared["warnings"])
    text = call(capfd, "compare", run, tmp_path / "estimate", "--full").out
    assert "counts, payload and wire bytes of the collectives: all 14 rows" in text


def test_a_run_against_itself_kept_as_json(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    assert call(capfd, "analyze", "run", run, "-o", baseline).code == 0
    gates = ["step_time_frac!=0", "unequal_collectives>0", "peak_allocated_frac!=0", "wire_bytes_frac!=0"]
    ended = call(
        capfd, "compare", baseline, run, "--full", *(word for gate in gates for word in ("--fail-on", gate))
    )
    assert ended.code == 0, ended.err
    assert "the whole peak" in ended.out


def test_traces_and_recordings_of_two_ranks(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = run / "rank-00000", run / "rank-00001"
    traces = call(capfd, "compare", *(rank / "trace.json.gz" for rank in ranks), "--format", "json")
    compared = json.loads(traces.out)
    assert compared["communication_equal"] is True
    assert compared["step"]["before_ns"] > 0
    assert compared["memory"] is None
    memory = call(capfd, "compare", *(rank / "memory.npz" for rank in ranks), "--format", "json")
    compared = json.loads(memory.out)
    assert compared["step"] is None
    assert compared["memory"]["before"]["allocated_bytes"] > 0
    call(capfd, "compare", ranks[0] / "trace.json.gz", ranks[1] / "memory.npz").refused("nothing to compare")


@pytest.mark.slow
def test_the_gate_of_the_examples(run: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = training_environment(
        PATH=path, MAX_SLOWDOWN="1e6", MAX_WIRE_GROWTH="-1", MAX_MEMORY_GROWTH="0"
    )
    gate = [REPOSITORY / "examples" / "ci_gate.sh", run]
    training = torchrun(script_path("train_tiny_fsdp2"), 2, "--steps", str(STEPS))
    ended = subprocess.run(
        [*gate, *training], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 3, ended.stderr
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: wire_bytes_frac>-1: wire_bytes_frac is 0")
    assert "; " not in error  # memory is exactly the baseline's
    assert "Comparison" in ended.stdout
