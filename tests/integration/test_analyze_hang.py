"""Real jobs that end badly: each is named by what their Flight Recorders kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.results.hang import HangAnalysis
from fsdp2prof.workflows.hang import analyze_hang

from .conftest import script_path, torchrun, training_environment

WORLD = 3
_ABORTED, _AGAIN = ("shape", "reorder"), 3
"""gloo aborts a rank as soon as sizes differ, on a busy machine at times before it has dumped: once more."""


def hang(folder: Path, how: str, *arguments: str, nproc: int = WORLD, recorded: bool = False) -> Path:
    """Let a job end badly; returns the folder of its dumps, in the run directory if it is recorded."""
    dumps = folder / "dumps"
    command = torchrun(script_path("hanging"), nproc, "--how", how, "--dumps", str(dumps), *arguments)
    if recorded:
        command = [sys.executable, "-m", "fsdp2prof", "record", "-f", "-o", str(folder), "--", *command]
    environment = training_environment(TORCH_FR_BUFFER_SIZE="2000")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    assert any(dumps.iterdir()), done.stderr[-4000:]
    return folder if recorded else dumps


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HangAnalysis]:
    def analyze(how: str) -> HangAnalysis:
        found = analyze_hang(hang(tmp_path_factory.mktemp(how), how))
        for _ in range(_AGAIN):
            if how not in _ABORTED or found.mismatches:
                break
            found = analyze_hang(hang(tmp_path_factory.mktemp(how), how))
        return found

    return analyze


@pytest.mark.slow
def test_a_rank_that_sleeps_has_not_come(ended: Callable[[str], HangAnalysis]) -> None:
    found = ended("sleep")
    assert (found.cause, found.culprits) == ("not_come", [1])
    stand = found.standings[0]
    assert (stand.call.op, stand.call.input_sizes, stand.call.dtype) == ("all_reduce", [[8]], "float32")
    assert (stand.came, stand.not_come, stand.no_dump) == ([0, 2], [1], [])
    assert found.ranks[1].last is not None
    assert (found.ranks[1].last.op, found.ranks[1].standing_in, found.ranks[1].behind) == ("barrier", None, 2)
    assert found.verdict[0].startswith("Ranks 0, 2 wait in all-reduce")
    assert "which rank 1 has not issued" in found.verdict[0]


@pytest.mark.slow
def test_a_rank_that_left_is_named_as_without_a_dump(ended: Callable[[str], HangAnalysis]) -> None:
    found = ended("leave")
    assert (found.cause, found.culprits) == ("no_dump", [1])
    assert "ank 1 " in found.verdict[0]
    assert found.ranks[1].dump is None


@pytest.mark.slow
def test_another_shape_is_named_with_both_sizes(ended: Callable[[str], HangAnalysis]) -> None:
    found = ended("shape")
    one = found.mismatches[0]
    assert (found.cause, one.kind, one.ranks, one.others) == ("mismatch", "size", [1], [0, 2])
    assert (one.found.input_sizes, one.expected.input_sizes) == ([[9]], [[8]])


@pytest.mark.slow
def test_a_reordered_pair_is_named_as_swapped(ended: Callable[[str], HangAnalysis]) -> None:
    found = ended("reorder")
    one = found.mismatches[0]
    assert (found.cause, one.kind, one.ranks) == ("mismatch", "swapped", [1])
    assert (one.found.input_sizes, one.expected.input_sizes) == ([[2, 3]], [[8]])


def test_a_skipped_layer_is_named_by_the_manifests(tmp_path: Path) -> None:
    found = analyze_hang(hang(tmp_path / "run", "skip", recorded=True))
    one = found.mismatches[0]
    assert (found.cause, one.ranks) == ("mismatch", [1])
    assert one.kind in ("early", "skipped")
    assert (one.found.fqn, one.expected.fqn) == ("layers.2", "layers.1")
    assert (one.expected.op, one.expected.phase) == ("all_gather", "forward")


@pytest.mark.slow
def test_layers_of_one_size_are_told_apart_by_their_order(tmp_path: Path) -> None:
    """Rank 1 sleeps before ``layers.2`` of three that are alike."""
    run = hang(tmp_path / "run", "layer", "--alike", recorded=True)
    found = analyze_hang(run)
    assert (found.cause, found.culprits) == ("not_come", [1])
    call = found.standings[0].call
    assert (call.op, call.fqn, call.phase, call.mesh_dim) == ("all_gather", "layers.2", "forward", "dp_shard")
    assert found.ranks[1].last is not None
    assert found.ranks[1].last.fqn == "layers.1"
    unknown = analyze_hang(run / "dumps").standings[0].call
    assert (unknown.fqn, unknown.layer_known) == (None, False)
    assert analyze_hang(run / "dumps", run=run).standings[0].call == call


def test_a_recorded_job_that_stands_still_leaves_its_state(tmp_path: Path) -> None:
    """For a while rank 1 gets no data, and rank 2 lets no thread write; then the job goes on to its end.

    Only rank 0 is recorded; a hang is every rank's.
    """
    run = tmp_path / "run"
    training = torchrun(script_path("pausing"), 3, "--seconds", "25")
    command = [
        sys.executable,
        "-m",
        "fsdp2prof",
        "record",
        "-o",
        str(run),
        "--no-memory",
        "--ranks",
        "0",
        "--hang-after",
        "2",
    ]
    done = subprocess.run(
        [*command, "--", *training],
        env=training_environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    told = next(line for line in done.stderr.splitlines() if "no step has ended" in line)
    assert f"`fsdp2prof analyze hang {run}`" in told
    assert "deprecated" not in done.stderr
    found = analyze_hang(run)
    assert (found.cause, found.culprits) == ("not_come", [1])
    call = found.standings[0].call
    assert (call.op, call.fqn, call.phase, found.standings[0].no_dump) == ("all_gather", "", "forward", [2])
    stood = {rank: place for place in found.places for rank in place.ranks}
    assert [(stood[rank].own.function, stood[rank].doing) for rank in (0, 1)] == [
        ("main", "communicating"),
        ("main", "loading_data"),
    ]
    assert found.places[0].ranks == [1]
    assert re.search(r"Rank 1 is in `main` \(pausing\.py:\d+\), loading data", " ".join(found.verdict))
    if shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists():
        assert found.ranks[2].stack is not None
        assert (stood[2].own.function, found.ranks[2].stack.tool) == ("keep_the_lock", "py-spy")
    else:
        assert "rank 2 did not answer" in told
    opened = open_run(run)
    assert [record.manifest is not None and record.manifest.selected for record in opened.ranks] == [
        True,
        False,
        False,
    ]
