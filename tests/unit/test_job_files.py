"""Finding the files of one job: in a file, a folder of anybody's layout or a run; and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from zipfile import ZipFile

import msgspec
import pytest

from fsdp2prof.errors import InputError, TraceError
from fsdp2prof.manifest import ProcessGroupInfo, RankManifest, RunInfo
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.job.one_job import Found


def trace(path: Path, rank: int | None = None, world_size: int | None = None) -> Path:
    document: dict[str, object] = {
        "traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]
    }
    if rank is not None:
        document = {"distributedInfo": {"rank": rank, "world_size": world_size}, **document}
    content = json.dumps(document).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def find_traces(path: Path, iteration: int | None = None) -> Found:
    return open_job(path, iteration=iteration).traces


def snapshot(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def named(found: Found, root: Path) -> dict[int, str]:
    return {file.rank: file.path.relative_to(root).as_posix() for file in found.files}


def test_the_file_itself_says_its_rank(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", rank=1, world_size=2)
    trace(tmp_path / "rank1.json.gz", rank=0, world_size=2)
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == {0: "rank1.json.gz", 1: "rank0.json"}
    assert (found.world_size, found.warnings) == (2, ())


@pytest.mark.parametrize(
    "names",
    [
        ("rank0_trace.json", "rank1_trace.json", "rank10_trace.json"),
        ("worker0_x.12.pt.trace.json.gz", "worker1_x.3.pt.trace.json.gz", "worker10_x.1.pt.trace.json.gz"),
        ("0.json", "1.json", "10.json"),
        ("rank_0/trace.json", "rank_1/trace.json", "rank_10/trace.json"),
        ("h100.Rank-0.json", "h100.Rank-1.json", "h100.Rank-10.json"),
    ],
)
def test_the_name_says_the_rank(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        trace(tmp_path / name)
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == dict(zip((0, 1, 10), names, strict=True))
    assert found.warnings == ("8 of 11 ranks have no trace here: 2, 3, 4, 5, 6, 7, 8, 9",)


def test_the_order_is_a_guess_that_is_said(tmp_path: Path) -> None:
    trace(tmp_path / "node_b.json")
    trace(tmp_path / "node_a.json")
    trace(tmp_path / "rank1.json")
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == {0: "node_a.json", 1: "rank1.json", 2: "node_b.json"}
    assert len(found.warnings) == 2
    assert "node_a.json has no rank in its name: assumed to be rank 0" in found.warnings[0]


def test_of_two_traces_of_a_rank_the_last_is_read(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.2.json", rank=0, world_size=1)
    trace(tmp_path / "rank0.10.json", rank=0, world_size=1)
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == {0: "rank0.10.json"}
    assert found.warnings == ("rank 0 has 2 traces: rank0.10.json is read, not rank0.2.json",)


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", rank=0, world_size=4)
    trace(tmp_path / "b.json", rank=2, world_size=4)
    assert find_traces(tmp_path).warnings == ("2 of 4 ranks have no trace here: 1, 3",)


def test_other_json_is_left_out_and_said(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / "config.json").write_text('{"lr": 1}')
    (tmp_path / "empty.json").write_text("")
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == {0: "rank0.json"}
    assert len(found.warnings) == 2
    assert all(warning.startswith("left out: ") for warning in found.warnings)


def test_profiler_names_win_over_other_json(tmp_path: Path) -> None:
    trace(tmp_path / "host_1.1.pt.trace.json", rank=0, world_size=1)
    trace(tmp_path / "merged.json")
    found = find_traces(tmp_path)
    assert named(found, tmp_path) == {0: "host_1.1.pt.trace.json"}
    assert found.warnings == ()


@pytest.mark.parametrize("content", [None, "", '{"lr": 1}', "lr = 1"])
def test_a_folder_without_traces(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
        (tmp_path / "other.json").write_text(content)
    with pytest.raises(TraceError, match="no traces") as caught:
        analyze_trace(open_job(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_only_file_says_why_it_is_no_trace_though_folders_lie_beside(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(TraceError, match="no traceEvents in it"):
        analyze_trace(open_job(tmp_path))


def test_a_single_file(tmp_path: Path) -> None:
    assert named(find_traces(trace(tmp_path / "rank3.json")), tmp_path) == {3: "rank3.json"}
    assert named(find_traces(trace(tmp_path / "x.json", rank=2)), tmp_path) == {2: "x.json"}
    assert named(find_traces(trace(tmp_path / "y.json")), tmp_path) == {0: "y.json"}
    assert named(find_traces(trace(tmp_path / "rank-00003" / "trace.json")), tmp_path) == {
        3: "rank-00003/trace.json"
    }
    with pytest.raises(InputError, match="no such file"):
        find_traces(tmp_path / "nothing")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(TraceError, match=r"empty\.json: the file is empty"):
        find_traces(tmp_path / "empty.json")


def test_a_zip_file_of_anything_is_no_memory_recording(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("rank0.json", "{}")
    with pytest.raises(TraceError, match="not a trace: it is not JSON"):
        _ = open_job(tmp_path / "all.zip").traces
    with ZipFile(tmp_path / "counted", "w") as archive:
        archive.writestr("allocations.npy", b"")
    assert len(open_job(tmp_path / "counted").memory.files) == 1


def run_directory(root: Path, ranks: dict[int, bool], world_size: int) -> Path:
    root.mkdir()
    info = RunInfo(state="complete", exit_code=0, world_size=world_size)
    (root / "run.json").write_bytes(msgspec.json.encode(info))
    for rank, has_trace in ranks.items():
        folder = root / f"rank-{rank:05d}"
        folder.mkdir()
        manifest = RankManifest(state="complete", rank=rank, world_size=world_size)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        if has_trace:
            trace(folder / "trace.json.gz")
    return root


def test_a_run_directory_knows_its_ranks(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", {0: True, 2: True, 3: False}, world_size=4)
    found = find_traces(run)
    assert named(found, run) == {0: "rank-00000/trace.json.gz", 2: "rank-00002/trace.json.gz"}
    assert found.world_size == 4
    assert found.warnings == ("rank 3: no trace",)
    assert "1 of 4 ranks left no recording: rank 1" in open_job(run).messages


def test_a_world_without_peers_misses_no_rank(tmp_path: Path) -> None:
    """torch's fake backend: one process acts as a rank of eight."""
    run = run_directory(tmp_path / "run", {0: True}, world_size=8)
    file = run / "rank-00000" / "manifest.json"
    for backend, state in (("nccl", "partial"), ("fake", "complete")):
        groups = [ProcessGroupInfo(name="0", desc="default_pg", backend=backend, ranks=list(range(8)))]
        manifest = RankManifest(state="complete", world_size=8, process_groups=groups)
        file.write_bytes(msgspec.json.encode(manifest))
        opened = open_run(run)
        assert opened.info.state == state
        assert bool(opened.messages) == (state == "partial")


