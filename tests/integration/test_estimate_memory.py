"""Predicted memory against recorded memory of real runs under torchrun: FSDP's storages to the byte."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from support.cli import call
from support.present import manifest_of

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.estimators.config.inputs import make_spec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.of_run.policy import values_of_run
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.tables.allocations import GIVEN, AllocationTable, MemoryRecording
from fsdp2prof.tables.columns import BoolArray

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


def made_by_gloo(allocations: AllocationTable) -> BoolArray:
    """Mask of the storages that no operator made: gloo's copies of what reduce-scatters are given."""
    return allocations.op.matches(lambda name: name.startswith(GIVEN))


def allocated_in_step(
    recording: MemoryRecording, manifest: RankManifest, step: int
) -> dict[tuple[object, ...], int]:
    """Bytes and numbers of a step's allocations by (category, module), without gloo's own."""
    attributed = attribute(recording, recording.steps)
    allocations = categorize(attributed, manifest, recording.end_ns)
    sums: Counter[tuple[object, ...]] = Counter()
    made = (allocations.step == step) & ~made_by_gloo(allocations)
    for row in made.nonzero()[0]:
        key = allocations.category[row], allocations.fqn[row]
        sums.update({(*key, "bytes"): int(allocations.size[row]), (*key, "count"): 1})
    return {key: value for key, value in sums.items() if key[0] in EXACT}


def test_fsdp_allocates_what_was_predicted_to_the_byte(measured, predicted):
    (recording, manifest), (foreseen, its_manifest) = measured, predicted
    ours = allocated_in_step(foreseen, its_manifest, step=3)
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


VARIANTS = {"hsdp": 4, "accumulation": 2, "checkpointing": 2, "never_reshard": 2, "uneven": 2}
"""Recorded scripts and their ranks."""


@pytest.fixture(
    scope="module",
    params=["hsdp", "accumulation"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("checkpointing", "never_reshard", "uneven")],
)
def both(request, recorded):
    """What was recorded of a variant and what its manifest and model predict."""
    name = request.param
    rank = open_run(recorded(name, VARIANTS[name]).run).ranks[0]
    (recording,) = read_memory(rank.path / "memory.npz")
    values = values_of_run(manifest_of(rank))
    values["model"] = f"support.recorded_models:{name}"
    values["policy"] |= {"clip_grad": False, "optimizer_impl": "for-loop"}
    spec = make_spec(values)
    execution = execute(spec.model, spec.mesh, spec.policy, steps=3)
    return (recording, rank.manifest), (execution.recording, RankManifest(tensors=execution.tensors))


def test_every_variant_allocates_what_its_manifest_predicts_to_the_byte(both):
    (recording, manifest), (foreseen, its_manifest) = both
    theirs = allocated_in_step(recording, manifest, step=int(recording.steps.step[-1]))
    assert allocated_in_step(foreseen, its_manifest, step=3) == theirs
    assert {category for category, *_ in theirs} >= {"all_gather_buffer", "reduce_scatter_buffer"}


def test_every_variant_peaks_where_predicted(both):
    ours, theirs = (analyze_memory([(0, *side)]).ranks[0].peak for side in reversed(both))
    states = ("sharded_parameter", "optimizer_state", "unsharded_parameter")
    assert {name: ours.categories[name] for name in states} == {
        name: theirs.categories[name] for name in states
    }
    recorded, predicted = (most_on_device(*side) for side in both)
    assert predicted == recorded


def most_on_device(recording, manifest):
    """Peak without what a GPU would not hold, or not as long.

    Left out are the host's random state, which checkpointing copies; what no layer owns and is there before
    the first step (the ranks of the device mesh); and what one of gloo's threads may be the last to hold:
    outputs of all-gathers, and the copy gloo makes of every reduce-scatter's input. The thread that ran a
    collective drops them after it has woken the training's thread, which may be a layer further by then. Of
    30 steps of two ranks each it freed 19 of 420 all-gather buffers and 64 of 240 copies, and none of the 240
    buffers that FSDP makes for reduce-scatters: those count.
    """
    allocations = categorize(attribute(recording, recording.steps), manifest, recording.end_ns)
    left_out = allocations.op.equals("torch.get_rng_state") | made_by_gloo(allocations)
    left_out |= allocations.category.equals("all_gather_buffer")
    left_out |= (allocations.step < 1) & (allocations.fqn.codes < 0)
    device = allocations.take(~left_out)
    changes = np.concatenate([device.size, -device.size])
    orders = np.concatenate([device.alloc_order, device.free_order])
    return int(changes[np.argsort(orders, kind="stable")].cumsum().max())


@pytest.mark.parametrize("name", [pytest.param("hsdp", marks=pytest.mark.slow), "accumulation"])
def test_the_command_reads_mesh_and_policy_from_the_run(recorded, capfd, name):
    run = recorded(name, VARIANTS[name]).run
    model = ["--model", f"support.recorded_models:{name}", "--no-clip-grad"]
    ended = call(capfd, "estimate", "memory", "--from-run", run, *model, "--format", "json")
    assert ended.code == 0, ended.err
    estimate = json.loads(ended.out)
    rank = open_run(run).ranks[0]
    (recording,) = read_memory(rank.path / "memory.npz")
    theirs = analyze_memory([(0, recording, rank.manifest)]).ranks[0].peak.categories
    ours = estimate["peak"]["categories"]
    assert estimate["mesh"]["world_size"] == VARIANTS[name]
    assert ours["sharded_parameter"] == theirs["sharded_parameter"]
    # On a GPU Adam's 20 step counters of 4 bytes stay on the host.
    assert ours["optimizer_state"] == theirs["optimizer_state"] - 4 * 20
