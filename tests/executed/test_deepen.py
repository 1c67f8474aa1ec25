"""A step of a deep model from two shallow captures is the one captured in full, command for command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2prof.estimators.config.choices import Every
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.simulate.extend_commands import deepened
from fsdp2prof.estimators.simulate.program import Collective, Command, HostWait, Record, Wait
from fsdp2prof.estimators.timeline.capture import capture_step, capture_stitched

POLICY = PolicySpec(seq_len=128)


def renumbered(commands: list[Command]) -> list[Command]:
    numbers: dict[int, int] = {}
    made: list[Command] = []
    for command in commands:
        if isinstance(command, (Record, Collective, Wait, HostWait)) and command.event >= 0:
            command = replace(command, event=numbers.setdefault(command.event, len(numbers)))
        made.append(command)
    return made


@pytest.mark.parametrize(
    ("model", "layers", "mesh", "policy"),
    [
        ("gpt2", 12, MeshSpec(dp_shard=4), replace(POLICY, ac="op", reshard="torchtitan")),
        pytest.param(
            "gpt2",
            16,
            MeshSpec(dp_shard=2),
            replace(POLICY, ac=Every(2), optimizer_impl="for-loop"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama3-8b",
            12,
            MeshSpec(dp_replicate=2, dp_shard=2, tp=2),
            replace(POLICY, grad_accum=2, reshard="never"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_deepened_capture_equals_the_full_one(
    model: str, layers: int, mesh: MeshSpec, policy: PolicySpec
) -> None:
    spec = ModelSpec(source=model, layers=layers)
    built = build_model(spec, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    stitched = capture_stitched(spec, mesh, policy, built)
    full = capture_step(spec, mesh, policy)
    assert stitched.commands == renumbered(full.commands)
    assert replace(stitched, commands=[]) == replace(full, commands=[])


def test_captures_that_differ_in_more_than_a_block_are_not_extended() -> None:
    mesh = MeshSpec(dp_shard=2)
    shallow = capture_step(ModelSpec(source="gpt2", layers=3), mesh, POLICY)
    other = capture_step(ModelSpec(source="gpt2", layers=4), mesh, replace(POLICY, reshard="never"))
    blocks = tuple(f"layers.{index}" for index in range(6))
    assert deepened(shallow, other, blocks, 3, 1) is None


def test_a_step_after_another_of_a_different_length_sees_its_own_shapes() -> None:
    """Tensor parallelism redistributes by shapes that DTensor keeps from one world to the next."""
    spec = ModelSpec(source="llama3-8b", layers=1)
    capture_step(spec, MeshSpec(dp_replicate=2, dp_shard=2, tp=2), POLICY)
    made = capture_step(spec, MeshSpec(dp_shard=4, tp=2), replace(POLICY, seq_len=256))
    assert made.tokens == 256
