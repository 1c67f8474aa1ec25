"""``check parity``: correct ways to shard agree with the plain training; planted faults are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

from .conftest import script_path, training_environment

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    """What the check says of every case."""
    done = subprocess.run(
        [sys.executable, str(script_path("parity_cases"))],
        env=training_environment(PYTHONPATH=str(TESTS)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["hsdp", "tensor_parallel", "in_bf16"])
def test_ways_that_are_right_agree(judged: dict[str, Any], name: str) -> None:
    """Rows that do not divide, a tied head, a frozen layer; hsdp with two micro-batches."""
    found = judged[name]
    assert found["passed"], found["verdict"]
    assert found["first"] is None
    compared = [(row["kind"], row["state"]) for row in found["rows"]]
    assert compared.count(("gradient", "close")) + compared.count(("gradient", "equal")) == 2 * 13
    assert {state for _, state in compared} <= {"equal", "close"}
    frozen = [row for row in found["rows"] if row["name"].startswith("layers.1.")]
    assert {(row["kind"], row["state"]) for row in frozen} == {("parameter", "equal")}
    worst = max(row["relative_error"] for row in found["rows"])
    assert worst < (5e-2 if name == "in_bf16" else 1e-5)
    assert (worst > 1e-4) is (name == "in_bf16")


@pytest.mark.parametrize(
    ("name", "kind", "tensor", "words"),
    [
        ("parameter_left_out", "gradient", "layers.2.up.weight", "only 1 of 13 gradients"),
        ("wrong_divide_factor", "gradient", "embedding.weight", "every gradient is 2 times"),
        ("missing_sync", "gradient", "embedding.weight", "no gradient was reduced"),
        ("wrong_dimension", "gradient", "embedding.weight", "reduced over too few ranks"),
        ("other_batch_on_rank_1", "batch", "of rank 1", "different data"),
        ("other_weights_on_rank_1", "parameter", "embedding.weight", "different weights"),
    ],
)
def test_planted_faults_are_named(
    judged: dict[str, Any], name: str, kind: str, tensor: str, words: str
) -> None:
    found = judged[name]
    assert not found["passed"]
    assert (found["first"]["kind"], found["first"]["name"]) == (kind, tensor)
    assert words in found["hint"]
    assert tensor in " ".join(found["verdict"])


def test_experts_on_ranks_of_their_own_agree(judged: dict[str, Any]) -> None:
    """Each rank holds two of four experts, compared with its part of the plain model's."""
    found = judged["expert_parallel"]
    assert found["passed"], found["verdict"]
    experts = [row for row in found["rows"] if ".experts." in row["name"] and row["kind"] == "gradient"]
    assert len(experts) == 2 * 2 * 2
    assert {row["state"] for row in experts} <= {"equal", "close"}
    assert max(row["relative_error"] for row in found["rows"]) < 1e-5


def test_experts_whose_gradients_are_averaged_over_their_own_ranks_alone(judged: dict[str, Any]) -> None:
    found = judged["experts_of_too_few"]
    assert not found["passed"]
    assert (found["first"]["kind"], found["first"]["name"]) == ("gradient", "layers.1.experts.up")
    wrong = {row["name"] for row in found["rows"] if row["state"] not in ("equal", "close")}
    assert {name for name in wrong if ".experts." in name} == wrong


def test_what_the_training_raises_is_told_in_one_line(judged: dict[str, Any]) -> None:
    said = judged["that_fails"]
    assert said.startswith("parity: rank ")
    assert "ValueError: no such layer (parity_models.py:" in said
    assert "\n" not in said


def test_the_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    names = ["--model", "support.parity_models:model", "--batch", "support.parity_models:batch"]
    call(capfd, "check", "parity", *names, "--mesh", "dp_shard=2", "--world-size", "3").refused(
        "give one", code=2
    )
    call(capfd, "check", "parity", *names, "--mesh", "dp_shard=2,tp=2").refused("--shard", code=2)
    left_out = ["--shard", "support.parity_models:parameter_left_out", "--steps", "1"]
    done = call(capfd, "check", "parity", *names, *left_out)
    assert done.code == 3
    assert "layers.2.up.weight differs first, in step 0" in done.out.replace("\n", " ")
    assert "parity failed: gradient layers.2.up.weight of step 0" in done.err