def test_a_run_without_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no rank left a trace"):
        analyze_trace(open_job(run_directory(tmp_path / "run", {0: False}, world_size=1)))


class TestLayouts:
    """Folders as other programs write them, each of two ranks and two iterations."""

    @pytest.mark.parametrize(
        ("traces", "snapshots"),
        [
            (
                "profile_trace/iteration_{step}/rank{rank}_trace.json",
                "memory_snapshot/iteration_{step}/rank{rank}_memory_snapshot.pickle",
            ),
            (
                "profiling/traces/iteration_{step}/rank{rank}_trace.json.gz",
                "profiling/memory_snapshot/step_{step:012d}/{rank:06d}_step_{step}.pickle",
            ),
            (
                "profiling_outputs/iteration_{step}/rank{rank}_trace.json.gz",
                "profiling_outputs/iteration_{step}/rank{rank}_memory_snapshot.pickle",
            ),
            ("trace_step{step}_rank{rank}.json", "memory_snapshot_rank{rank}_step{step}.pkl"),
        ],
        ids=["torchtitan-2024", "torchtitan-2026", "torchtune", "flat"],
    )
    def test_the_newest_iteration_is_read_and_another_can_be_chosen(
        self, tmp_path: Path, traces: str, snapshots: str
    ) -> None:
        outputs = tmp_path / "outputs"
        for step in (5, 10, 20):
            for rank in (0, 2, 10):
                trace(outputs / traces.format(step=step, rank=rank))
                snapshot(outputs / snapshots.format(step=step, rank=rank))
        (outputs / "config.json").write_text('{"lr": 1}')
        (outputs / "checkpoint" / "step-20").mkdir(parents=True)
        for step, job in ((20, open_job(outputs)), (5, open_job(outputs, iteration=5))):
            wanted = {rank: traces.format(step=step, rank=rank) for rank in (0, 2, 10)}
            assert named(job.traces, outputs) == wanted
            wanted = {rank: snapshots.format(step=step, rank=rank) for rank in (0, 2, 10)}
            assert named(job.memory, outputs) == wanted
        told = f"reading the newest of iterations 5, 10, 20: {outputs}"
        for found in (open_job(outputs).traces, open_job(outputs).memory):
            assert found.warnings[0].startswith(told)
            assert found.warnings[0].endswith("and 2 more; --iteration chooses another")
        with pytest.raises(InputError, match=r"no trace of iteration 7 in it; it has 5, 10, 20"):
            _ = open_job(outputs, iteration=7).traces

    def test_one_iteration_is_read_without_a_word(self, tmp_path: Path) -> None:
        folder = tmp_path / "profile_trace" / "iteration_10"
        for rank in (0, 1):
            trace(folder / f"rank{rank}_trace.json", rank, 2)
        for path in (folder, folder.parent, tmp_path):
            found = find_traces(path)
            assert ([file.rank for file in found.files], found.warnings) == ([0, 1], ())

    def test_the_snapshots_of_an_exit_are_the_newest(self, tmp_path: Path) -> None:
        for folder in ("iteration_10", "iteration_10_exit", "iteration_9_exit"):
            snapshot(tmp_path / folder / "rank0_memory_snapshot.pickle")
        newest = {0: "iteration_10_exit/rank0_memory_snapshot.pickle"}
        assert named(open_job(tmp_path).memory, tmp_path) == newest
        assert named(open_job(tmp_path, iteration=10).memory, tmp_path) == newest

    @pytest.mark.parametrize(
        "names",
        [
            ("profile_0.json", "profile_1.json"),
            ("host_71.100.pt.trace.json", "host_72.105.pt.trace.json"),
            ("rank_0/host_71.100.pt.trace.json.gz", "rank_1/host_72.105.pt.trace.json.gz"),
            ("fit-profile-0[train].9.pt.trace.json", "fit-profile-1[train].8.pt.trace.json"),
            ("node0/rank0.json", "node1/rank1.json"),
        ],
        ids=["accelerate", "tensorboard", "folders", "lightning", "nodes"],
    )
    def test_one_file_a_rank(self, tmp_path: Path, names: tuple[str, str]) -> None:
        for rank, name in enumerate(names):
            trace(tmp_path / name, rank, 2)
        found = find_traces(tmp_path)
        assert (named(found, tmp_path), found.warnings) == (dict(enumerate(names)), ())

    def test_cycles_of_one_worker_are_a_series(self, tmp_path: Path) -> None:
        for cycle in (100, 99, 1000):
            trace(tmp_path / f"host_71.{cycle}.pt.trace.json", 0, 1)
        found = find_traces(tmp_path)
        assert named(found, tmp_path) == {0: "host_71.1000.pt.trace.json"}
        [told] = found.warnings
        assert told == (
            "rank 0 has 3 traces: host_71.1000.pt.trace.json is read, not "
            "host_71.99.pt.trace.json, host_71.100.pt.trace.json"
        )

    def test_a_step_in_a_name_is_no_rank(self, tmp_path: Path) -> None:
        snapshot(tmp_path / "step10.pickle")
        assert [file.rank for file in open_job(tmp_path).memory.files] == [0]
        snapshot(tmp_path / "1700000000.pickle")
        assert [file.rank for file in open_job(tmp_path / "1700000000.pickle").memory.files] == [0]
        only = snapshot(tmp_path / "000002_step_10.pickle")
        assert [file.rank for file in open_job(only).memory.files] == [2]

    def test_a_folder_of_both_kinds_holds_both(self, tmp_path: Path) -> None:
        trace(tmp_path / "rank0_trace.json")
        snapshot(tmp_path / "rank1.pickle")
        job = open_job(tmp_path)
        assert [[file.rank for file in found.files] for found in (job.traces, job.memory)] == [[0], [1]]


