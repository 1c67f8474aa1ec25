"""An estimate is the same to the byte in every process, every time, whatever else the machine does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "estimate_repeatedly.py"


def digests(rounds: int, policies: list[str], hash_seeds: tuple[str, ...]) -> list[list[str]]:
    """What processes with different hash seeds print; they run at once, and so under each other's load."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--rounds", str(rounds), *policies],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in hash_seeds
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [output.splitlines() for output in outputs]


def test_equal_in_fresh_processes_and_in_a_loop() -> None:
    ours, others = digests(2, ["adamw/foreach"], ("0", "4711"))
    assert len(ours) == 2
    assert "found to repeat exactly" in ours[0]
    assert ours[0] == ours[1]
    assert others == ours


@pytest.mark.slow
def test_equal_for_every_optimizer_many_times() -> None:
    policies = [
        f"{optimizer}/{implementation}"
        for optimizer in ("adamw", "adagrad", "rmsprop", "sgd-momentum")
        for implementation in ("foreach", "for-loop")
    ]
    ours, *others = digests(5, policies, ("0", "1", "2", "4711"))
    assert ours == ours[: len(policies)] * 5
    assert all(other == ours for other in others)
