"""What scripts tell FSDP2: read back from a run of real ranks exactly, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .conftest import script_path, torchrun, training_environment

pytestmark = pytest.mark.slow
STEPS = 3
"""That the recorder traces."""


def recorded(folder: Path, how: str) -> Path:
    command = [sys.executable, "-m", "fsdp2prof", "record", "-o", str(folder / "run"), "--"]
    command += torchrun(script_path("told"), 2, "--how", how)
    subprocess.run(command, env=training_environment(), check=True, capture_output=True, timeout=240)
    return folder / "run"


def output(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp2prof", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def bytes_of(printed: str, roots: int) -> Counter[tuple[Any, ...]]:
    sums: Counter[tuple[Any, ...]] = Counter()
    for row in json.loads(printed)["groups"]:
        root = f"root{row['root']}:" if roots > 1 and "root" in row else ""  # a trace has it in the name
        sums[f"{root}{row['fqn']}", row["phase"], row["op"], row["dtype"]] += row["payload_bytes"]
    return sums


@pytest.mark.parametrize("how", ["precision", "reshard", "roots", "ignored"])
def test_collectives_come_back_exactly(how: str, tmp_path: Path) -> None:
    run, roots = recorded(tmp_path, how), 2 if how == "roots" else 1
    traced = bytes_of(output("analyze", "trace", run, "--ranks", "0", "--format", "json").stdout, roots)
    foreseen = bytes_of(output("estimate", "comm", "--from-run", run, "--format", "json").stdout, roots)
    assert traced
    assert {key: STEPS * size for key, size in foreseen.items()} == traced


@pytest.mark.parametrize(
    ("how", "verb", "reason"),
    [
        ("sync", ("comm",), "reduced gradients after 2 of 3 micro-batches"),
        (
            "ignored",
            ("memory", "--model", "gpt2"),
            "embedding.weight for one, which an estimate cannot express",
        ),
        ("roots", ("memory", "--model", "gpt2"), "has 2 root modules, which an estimate cannot express"),
    ],
)
def test_what_no_option_says_is_refused(how: str, verb: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    refused = output("estimate", *verb, "--from-run", recorded(tmp_path, how))
    assert refused.returncode == 1
    assert reason in " ".join(refused.stderr.split())
