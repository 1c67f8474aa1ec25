"""Memory of real gloo runs against a second account of the allocator and against the rules of FSDP2.

The second account is a shim under libc (``allocator/shim.c``): it logs every call with which torch's CPU
allocator gets and returns memory, and shares nothing with the recorder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.present import manifest_of, present

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.peak import sum_by
from fsdp2prof.analyzers.memory.prepared import allocated_totals, event_times, prepare
from fsdp2prof.manifest import ParamGroupInfo, RankManifest
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.tables.allocations import MemoryRecording

from .conftest import Recorded

ITEMSIZE = {"float32": 4, "bfloat16": 2}
RUNS = [
    ("train_tiny_fsdp2", 2),
    ("hsdp", 4),
    ("uneven", 2),
    ("accumulation", 2),
    pytest.param("checkpointing", 2, marks=pytest.mark.slow),
    pytest.param("never_reshard", 2, marks=pytest.mark.slow),
]


class Run:
    """A recorded run with the shim's log of every rank."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.ranks = open_run(folder).ranks
        self.log = log

    def recording(self, rank: int) -> MemoryRecording:
        (recording,) = read_memory(present(self.ranks[rank].memory))
        return recording

    def analysis(self, rank: int) -> RankMemory:
        manifest = self.ranks[rank].manifest
        return analyze_memory([(rank, self.recording(rank), manifest)]).ranks[0]

    def allocator_held(self, rank: int, time_ns: int) -> int:
        """Bytes that torch's CPU allocator held at a time, by the shim's log since the process began."""
        log = np.fromfile(self.log / str(manifest_of(self.ranks[rank]).pid), dtype=np.int64).reshape(-1, 3)
        live: dict[int, int] = {}
        for _, address, size in log[log[:, 0] <= time_ns].tolist():
            if size:
                live[address] = size
            else:
                live.pop(address, None)
        return sum(live.values())


@pytest.fixture(scope="module")
def runs(recorded: Callable[[str, int], Recorded]) -> Callable[[str, int], Run]:
    @cache
    def run(name: str, nproc: int) -> Run:
        recording = recorded(name, nproc)
        if not any(recording.allocator_log.iterdir()):
            pytest.skip("the allocator's second account needs Linux and a C compiler")
        return Run(recording.run, recording.allocator_log)

    return run


@pytest.mark.parametrize(("name", "nproc"), RUNS)
def test_total_equals_the_allocators_own_bytes(runs: Callable[[str, int], Run], name: str, nproc: int):
    run = runs(name, nproc)
    for rank in range(nproc):
        recording = run.recording(rank)
        totals = allocated_totals(recording.allocations, recording.events)
        peak = int(np.argmax(totals))
        time_ns = int(event_times(recording)[peak])
        assert totals[peak] == run.allocator_held(rank, time_ns)
        analysis = run.analysis(rank)
        assert analysis.peak.allocated_bytes == totals[peak]
        assert analysis.peak.time_ns == time_ns


@pytest.mark.parametrize(("name", "nproc"), RUNS)
def test_categories_and_layers_sum_to_the_peak(runs: Callable[[str, int], Run], name: str, nproc: int):
    run = runs(name, nproc)
    for rank in range(nproc):
        peak = run.analysis(rank).peak
        assert sum(peak.categories.values()) == peak.allocated_bytes
        assert sum(row.bytes for row in peak.by_layer) == peak.allocated_bytes
        # What no rule can place: leftovers of the step before (the loss, its logits), alive at its start.
        assert peak.categories["unattributed"] <= 64


@pytest.mark.parametrize(("name", "nproc"), RUNS)
def test_states_are_what_the_shards_say(runs: Callable[[str, int], Run], name: str, nproc: int):
    """Sharded parameters hold the padded shard, Adam two copies of the unpadded one and a step of 4 bytes."""
    run = runs(name, nproc)
    for rank in range(nproc):
        groups = manifest_of(run.ranks[rank]).param_groups
        parameters = [parameter for group in groups for parameter in group.parameters]
        shards = sum(math.prod(p.padded_local_shape) * ITEMSIZE[p.dtype] for p in parameters)
        states = sum(2 * math.prod(p.local_shape) * ITEMSIZE[p.dtype] + 4 for p in parameters)
        categories = run.analysis(rank).peak.categories
        assert categories["sharded_parameter"] == shards
        assert categories["optimizer_state"] == states


