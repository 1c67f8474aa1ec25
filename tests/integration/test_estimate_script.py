"""``estimate ... -- CMD``: the training itself, as one rank on tensors without data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .alone_and_recorded import processes_that_mention
from .conftest import script_path, torchrun, training_environment

ENDLESS = ["--steps", "1000000"]
PARAMETERS = 1_053_440
"""Of the example."""


def estimated(verb: str, *options: str, command: list[str], mark: str = "") -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp2prof", "estimate", verb, *options, "--format", "json", "--", *command],
        env=training_environment(ESTIMATED=mark),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else (done.returncode, done.stderr)


@pytest.mark.slow
def test_a_script_without_end_is_estimated_and_ended(tmp_path: Path) -> None:
    """Shards and Adam's states of 64 ranks; gathers and reductions of each of its groups."""
    mark = str(tmp_path)
    command = [*torchrun(script_path("train_tiny_fsdp2"), 2), *ENDLESS]
    found = estimated("memory", "--world-size", "64", command=command, mark=mark)
    held = found["peak"]["categories"]
    assert held["sharded_parameter"] == pytest.approx(4 * PARAMETERS / 64, rel=0.02)
    assert held["optimizer_state"] == pytest.approx(8 * PARAMETERS / 64, rel=0.02)
    assert found["mesh"]["dp_shard"] == 64
    assert "the script ran itself as rank 0 of 64" in found["assumptions"][0]
    sent = estimated("comm", command=command)
    assert sent["mesh"]["dp_shard"] == 2
    counts = {op: one["count"] for op, one in sent["per_step"].items()}
    assert counts == {"all_gather": 9, "reduce_scatter": 5}
    assert processes_that_mention(mark) == []


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (["--model", "llama3-8b"], ["python", "x.py"], "--model would have no effect"),
        (["--ac", "full", "--world-size", "2"], [sys.executable, "-c", "pass"], "ac would have no effect"),
        (["--world-size", "2"], [sys.executable, "-c", "raise SystemExit(3)"], "ended with exit code 3"),
        ([], [sys.executable, "-c", "pass"], "add --world-size"),
    ],
)
def test_a_command_that_gives_no_estimate_is_one_line(
    options: list[str], command: list[str], message: str
) -> None:
    code, said = estimated("memory", *options, command=command)
    assert code in (1, 2)
    assert message in said
    assert len(said.strip().splitlines()) == 1


FREED_BEFORE = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.empty(512 << 20, dtype=torch.uint8)
model = fully_shard(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


def test_what_is_freed_before_the_first_step_stays_reserved() -> None:
    """Two more workspaces of a GPU's matrix products are in use in a step."""
    command = [sys.executable, "-c", FREED_BEFORE]
    found = estimated("memory", "--world-size", "2", "--allocator", "classic", command=command)
    assert found["peak"]["step"] is None
    assert found["peak"]["active_bytes"] == 512 << 20
    assert {step["step"]: step["reserved_bytes"] >> 20 for step in found["steps"]} == {1: 518, 2: 518}
