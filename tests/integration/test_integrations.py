"""Trainers that record themselves: a step is the trainer's step, whatever it accumulates."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from integration.conftest import script_path, torchrun, training_environment

import fsdp2prof

STEPS, ACCUMULATED, TRACED = 8, 2, [2, 3, 4]
GROUPS = 4
"""Three layers and the root; of the Llama its embedding, two layers, and norm and head together."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "needs"),
    [
        ("huggingface", ("transformers", "accelerate")),
        ("accelerate", ("accelerate",)),
        ("lightning", ("lightning",)),
        ("torchtitan", ("torchtitan", "tyro")),
    ],
)
def test_a_trainer_records_its_own_steps(framework: str, needs: tuple[str, ...], tmp_path: Path) -> None:
    for name in needs:
        pytest.importorskip(name, reason=f"{name} is not installed")
    run = tmp_path / "run"
    done = subprocess.run(
        torchrun(script_path("trainers"), 2, framework, str(run)),
        env=training_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    analysis = fsdp2prof.analyze_run(run)
    assert analysis.run.state == "complete"
    assert [rank.state for rank in analysis.run.ranks] == ["complete", "complete"]
    for rank in analysis.run.ranks:
        assert [step.step for step in rank.steps] == list(range(STEPS)), "a step is not a micro-batch"
        assert rank.traced_steps == TRACED
        assert rank.error is None
    assert analysis.trace is not None
    gathered = Counter[tuple[int, int, str | None]]()
    for row in analysis.trace.groups:
        if (row.op, row.phase) == ("all_gather", "forward"):
            gathered[row.rank, row.step, row.fqn] += row.count
    assert len(gathered) == 2 * len(TRACED) * GROUPS
    assert set(gathered.values()) == {ACCUMULATED}, "one forward all-gather a micro-batch"
    assert analysis.memory is not None
    assert len(analysis.memory.ranks) == 2