class TestTwoJobs:
    """Never merged: refused with the names that tell them apart."""

    def test_of_different_size(self, tmp_path: Path) -> None:
        trace(tmp_path / "a" / "rank0.json", rank=0, world_size=2)
        trace(tmp_path / "b" / "rank1.json", rank=1, world_size=8)
        with pytest.raises(InputError, match=r"a/rank0\.json of 2 and b/rank1\.json of 8 ranks"):
            find_traces(tmp_path)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("a/rank0_trace.json", "b/rank0_trace.json"),
            ("host_71.100.pt.trace.json", "host_99.200.pt.trace.json"),
            ("fit-x.1.pt.trace.json", "test-x.2.pt.trace.json"),
            ("run1/rank-00000/trace.json", "run2/rank-00000/trace.json"),
        ],
    )
    def test_with_the_same_rank(self, tmp_path: Path, one: str, other: str) -> None:
        for name in (one, other):
            trace(tmp_path / name, rank=0, world_size=2)
        with pytest.raises(InputError) as caught:
            find_traces(tmp_path)
        assert f"{one} and {other} are both a trace of rank 0" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_recordings_too(self, tmp_path: Path) -> None:
        for name in ("small/rank0.pickle", "large/rank0.pickle"):
            snapshot(tmp_path / name)
        with pytest.raises(
            InputError, match=r"large/rank0\.pickle and small/rank0\.pickle are both a memory"
        ):
            _ = open_job(tmp_path).memory

    def test_what_is_not_asked_for_is_not_refused(self, tmp_path: Path) -> None:
        for name in ("a-rank0.pickle", "b-rank0.pickle"):
            snapshot(tmp_path / name)
        trace(tmp_path / "rank0.json")
        assert len(find_traces(tmp_path).files) == 1


