"""Ranks reduced on the workers of a Dask cluster: the same bytes as here, whatever happens to a worker."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import call
from support.snapshots import SnapshotBuilder
from synthetic import Schedule, record, transformer, write
from synthetic.kineto import BASE_NS, EPOCH_NS

import fsdp2prof
from fsdp2prof.errors import ClusterError
from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.run_directory import rank_folder
from fsdp2prof.workflows.job.job_files import open_job, seen_from_anywhere
from fsdp2prof.workflows.ranks import cluster as clusters
from fsdp2prof.workflows.ranks.cluster import Cluster, LostError, open_cluster
from fsdp2prof.workflows.ranks.one_rank import RankWork, reduce_rank

distributed = pytest.importorskip("distributed", reason="the extra cluster is not installed")

pytestmark = pytest.mark.filterwarnings("default")
"""What Dask and its event loop warn of in a process that tests is not ours."""

RANKS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six ranks with traces and snapshots; rank 4 is the fullest, rank 5's trace is no trace."""
    root = tmp_path_factory.mktemp("runs") / "run"
    root.mkdir()
    (root / "run.json").write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=RANKS)))
    schedule = Schedule(roots=(transformer(2),), shard=RANKS)
    for recording in record(*[schedule] * RANKS):
        folder = root / rank_folder(recording.rank)
        folder.mkdir()
        write(recording, folder / "trace.json.gz")
        manifest = RankManifest(state="complete", rank=recording.rank, world_size=RANKS)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        size = 20 - abs(4 - recording.rank)
        middle_ns = BASE_NS + EPOCH_NS + recording.timeline.host[-1].start // 2
        builder = SnapshotBuilder().alloc(100, size, time_us=middle_ns // 1000)
        builder.segment(100, [(512, size, "active_allocated")])
        (folder / "memory.pickle").write_bytes(pickle.dumps(builder.snapshot()))
    (root / rank_folder(5) / "trace.json.gz").write_bytes(b"not a trace")
    return root


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """A cluster of two workers; a piece of work that ends a worker is not tried again."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as started:
        started.scheduler.allowed_failures = 0
        yield started


@pytest.fixture
def address(local: Any) -> str:
    return str(local.scheduler_address)


def test_the_same_bytes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path, address: str
) -> None:
    """Named from another folder than the workers run in; the broken rank is the same warning."""
    monkeypatch.chdir(run.parent)
    for verb in ("run", "trace", "memory"):
        command = ("analyze", verb, run.name, "--format", "json")
        here, there = call(capfd, *command), call(capfd, *command, "--cluster", address)
        assert (there.code, there.err) == (0, "")
        assert there.out == here.out
        assert '"at_peak":{' in there.out.replace(" ", "") or verb == "trace"


def test_two_runs_are_compared_and_metrics_written(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, run: Path, address: str
) -> None:
    for command in (("compare", run, run), ("export", "metrics", run)):
        here, there = call(capfd, *command), call(capfd, *command, "--cluster", address)
        assert (here.code, there.code, there.err) == (0, 0, here.err)
        assert there.out == here.out
    kept = tmp_path / "kept.json"
    assert call(capfd, "analyze", "run", run, "-o", kept).code == 0
    refused = call(capfd, "compare", kept, kept, "--cluster", address)
    assert refused.code == 2
    assert "--cluster would have no effect" in refused.err


@pytest.mark.slow
def test_a_page_of_a_cluster_of_its_own(capfd: pytest.CaptureFixture[str], tmp_path: Path, run: Path) -> None:
    pages = tmp_path / "here.html", tmp_path / "there.html"
    assert call(capfd, "report", run, "-o", pages[0]).code == 0
    assert call(capfd, "report", run, "-o", pages[1], "--cluster", "local", "-j", "1").code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


def works(run: Path) -> list[RankWork]:
    job = open_job(run)
    return [
        RankWork(
            packed=job.packed_manifests[file.rank],
            trace=seen_from_anywhere(file),
            memory=tuple(map(seen_from_anywhere, (one for one in job.memory.files if one.rank == file.rank))),
            workers=1,
        )
        for file in job.traces.files
    ]


def test_a_worker_that_is_killed_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, run: Path, local: Any, address: str
) -> None:
    """Killed while the ranks are on their way: some are read again, each comes once, in order."""
    jobs = [work for _ in range(8) for work in works(run)[:5]]
    expected = [pickle.dumps(replace(reduce_rank(job), fullest=None)) for job in jobs[:5]]
    with distributed.Client(address, set_as_default=False) as client, open_cluster(address) as cluster:
        client.wait_for_workers(2, timeout=60)
        monkeypatch.setattr(local.scheduler, "allowed_failures", 3)
        reduced = []
        for position, one in enumerate(cluster.map(reduce_rank, jobs)):
            assert not isinstance(one, LostError)
            reduced.append(one)
            if position == 2:
                os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)
    assert [one.trace.analysis.rank for one in reduced if one.trace] == [
        job.rank for job in [pickle.loads(text).trace.analysis for text in expected]
    ] * 8
    assert len({one.trace.analysis.rank.rank for one in reduced if one.trace}) == 5


def test_a_gate_is_tested_on_the_same_result(
    capfd: pytest.CaptureFixture[str], run: Path, address: str
) -> None:
    command = ("analyze", "trace", run, "--format", "csv", "--fail-on", "step_time_ms>0")
    here, there = call(capfd, *command), call(capfd, *command, "--cluster", address)
    assert (here.code, there.code) == (3, 3)
    assert (there.out, there.err) == (here.out, here.err)
    wrong = call(capfd, "analyze", "trace", run, "--layer", "nowhere", "--cluster", address)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)


def test_work_that_ends_every_worker_is_named_and_the_rest_is_done(address: str) -> None:
    with distributed.Client(address, set_as_default=False) as client, open_cluster(address) as cluster:
        client.wait_for_workers(2, timeout=60)
        outcomes = list(cluster.map(os._exit, [1]))
        assert [str(one) for one in outcomes] == [
            "every worker that read it died, perhaps of too little memory"
        ]
        assert list(cluster.map(abs, [-1, -2])) == [1, 2]


def test_what_a_worker_does_not_see_or_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, run: Path, address: str
) -> None:
    with open_cluster(address) as cluster:
        with pytest.raises(ClusterError, match="cannot read it: RUN must be on a disk"):
            cluster.require_files([str(run / "nowhere")])
        with pytest.raises(ClusterError, match="ValueError: invalid literal"):
            list(cluster.map(int, ["one"]))
    monkeypatch.setattr(fsdp2prof, "__version__", "9.9")
    with (
        pytest.raises(ClusterError, match=r"worker tcp://\S+ has fsdp2prof \S+, here it is 9\.9"),
        open_cluster(address),
    ):
        pass


def test_addresses(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.setattr(clusters, "_CONNECT_S", 0.3)
    wrong = call(capfd, "analyze", "run", run, "--cluster", "everywhere")
    assert wrong.code == 2
    assert "not local, and not a scheduler's address" in wrong.err
    silent = call(capfd, "analyze", "run", run, "--cluster", "tcp://127.0.0.1:1")
    assert (silent.code, silent.err.count("\n")) == (1, 1)
    assert "--cluster tcp://127.0.0.1:1: cannot connect" in silent.err
    encrypted = call(capfd, "analyze", "run", run, "--cluster", "tls://127.0.0.1:1")
    encrypted.refused("no TLS certificates: set DASK_DISTRIBUTED__COMM__TLS__CA_FILE")
    both = call(capfd, "analyze", "run", run, "--cluster", "tcp://127.0.0.1:1", "-j", "2")
    assert both.code == 2
    assert "--jobs would have no effect" in both.err


def test_the_window_follows_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more on the way than three for each thread, and no result is held after it was handed out."""
    held, most = 0, 0

    class Future:
        def __init__(self, value: bytes) -> None:
            nonlocal held, most
            held += 1
            most = max(most, held)
            self._value = value

        def exception(self) -> None: ...

        def result(self) -> bytes:
            return self._value

        def release(self) -> None:
            nonlocal held
            held -= 1

    class Client:
        def wait_for_workers(self, *_: object, **__: object) -> None: ...

        def run(self, *_: object, **__: object) -> dict[str, str]:
            return {}

        def nthreads(self) -> dict[str, int]:
            return {"a": 2, "b": 1}

        def submit(self, pack: Callable[..., bytes], *call: object, pure: bool) -> Future:
            return Future(pack(*call))

    assert list(Cluster(Client(), "tcp://a:1").map(int, range(100))) == list(range(100))
    assert (held, most) == (0, 9)
