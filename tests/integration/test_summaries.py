"""``record --summary``: what is left says the same as the trace and the memory recording did."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from fsdp2prof import analyze_memory, analyze_run, analyze_trace
from fsdp2prof.errors import UsageError
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.workflows.summarise_rank import summarise_rank

from .conftest import script_path, training_environment


def parts(result: RunAnalysis) -> tuple[object, ...]:
    """What does not depend on ranks compared with each other, nor on where the files lie."""
    trace, memory = result.trace, result.memory
    assert trace is not None
    assert memory is not None
    ranks = [replace(rank, source="") for rank in trace.ranks]
    fullest = replace(memory.ranks[0], at_peak=None)
    others = sorted(memory.ranks[1:], key=lambda rank: rank.rank)
    rows = trace.groups, trace.by_layer, trace.layers, trace.host_syncs
    return ranks, trace.totals.breakdown_ns, *rows, fullest, *(replace(one, at_peak=None) for one in others)


def test_ranks_that_were_summarised_say_what_their_files_said(recorded, tmp_path):
    whole = recorded("train_tiny_fsdp2", 2).run
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for rank in (0, 1):
        summarise_rank(run / f"rank-0000{rank}")
    left = {file.name for file in run.glob("rank-*/*")}
    assert left == {"manifest.json", "summary.json"}
    assert all(file.stat().st_size < 400_000 for file in run.glob("rank-*/summary.json"))
    before, after = analyze_run(whole), analyze_run(run)
    assert parts(after) == parts(before)
    assert after.run.messages == before.run.messages == []
    assert any("record again without --summary" in line for line in after.advice + after.trace.advice)  # type: ignore[union-attr]
    assert analyze_trace(run).by_layer == after.trace.by_layer  # type: ignore[union-attr]
    assert analyze_memory(run).ranks == after.memory.ranks  # type: ignore[union-attr]
    assert [rank.rank for rank in analyze_trace(run, ranks=[1]).ranks] == [1]
    with pytest.raises(UsageError, match="need the traces"):
        analyze_run(run, steps=[2])


def test_a_training_leaves_its_summary_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    options = ["--world-size", "4", "--summary", "--active", "1", "--memory-steps", "1"]
    options += ["-o", str(run)]
    command = [sys.executable, "-m", "fsdp2prof", "rehearse", *options, "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script_path("uneven")), "--steps", "4"],
        env=training_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (run / "rank-00000").iterdir()} == {"manifest.json", "summary.json"}
    assert (open_run(run).info.state, open_run(run).messages) == ("complete", ())
    result = analyze_run(run)
    assert result.trace is not None
    assert result.memory is not None
    assert [step.step for step in result.trace.ranks[0].steps] == [2]