class TestChosenRanks:
    def test_every_one_must_be_there(self, tmp_path: Path) -> None:
        for rank in (0, 1, 2):
            trace(tmp_path / f"rank{rank}.json")
        assert [file.rank for file in open_job(tmp_path, ranks={0, 2}).traces.files] == [0, 2]
        with pytest.raises(InputError, match=r"rank 9 is not here; it has ranks 0, 1, 2$"):
            _ = open_job(tmp_path, ranks={0, 9}).traces
        with pytest.raises(InputError, match=r"ranks 8, 9 are not here"):
            _ = open_job(tmp_path, ranks={8, 9}).traces

    def test_one_of_a_run_that_left_no_trace_is_said(self, tmp_path: Path) -> None:
        run = run_directory(tmp_path / "run", {0: True, 3: False}, world_size=4)
        found = open_job(run, ranks={0, 3}).traces
        assert [file.rank for file in found.files] == [0]
        assert "rank 3: no trace" in found.warnings
        with pytest.raises(TraceError, match="rank 3 left none"):
            analyze_trace(open_job(run, ranks={3}))
        with pytest.raises(InputError, match="rank 2 is not here"):
            _ = open_job(run, ranks={2}).traces


@pytest.mark.parametrize("what", ["run", "file"])
def test_what_has_no_iterations_refuses_one(tmp_path: Path, what: str) -> None:
    run = run_directory(tmp_path / "run", {0: True}, world_size=1)
    path = run if what == "run" else run / "rank-00000" / "trace.json.gz"
    with pytest.raises(InputError, match="leave out --iteration"):
        open_job(path, iteration=10)
    (tmp_path / "flat").mkdir()
    trace(tmp_path / "flat" / "rank0.json")
    with pytest.raises(InputError, match="leave out --iteration"):
        find_traces(tmp_path / "flat", iteration=10)


def test_a_world_of_any_size_is_counted_in_no_time(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", rank=0, world_size=1 << 20)
    trace(tmp_path / "b.json", rank=3, world_size=1 << 20)
    [told] = find_traces(tmp_path).warnings
    assert told == f"{(1 << 20) - 2} of {1 << 20} ranks have no trace here: 1, 2, 4, 5, 6, 7, 8, 9, ..."


@pytest.mark.real_data
def test_real_folders(real_data: Path) -> None:
    eight = find_traces(real_data / "traces" / "dlrm8-v100")
    assert [file.rank for file in eight.files] == list(range(8))
    assert all(file.path.name.startswith(f"worker{file.rank}_") for file in eight.files)
    assert (eight.world_size, eight.warnings) == (8, ())
    four = find_traces(real_data / "traces" / "ddp4-mi300")
    assert [(file.rank, file.path.name) for file in four.files] == [(r, f"rank{r}.json.gz") for r in range(4)]
    assert (four.world_size, four.warnings) == (None, ())
    half = find_traces(real_data / "traces" / "ddp2-a100-rank0")
    assert half.warnings == ("1 of 2 ranks have no trace here: 1",)
