"""A stitched execution is the full one, event for event."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_families import values_of

from fsdp2prof.estimators.allocator.caching import allocator_settings, replay
from fsdp2prof.estimators.config.choices import Every
from fsdp2prof.estimators.config.lora import Lora
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.stitching import execute_stitched, growth_between, read_tape
from fsdp2prof.tables.columns import NEVER

POLICY = PolicySpec(seq_len=128)
QLORA = Lora(r=4, targets=("all-linear",), alpha=8, base="bnb-nf4")


def positions(allocations) -> np.ndarray:
    """Rank of every birth and death among all, and where nothing dies."""
    orders = np.concatenate([allocations.alloc_order, allocations.free_order])
    return np.where(orders == NEVER, -1, np.unique(orders, return_inverse=True)[1])


@pytest.mark.parametrize(
    ("layers", "mesh", "policy", "how"),
    [
        (
            12,
            MeshSpec(dp_shard=4),
            replace(POLICY, ac="op", reshard="torchtitan", offload_activations=True, offload_optimizer=True),
            "4 and 5 blocks",
        ),
        (
            12,
            MeshSpec(dp_shard=2),
            replace(POLICY, orig_dtype="bfloat16", lora=QLORA, offload=True),
            "4 and 5 blocks",
        ),
        (12, MeshSpec(dp_shard=4), replace(POLICY, optimizer="adamw8bit"), "4 and 5 blocks"),
        (
            12,
            MeshSpec(dp_shard=2),
            replace(POLICY, orig_dtype="bfloat16", lora=QLORA, reshard_root=True),
            "4 and 5 blocks",
        ),
        pytest.param(
            16,
            MeshSpec(dp_shard=3),
            replace(POLICY, ac=Every(2), optimizer_impl="fused"),
            "6 and 8 blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            12,
            MeshSpec(dp_replicate=2, dp_shard=4),
            replace(POLICY, ac="full", grad_accum=2, reduce_dtype="bfloat16", offload=True),
            "4 and 5 blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            18,
            MeshSpec(dp_shard=2),
            replace(POLICY, reduce_scatter_buffers=2),
            "8 and 9 blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            12,
            MeshSpec(dp_shard=2),
            replace(POLICY, optimizer_impl="for-loop"),
            "4 and 5 blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            12,
            MeshSpec(dp_shard=2),
            replace(POLICY, optimizer="adagrad"),
            "4 and 5 blocks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stitched_execution_equals_the_full_one(
    layers: int, mesh: MeshSpec, policy: PolicySpec, how: str
) -> None:
    spec = ModelSpec(source="gpt2", layers=layers)
    stitched, note = execute_stitched(spec, mesh, policy)
    assert note.startswith(how)
    assert note.endswith(f"repeated to {layers}")
    full = execute(spec, mesh, policy)
    ours, theirs = stitched.recording, full.recording
    assert np.array_equal(ours.allocations.size, theirs.allocations.size)
    assert np.array_equal(ours.allocations.stream, theirs.allocations.stream)
    assert np.array_equal(positions(ours.allocations), positions(theirs.allocations))
    assert ours.allocations.op.to_list() == theirs.allocations.op.to_list()
    assert ours.labels.name.to_list() == theirs.labels.name.to_list()
    assert ours.steps.step.tolist() == theirs.steps.step.tolist() == [0, 1, 2]
    assert (stitched.parameters, stitched.blocks) == (full.parameters, full.blocks)
    assert roles(stitched) == roles(full)
    settings = allocator_settings(policy.allocator)
    assert replay(ours, settings).segments.size.sum() == replay(theirs, settings).segments.size.sum()


def roles(execution) -> list[tuple[object, ...]]:
    row = {address: index for index, address in enumerate(execution.recording.allocations.address.tolist())}
    known = [(row[t.address], t.category, t.fqn, t.name, t.nbytes) for t in execution.tensors]
    return sorted(known) + sorted((row[address],) for address in execution.host)


def test_a_shallow_model_is_executed_in_full() -> None:
    _, note = execute_stitched(ModelSpec(source="gpt2", layers=3), MeshSpec(dp_shard=2), POLICY)
    assert note == "all 3 blocks executed"


ALTERNATING = {"gemma3_text": 3, "gemma2": 2, "gpt_oss": 2, "qwen3_next": 4}
"""Families and how often full attention comes."""


def alternating(family: str, folder: Path, layers: int) -> ModelSpec:
    """A small model whose every third layer, or so, is of another kind."""
    other = "linear_attention" if family == "qwen3_next" else "sliding_attention"
    period = ALTERNATING[family]
    kinds = ["full_attention" if index % period == period - 1 else other for index in range(layers)]
    values = {**values_of(family), "num_hidden_layers": layers, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(values))
    return ModelSpec(source=str(folder))


@pytest.mark.slow
def test_the_mask_of_some_layers_may_die_in_a_layer_that_is_repeated(tmp_path: Path) -> None:
    """Of 7 layers, the third is the last of its kind that backward reaches, and the first that repeats."""
    pytest.importorskip("transformers", minversion="5.0")
    spec, mesh, policy = (
        alternating("gemma3_text", tmp_path, 22),
        MeshSpec(dp_shard=2),
        replace(POLICY, seq_len=32),
    )
    shallow = execute(spec.with_layers(7), mesh, policy)
    assert growth_between(shallow, execute(spec.with_layers(10), mesh, policy), 3) is not None


@pytest.mark.slow
@pytest.mark.parametrize("family", ALTERNATING)
def test_layers_of_several_kinds_are_stitched_to_the_byte(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    spec, mesh, policy = alternating(family, tmp_path, 26), MeshSpec(dp_shard=2), replace(POLICY, seq_len=32)
    stitched, how = execute_stitched(spec, mesh, policy)
    assert how.endswith("found to repeat exactly, and repeated to 26")
    ours, theirs = stitched.recording, execute(spec, mesh, policy).recording
    assert np.array_equal(ours.allocations.size, theirs.allocations.size)
    assert np.array_equal(positions(ours.allocations), positions(theirs.allocations))
    assert ours.labels.name.to_list() == theirs.labels.name.to_list()


@pytest.mark.slow
def test_blocks_of_one_kind_that_share_a_mask_repeat() -> None:
    """The mask of full attention, every sixth block's, dies with the last of them that backward reaches."""
    pytest.importorskip("transformers", minversion="5.0")
    config = Path(__file__).parents[1] / "data" / "configs" / "gemma-3-4b.json"
    policy = PolicySpec(seq_len=2048, wrap=("block",))  # longer than the window
    _, how = execute_stitched(ModelSpec(source=str(config)), MeshSpec(dp_shard=8), policy)
    assert how == "10 and 16 blocks executed, found to repeat exactly, and repeated to 34"


