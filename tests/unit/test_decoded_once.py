"""Every command opens a run once and decodes each of its files once."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import call
from support.snapshots import SnapshotBuilder
from synthetic import Schedule, record, transformer, write
from synthetic.kineto import BASE_NS, EPOCH_NS

from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.readers.memory import recording
from fsdp2prof.readers.run import directory
from fsdp2prof.readers.trace import chrome_trace
from fsdp2prof.run_directory import rank_folder
from fsdp2prof.workflows import analyze
from fsdp2prof.workflows.job.job_files import open_job

RANKS = (0, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of two ranks with traces and snapshots; rank 1 is the fullest."""
    schedule = Schedule(roots=(transformer(2),), shard=2)
    roots = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for root in roots:
        (root / "run.json").write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=2)))
        for one in record(schedule, schedule):
            folder = root / rank_folder(one.rank)
            folder.mkdir()
            write(one, folder / "trace.json.gz")
            manifest = RankManifest(state="complete", rank=one.rank, world_size=2)
            (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
            size = 10 + one.rank
            middle_ns = BASE_NS + EPOCH_NS + one.timeline.host[-1].start // 2
            builder = SnapshotBuilder().alloc(100, size, time_us=middle_ns // 1000)
            builder.segment(100, [(512, size, "active_allocated")])
            (folder / "memory.pickle").write_bytes(pickle.dumps(builder.snapshot()))
    return roots


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file or folder was read, by its path."""
    seen: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(path: str | Path, *arguments: Any, **options: Any) -> Any:
            seen[str(path)] += 1
            return function(path, *arguments, **options)

        return call_it

    for module, name in (
        (directory, "open_run"),
        (chrome_trace, "read_trace"),
        (recording, "read_memory"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return seen


def files(run: Path, *names: str) -> dict[str, int]:
    return {str(run): 1, **{str(run / rank_folder(rank) / name): 1 for rank in RANKS for name in names}}


@pytest.mark.parametrize("verb", ["analyze run", "report"])
def test_of_a_run(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    runs: tuple[Path, Path],
    counts: Counter[str],
    verb: str,
) -> None:
    output = ("-o", tmp_path / "page.html")
    assert call(capfd, *verb.split(), runs[0], "-j", "1", *output).code == 0
    assert counts == files(runs[0], "trace.json.gz", "memory.pickle")


def test_of_both_sides_of_a_comparison(
    capfd: pytest.CaptureFixture[str], runs: tuple[Path, Path], counts: Counter[str]
) -> None:
    assert call(capfd, "compare", *runs).code == 0
    assert counts == {path: 1 for run in runs for path in files(run, "trace.json.gz", "memory.pickle")}


def test_of_one_kind(
    capfd: pytest.CaptureFixture[str], runs: tuple[Path, Path], counts: Counter[str]
) -> None:
    assert call(capfd, "analyze", "trace", runs[0], "-j", "1").code == 0
    assert counts == files(runs[0], "trace.json.gz")
    counts.clear()
    assert call(capfd, "analyze", "memory", runs[0]).code == 0
    fullest = str(runs[0] / rank_folder(1) / "trace.json.gz")
    assert counts == files(runs[0], "memory.pickle") | {fullest: 1}


def test_the_peak_is_looked_up_in_the_trace_that_is_analysed(runs: tuple[Path, Path]) -> None:
    """The same answer as from a trace that was read for it alone."""
    job = open_job(runs[0])
    together, alone = analyze.analyze_run(job).memory, analyze.analyze_memory(job)
    assert together is not None
    assert together.ranks == alone.ranks
    assert [(rank.rank, rank.at_peak is not None) for rank in together.ranks] == [(1, True), (0, False)]
