"""Predicted memory against recorded memory of real runs under torchrun: FSDP's storages to the byte."""

from __future__ import annotations

from collections import Counter

import pytest

from fsdp2prof.analyzers.memory import analyze_memory
from fsdp2prof.analyzers.memory_attribution import attribute
from fsdp2prof.analyzers.memory_categories import categorize
from fsdp2prof.estimators.execution import execute
from fsdp2prof.estimators.mesh import MeshSpec
from fsdp2prof.estimators.model import ModelSpec
from fsdp2prof.estimators.policy import PolicySpec
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.memory_recording import read_memory
from fsdp2prof.readers.run_directory import open_run

EXACT = (
    "sharded_parameter",
    "sharded_gradient",
    "optimizer_state",
    "unsharded_parameter",
    "unsharded_gradient",
    "all_gather_buffer",
    "reduce_scatter_buffer",
)


@pytest.fixture(scope="module")
def measured(recorded):
    rank = open_run(recorded("train_tiny_fsdp2", 2).run).ranks[0]
    (recording,) = read_memory(rank.path / "memory.npz")
    return recording, rank.manifest


@pytest.fixture(scope="module")
def predicted():
    policy = PolicySpec(seq_len=64, batch_size=4, wrap=("Block",), clip_grad=False, optimizer_impl="for-loop")
    execution = execute(ModelSpec(source="support.tiny_model:factory"), MeshSpec(dp_shard=2), policy, steps=3)
    return execution.recording, RankManifest(tensors=execution.tensors)


def allocated_in_step(recording, manifest, step):
    """Bytes and numbers of a step's allocations by (category, module).

    What gloo makes for itself, a copy of every reduce-scatter's input, is seen as given to an operator.
    """
    attributed = attribute(recording, recording.steps)
    allocations = categorize(attributed, manifest, recording.end_ns)
    sums = Counter()
    made = ~allocations.op.matches(lambda name: name.startswith("given to "))
    for row in ((allocations.step == step) & made).nonzero()[0]:
        key = allocations.category[row], allocations.fqn[row]
        sums[(*key, "bytes")] += int(allocations.size[row])
        sums[(*key, "count")] += 1
    return {key: value for key, value in sums.items() if key[0] in EXACT}


def test_fsdp_allocates_what_was_predicted_to_the_byte(measured, predicted):
    recording, manifest = measured
    ours = allocated_in_step(*predicted, step=3)
    assert ours == allocated_in_step(recording, manifest, step=int(recording.steps.step[-1]))
    # A block: 128 x 384 + 128 x 128 + 2 x 128 x 512 + 512 + 128 + 4 x 128 parameters, gathered in bf16.
    assert ours["unsharded_parameter", "layers.1", "bytes"] == 2 * 2 * 197_760


def test_what_lives_at_the_peak_is_predicted_to_the_byte(measured, predicted):
    theirs = analyze_memory([(0, *measured)]).ranks[0].peak
    ours = analyze_memory([(0, *predicted)]).ranks[0].peak
    assert {name: ours.categories[name] for name in EXACT} == {
        name: theirs.categories[name] for name in EXACT
    }
    assert ours.phase == theirs.phase
    assert ours.allocated_bytes == pytest.approx(theirs.allocated_bytes, rel=0.01)
    # Parameters in fp32 on two ranks, and Adam's two moments of them with a 4-byte counter each.
    assert ours.categories["optimizer_state"] == 2 * ours.categories["sharded_parameter"] + 4 * 44
