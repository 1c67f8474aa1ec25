"""What a recorded training computes, prints and exits with is what it does alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.present import manifest_of
from support.recordings import SHORT

from fsdp2prof import analyze_run
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_recording, open_run
from fsdp2prof.workflows.balance import check_balance
from fsdp2prof.workflows.job.job_files import open_job

from .conftest import script_path, torchrun, training_environment


@pytest.fixture
def compare(tmp_path):
    """Runs a command alone and recorded, asserts that both print the same and end well; returns the run."""

    def alone_and_recorded(command, *options):
        record = [sys.executable, "-m", "fsdp2prof", "record", *SHORT, "-o"]
        record += [str(tmp_path / "run"), *options, "--"]
        alone, recorded = (
            subprocess.run(
                [*prefix, *command],
                env=training_environment(),
                capture_output=True,
                timeout=240,
                check=False,
            )
            for prefix in ([], record)
        )
        assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
        assert sorted(recorded.stdout.splitlines()) == sorted(alone.stdout.splitlines())
        return open_run(tmp_path / "run")

    return alone_and_recorded


def test_parameters_are_the_same_bit_for_bit(compare):
    run = compare(torchrun(script_path("checksums"), 2), "--watch")
    assert run.info.state == "complete"
    assert [rank.manifest.memory_steps for rank in run.ranks] == [[5], [5]]
    balance = check_balance(open_job(run.path))
    assert (balance.measured_on, sorted(one.rank for one in balance.ranks)) == ("watched", [0, 1])
    for step in balance.steps:  # what a rank does itself is a part of its step
        assert 0 <= step.lost_ns <= step.max_busy_ns <= max(one.duration_ns for one in balance.steps) * 2
    assert balance.lost_ns == pytest.approx(balance.constant_ns + balance.varying_ns)


@pytest.mark.parametrize(
    "how", [pytest.param((), id="waiting", marks=pytest.mark.slow), pytest.param(("--alone",), id="alone")]
)
def test_every_rank_is_in_every_recording(compare, how):
    """One follows the other without a step between, and the rank that leads is the last to begin each."""
    options = "--every 4 --wait 0 --warmup 1 --active 2 --memory-steps 1"
    run = compare(torchrun(script_path("apart"), 2, *how), *options.split())
    assert run.recordings == (1, 2, 3, 4)
    for number in run.recordings:
        first = 4 * number - 3
        for rank in open_recording(run, number).ranks:
            manifest = manifest_of(rank)
            assert (manifest.traced_steps, manifest.memory_steps) == ([first, first + 1], [first + 2])
            assert manifest.state == "complete"
    assert run.messages == ()


@pytest.mark.slow
def test_a_hang_that_is_kept_and_repeated_summaries_change_nothing(compare):
    """Rank 1 stands still in the sixth step; of every third step only a summary is kept."""
    options = "--watch --summary --hang-after 2 --on-slow 1.5x --every 3 --warmup 0 --active 1 --max-size 1GB"
    run = compare(torchrun(script_path("checksums"), 2, "--pause", "5"), *options.split())
    for rank in run.ranks:
        assert (rank.path / "stacks.txt").read_text().startswith("# no step ended for ")
        assert len((rank.path / "steps.jsonl").read_text().splitlines()) == 8
    assert run.recordings[:2] == (1, 2)
    left = {file.name for number in (1, 2) for file in run.path.glob(f"recording-000{number}/rank-*/*")}
    assert left == {"manifest.json", "summary.json"}
    assert analyze_run(run.path).trace is not None


@pytest.mark.slow
def test_compiled_code_stays_compiled(compare):
    run = compare(torchrun(script_path("checksums"), 2, "--compiled"))
    assert (run.info.state, len(run.messages)) == ("complete", 1)
    assert (
        "memory is not recorded: counting storages on a CPU would run torch.compile's code" in run.messages[0]
    )
    for rank in run.ranks:
        assert (rank.manifest.traced_steps, rank.manifest.memory_steps) == ([2, 3, 4], [])
        assert (rank.trace is not None, rank.memory) == (True, None)


@pytest.mark.slow
def test_forks_in_recorded_steps(compare):
    run = compare(torchrun(script_path("forking"), 1, "--at", "1", "3", "5", "6"))
    assert (run.info.state, run.messages) == ("complete", ())
    (rank,) = run.ranks
    assert (rank.manifest.traced_steps, rank.manifest.memory_steps) == ([2, 3, 4], [5])
    (memory,) = read_memory(rank.memory)
    assert memory.allocations.size.sum() > 0


def test_an_argument_that_is_no_text(compare):
    script = "import os, sys; sys.stdout.buffer.write(os.fsencode(sys.argv[1]))"
    run = compare([sys.executable, "-c", script, os.fsdecode(b"caf\xe9")])
    assert run.info.command[-1] == r"caf\xe9"


@pytest.mark.slow
def test_an_argument_that_is_no_text_in_a_rank(compare):
    run = compare(torchrun(script_path("never_reshard"), 1, "--note", os.fsdecode(b"caf\xe9")))
    assert run.info.state == "complete"
    assert run.ranks[0].manifest.script[-1] == r"caf\xe9"


def test_a_run_directory_that_is_no_text_is_refused(tmp_path):
    run = tmp_path / os.fsdecode(b"caf\xe9")
    record = [sys.executable, "-m", "fsdp2prof", "record", "-o", str(run), "--", "true"]
    done = subprocess.run(record, capture_output=True, timeout=60, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert done.stderr.endswith(b": its name is not UTF-8, which no JSON can hold; choose another\n")
