"""On a GPU: a recorded peak equals the allocator's own, to the byte, and a training keeps its workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp2prof.manifest import RecordOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = Path(__file__).parent / "train_fake_world.py"


def run(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def record(folder: Path, world_size: int) -> str:
    """Record 8 steps of one rank into ``folder/run``; returns what the script printed."""
    config = folder / "run.json"
    values = {"model": "gpt2", "layers": 4, "mesh": {"dp_shard": world_size}}
    config.write_text(json.dumps({**values, "policy": {"batch_size": 4, "seq_len": 512}}))
    command = ["-m", "fsdp2prof", "record", "-o", folder / "run", "--", sys.executable, SCRIPT]
    return run(*command, "--config", config)


@pytest.mark.parametrize("world_size", [8, 64, 512])
def test_peak_equals_the_allocators_own(tmp_path, world_size):
    printed = record(tmp_path, world_size)
    peaks = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    analysis = json.loads(run("-m", "fsdp2prof", "analyze", "memory", tmp_path / "run", "--format", "json"))
    (rank,) = analysis["ranks"]
    assert rank["source"] == "cuda_snapshot"
    peak = rank["peak"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"]
    assert peak["allocated_bytes"] in [step["requested_bytes"] for step in peaks]
    assert peak["reserved_bytes"] in [step["reserved_bytes"] for step in peaks]


def test_trace_of_a_gpu_run_is_attributed(tmp_path):
    record(tmp_path, 8)
    analysis = json.loads(run("-m", "fsdp2prof", "analyze", "trace", tmp_path / "run", "--format", "json"))
    (rank,) = analysis["ranks"]
    assert rank["device_type"] == "cuda"
    assert len(rank["steps"]) == RecordOptions().active
    for step in rank["steps"]:
        assert sum(step["breakdown_ns"].values()) == step["duration_ns"]
        assert step["breakdown_ns"]["compute"] > 0
        assert step["breakdown_ns"]["fsdp_copy"] > 0


@pytest.mark.parametrize("options", [[], ["--watch", "--hang-after", "60"]], ids=["default", "watched"])
def test_forked_workers_of_a_loader_live_on(tmp_path, options):
    """CUDA cannot be used in them: freeing an event of the recorder's would abort them."""
    script = SCRIPT.with_name("train_with_workers.py")
    command = ["-m", "fsdp2prof", "record", "-o", tmp_path / "run", *options, "--", sys.executable, script]
    assert run(*command) == run(script)