@pytest.mark.parametrize(("name", "nproc"), RUNS)
def test_unsharded_parameters_are_those_of_the_groups_unsharded_then(
    runs: Callable[[str, int], Run], name: str, nproc: int
):
    run = runs(name, nproc)
    for rank in range(nproc):
        manifest, peak = manifest_of(run.ranks[rank]), run.analysis(rank).peak
        unsharded = groups_unsharded_at(run.recording(rank), manifest, present(peak.time_ns))
        expected = {group.fqn: unsharded_bytes(group) for group in unsharded}
        found = {row.fqn: row.bytes for row in peak.by_layer if row.category == "unsharded_parameter"}
        assert found == expected
        assert expected


@pytest.mark.parametrize(("name", "nproc"), [RUNS[0], RUNS[1], RUNS[5]])
def test_whatever_fsdp_allocates_in_a_step_is_where_the_rules_put_it(
    runs: Callable[[str, int], Run], name: str, nproc: int
):
    """Bytes of every group in one step, from its sizes: P = N * S elements of bp, br, bo bytes."""
    run = runs(name, nproc)
    for rank in range(nproc):
        manifest = manifest_of(run.ranks[rank])
        view = prepare(run.recording(rank), manifest)
        backend = view.allocations.op.matches(lambda op: op.startswith("given to"))  # gloo's own copies
        rows = view.allocations.take((view.allocations.step == manifest.memory_steps[0]) & ~backend)
        allocated = sum_by(rows.size, rows.fqn, rows.category)
        for group in manifest.param_groups:
            shard = sum(math.prod(parameter.padded_local_shape) for parameter in group.parameters)
            whole = shard * group.shard_world_size
            original = ITEMSIZE[group.parameters[0].dtype]
            gathered = ITEMSIZE[group.param_dtype] if group.param_dtype else original
            reduced = ITEMSIZE[group.reduce_dtype] if group.reduce_dtype else gathered
            unshards = 2 if group.reshard_after_forward else 1
            cast = shard * gathered if group.param_dtype else 0
            assert reduced == original  # else one more cast would make the gradient
            expected = {
                "all_gather_buffer": unshards * (whole * gathered + cast),
                "unsharded_parameter": unshards * whole * gathered,
                "unsharded_gradient": whole * gathered,
                "reduce_scatter_buffer": whole * reduced,
                "sharded_gradient": shard * reduced,
            }
            assert {category: allocated[group.fqn, category] for category in expected} == expected


def test_second_micro_batch_holds_the_unsharded_gradients_of_the_whole_model(
    runs: Callable[[str, int], Run],
):
    """Without gradient sync a group keeps P * br from its first backward on."""
    run = runs("accumulation", 2)
    whole = sum(
        math.prod(parameter.global_shape) * ITEMSIZE[parameter.dtype]
        for group in manifest_of(run.ranks[0]).param_groups
        for parameter in group.parameters
    )
    assert run.analysis(0).peak.categories["unsharded_gradient"] == whole


def groups_unsharded_at(
    recording: MemoryRecording, manifest: RankManifest, time_ns: int
) -> list[ParamGroupInfo]:
    """Replay the labels: a copy-out unshards its group, the end of its forward or backward reshards it."""
    unsharded: dict[str, bool] = {}
    policy = {group.fqn: group.reshard_after_forward for group in manifest.param_groups}
    names = zip(recording.labels.start_ns.tolist(), recording.labels.name.to_list(), strict=True)
    for start, name in sorted(names):
        label = re.fullmatch(r"FSDP::(\w+)(?: \((.*)\))?", present(name))
        if label is None or start > time_ns:
            continue
        kind, fqn = label[1], label[2] or ""
        if kind == "all_gather_copy_out":
            unsharded[fqn] = True
        elif kind == "post_backward_reshard" or (kind == "post_forward" and policy[fqn]):
            unsharded[fqn] = False
    return [group for group in manifest.param_groups if unsharded.get(group.fqn)]


def unsharded_bytes(group: ParamGroupInfo) -> int:
    """P * bp: every rank's padded all-gather inputs."""
    inputs = sum(
        numel * ITEMSIZE[dtype]
        for parameter in group.parameters
        for numel, dtype in zip(parameter.all_gather_numels, parameter.all_gather_dtypes, strict=True)
    )
    return inputs * group.shard_world_size
