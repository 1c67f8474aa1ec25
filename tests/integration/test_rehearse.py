"""A rehearsal is the run that it stands for: the same collectives, the same bytes, of one rank."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.present import manifest_of, present
from support.recordings import SHORT

from fsdp2prof import analyze_run, analyze_trace
from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.tables.allocations import MemoryRecording

from .conftest import script_path, torchrun, training_environment

MADE_BY_FSDP = (
    "sharded_parameter",
    "sharded_gradient",
    "optimizer_state",
    "unsharded_parameter",
    "unsharded_gradient",
    "all_gather_buffer",
    "reduce_scatter_buffer",
)
TINY = ModelSpec(source="support.tiny_model:factory")
POLICY = PolicySpec(seq_len=64, batch_size=4, wrap=("Block",), clip_grad=False, optimizer_impl="for-loop")


def rehearse(run: Path, *command: str, world_size: int, options: tuple[str, ...] = ()) -> Path:
    done = start(run, *command, options=("--world-size", str(world_size), *options))
    assert done.returncode == 0, done.stderr[-4000:]
    return run


def start(run: Path, *command: str, options: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "fsdp2prof", "rehearse", *SHORT, "-q", "-f", "-o"]
    start += [str(run), *options, "--"]
    environment = training_environment()
    return subprocess.run(
        [*start, *command], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def python(name: str, steps: int = 6) -> list[str]:
    return [sys.executable, str(script_path(name)), "--steps", str(steps)]


KEYS = ("fqn", "phase", "op", "mesh_dim", "dtype", "group_size", "count", "payload_bytes", "wire_bytes")


def collectives(run: Path, rank: int = 0) -> list[Counter[tuple[object, ...]]]:
    """Of every step: its rows, names of process groups apart."""
    rows = [row for row in analyze_trace(run).groups if row.rank == rank]
    steps = sorted({row.step for row in rows})
    return [Counter(tuple(getattr(row, k) for k in KEYS) for row in rows if row.step == s) for s in steps]


def made_by_fsdp(
    recording: MemoryRecording, manifest: RankManifest | None, step: int
) -> Counter[tuple[object, ...]]:
    """Bytes and numbers of a step's allocations by category and module; a backend's own copies left out."""
    allocations = categorize(attribute(recording, recording.steps), manifest, recording.end_ns)
    made = ~allocations.op.matches(lambda name: name.startswith("given to "))
    sums: Counter[tuple[object, ...]] = Counter()
    for row in ((allocations.step == step) & made).nonzero()[0]:
        key = allocations.category[row], allocations.fqn[row]
        if key[0] in MADE_BY_FSDP:
            sums.update({(*key, "bytes"): int(allocations.size[row]), (*key, "count"): 1})
    return sums


def recorded_memory(run: Path, rank: int = 0) -> Counter[tuple[object, ...]]:
    record = present(open_run(run).rank(rank))
    (recording,) = read_memory(present(record.memory))
    return made_by_fsdp(recording, record.manifest, manifest_of(record).memory_steps[0])


@pytest.mark.parametrize(
    "world_size", [8, pytest.param(64, marks=pytest.mark.slow), pytest.param(512, marks=pytest.mark.slow)]
)
def test_a_world_of_any_size_is_what_the_estimator_says(tmp_path, world_size):
    run = rehearse(tmp_path / "run", *python("train_tiny_fsdp2"), world_size=world_size)
    mesh = MeshSpec(dp_shard=world_size)
    estimate: Counter[tuple[object, ...]] = Counter()
    for row in estimate_comm(TINY, mesh, POLICY).groups:
        estimate[tuple(getattr(row, key) for key in KEYS)] += 1
    assert [key_of(step) for step in collectives(run)] == [key_of(estimate)] * 3
    execution = execute(TINY, mesh, POLICY, steps=3)
    foreseen = made_by_fsdp(execution.recording, RankManifest(tensors=execution.tensors), 3)
    assert recorded_memory(run) == foreseen
    assert foreseen["unsharded_parameter", "layers.1", "bytes"] >= 2 * 2 * 197_760


def key_of(rows: Counter[tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    """Rows without the name of the mesh dimension, which an estimate and a script choose for themselves."""
    named = KEYS.index("mesh_dim")
    return Counter({row[:named] + row[named + 1 :]: count for row, count in rows.items()})


@pytest.mark.parametrize(
    ("script", "nproc", "rank"),
    [
        ("hsdp", 4, 2),
        pytest.param("train_tiny_fsdp2", 2, 1, marks=pytest.mark.slow),
        *(
            pytest.param(script, nproc, rank, marks=pytest.mark.slow)
            for script, nproc, rank in (
                ("uneven", 2, 0),
                ("accumulation", 2, 1),
                ("checkpointing", 2, 0),
                ("int_reshard", 4, 3),
                ("two_models", 2, 0),
                ("adapters", 2, 1),
                ("gan", 2, 1),
            )
        ),
    ],
)
def test_a_real_run_equals_its_rehearsal(recorded, tmp_path, script, nproc, rank):
    real = recorded(script, nproc).run
    run = rehearse(
        tmp_path / "run",
        *torchrun(script_path(script), nproc, "--steps", "6"),
        world_size=nproc,
        options=("--rank", str(rank)),
    )
    ours, theirs = collectives(run, rank), collectives(real, rank)
    assert len(ours) == 3
    assert ours == theirs
    assert recorded_memory(run, rank) == recorded_memory(real, rank)


@pytest.mark.slow
def test_the_run_is_marked_and_misses_no_rank(tmp_path):
    run = rehearse(tmp_path / "run", *python("uneven"), world_size=100, options=("--rank", "99"))
    opened = open_run(run)
    assert (opened.info.state, opened.messages) == ("complete", ())
    assert [record.rank for record in opened.ranks] == [99]
    manifest = manifest_of(opened.ranks[0])
    assert (manifest.world_size, present(manifest.rehearsal).world_size) == (100, 100)
    assert {group.backend for group in manifest.process_groups} == {"fake"}
    result = analyze_run(run)
    summary, trace = result.run, present(result.trace)
    assert (summary.rehearsed_rank, summary.world_size, len(summary.ranks)) == (99, 100, 1)
    assert trace.rehearsed
    assert result.verdict[0].startswith("Rehearsed as rank 99 of 100")
    assert (trace.findings, trace.prefetch, trace.bandwidth) == ([], [], [])


@pytest.mark.slow
def test_without_data_the_same_collectives_and_bytes(tmp_path):
    runs = [
        rehearse(tmp_path / name, *python("train_tiny_fsdp2"), world_size=16, options=options)
        for name, options in (("real", ()), ("meta", ("--meta",)))
    ]
    assert collectives(runs[0]) == collectives(runs[1])
    assert recorded_memory(runs[0]) == recorded_memory(runs[1])


def test_what_cannot_be_rehearsed_is_one_line(tmp_path):
    several = start(tmp_path / "run", "accelerate", "launch", "x.py", options=("--world-size", "8"))
    assert several.returncode == 2
    assert several.stderr.splitlines()[-1].startswith("error: accelerate starts processes itself")
    outside = start(tmp_path / "run", "python", "x.py", options=("--world-size", "8", "--rank", "8"))
    assert (outside.returncode, len(outside.stderr.splitlines())) == (2, 1)
    code = (
        "import torch.distributed as d; d.init_process_group('gloo'); "
        "d.broadcast_object_list([d.get_rank()]); print('never')"
    )
    waits = start(tmp_path / "run", sys.executable, "-c", code, options=("--world-size", "8", "--rank", "3"))
    assert (waits.returncode, waits.stdout) == (1, "")
    assert (
        "rank 3 waits for objects of rank 0, which a rehearsal does not run; rehearse --rank 0"
        in waits.stderr
    )


def test_the_training_keeps_its_output_and_exit_code(tmp_path):
    code = (
        "import os, sys, torch.distributed as d; d.init_process_group('nccl'); d.barrier(); "
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'); "
        "print(d.get_rank(), d.get_world_size(), *(os.environ[n] for n in names), *sys.argv[1:]); sys.exit(7)"
    )
    options = ("--world-size", "32", "--rank", "9", "--local-world-size", "8")
    done = start(tmp_path / "run", sys.executable, "-c", code, "--lr", "1", options=options)
    assert (done.returncode, done.stdout) == (7, "9 32 9 32 0 8 --lr 1\n")


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, True])
def test_what_a_trace_shows_as_a_list_has_its_size_and_type(tmp_path, meta):
    """Tensor parallelism's sums of 4 x 16 floats, and two doubles that the script adds up and shares."""
    options = ("--meta",) if meta else ()
    run = rehearse(tmp_path / "run", *python("tensor_parallel"), world_size=4, options=options)
    rows = {(row.fqn, row.phase, row.op): row for row in analyze_trace(run).groups}

    def made(fqn: str | None, phase: str, op: str) -> tuple[object, ...]:
        row = rows[fqn, phase, op]
        return row.dtype, row.count, row.payload_bytes

    parallel = [("0", "forward"), ("1", "forward"), ("0", "backward"), ("1", "backward")]
    assert {made(*place, "all_reduce") for place in parallel} == {("float32", 1, 4 * 16 * 4)}
    assert made(None, "other", "all_reduce") == ("float64", 1, 2 * 8)
    assert made(None, "other", "all_gather") == ("float64", 1, 4 * 2 * 8)
