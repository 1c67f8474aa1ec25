"""A run of two nodes, each with a launcher and a recorder of its own, into one run directory."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.recordings import SHORT

from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.run_directory import RunDirectory
from fsdp2prof.workflows.analyze import analyze_run
from fsdp2prof.workflows.job.job_files import open_job

from .conftest import free_port, script_path, training_environment

RECORD = [sys.executable, "-m", "fsdp2prof", "record", *SHORT]
NODES = (0, 1)


def record_nodes(run: Path, *script: str | Path) -> list[tuple[int, str]]:
    """Record two nodes of one rank each on this host; returns exit code and stderr of both."""
    endpoint = f"127.0.0.1:{free_port()}"
    recorders = []
    for node in NODES:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(node), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        torchrun += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
        command = [*RECORD, "-o", str(run), "--node-rank", str(node), "--", *torchrun, *map(str, script)]
        environment = training_environment()
        recorders.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        errors = [recorder.communicate(timeout=240)[1] for recorder in recorders]
    finally:
        for recorder in recorders:
            recorder.kill()
    return [(recorder.returncode, text) for recorder, text in zip(recorders, errors, strict=True)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = tmp_path_factory.mktemp("nodes") / "run"
    for code, errors in record_nodes(run, script_path("train_tiny_fsdp2"), "--steps", "8"):
        assert code == 0, errors[-4000:]
        assert "did not start" not in errors
    return open_run(run)


def test_both_nodes_are_in_one_run(opened: RunDirectory) -> None:
    assert opened.messages == ()
    assert (opened.info.state, opened.info.exit_code, opened.info.world_size) == ("complete", 0, 2)
    assert opened.info.hosts == [socket.gethostname()]
    assert sorted(entry.name for entry in opened.path.iterdir()) == [
        "rank-00000",
        "rank-00001",
        "run-node-00001.json",
        "run.json",
    ]
    assert sorted(record.manifest.node_rank for record in opened.ranks if record.manifest) == [0, 1]
    for name in ("run.json", "run-node-00001.json"):
        info = json.loads((opened.path / name).read_text())
        assert (info["state"], info["exit_code"], info["messages"]) == ("complete", 0, [])
    assert "--node-rank 1" in " ".join(
        json.loads((opened.path / "run-node-00001.json").read_text())["command"]
    )


def test_the_ranks_of_both_nodes_are_analysed_together(opened: RunDirectory) -> None:
    analysis = analyze_run(open_job(opened.path))
    assert analysis.trace is not None
    assert [rank.rank for rank in analysis.trace.ranks] == [0, 1]
    assert analysis.trace.cross_rank.matched > 0
    assert analysis.trace.cross_rank.unmatched == 0
    assert analysis.memory is not None
    assert sorted(rank.rank for rank in analysis.memory.ranks) == [0, 1]


def test_a_node_that_was_recorded_is_not_recorded_again(opened: RunDirectory) -> None:
    command = [*RECORD, "-o", str(opened.path), "--node-rank", "1", "--", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {opened.path}: has a node 1 already; choose another")


@pytest.mark.slow
def test_a_silent_node_speaks_of_its_own_ranks_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (zero, told_by_0), (one, told_by_1) = record_nodes(
        run, "--no-python", sys.executable, "-I", script_path("train_tiny_fsdp2"), "--steps", "2"
    )
    assert (zero, one) == (0, 0)
    ranks = [
        [line.split(":")[1].strip() for line in text.splitlines() if "the recorder did not start" in line]
        for text in (told_by_0, told_by_1)
    ]
    assert sorted(rank for [rank] in ranks) == ["rank 0", "rank 1"]
    assert len(open_run(run).info.messages) == 2