def test_executions_that_do_not_repeat_are_not_stitched() -> None:
    mesh, spec = MeshSpec(dp_shard=2), ModelSpec(source="gpt2", layers=3)
    shallow = execute(spec, mesh, POLICY)
    deeper = execute(spec.with_layers(4), mesh, replace(POLICY, ac=Every(4)))
    assert growth_between(shallow, deeper, 1) is None


def test_the_tape_holds_every_birth_and_death_once() -> None:
    execution = execute(ModelSpec(source="gpt2", layers=3), MeshSpec(dp_shard=2), POLICY)
    tape = read_tape(execution)
    recording = execution.recording
    births = sum(event.birth for run in tape.runs for event in run.events)
    deaths = sum(not event.birth for run in tape.runs for event in run.events)
    things = len(recording.allocations) + len(recording.labels) + len(recording.steps)
    assert births == things == len(tape.births)
    assert deaths == things - np.count_nonzero(recording.allocations.free_order == NEVER)
    # Every ladder climbs all three blocks: forward and backward of two steps, and the optimizer's.
    ladders = {run.ladder for run in tape.runs if run.ladder is not None}
    assert len(ladders) >= 4
    for ladder in ladders:
        blocks = [run.block for run in tape.runs if run.ladder == ladder]
        assert blocks in ([0, 1, 2], [2, 1, 0])
