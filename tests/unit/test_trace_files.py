"""Finding the traces of a file, a folder or a run, and saying what is missing, doubled or guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from fsdp2prof.errors import TraceError
from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.workflows.trace_files import TraceSet, find_traces


def trace(path: Path, rank: int | None = None, world_size: int | None = None) -> Path:
    document = {"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]}
    if rank is not None:
        document = {"distributedInfo": {"rank": rank, "world_size": world_size}, **document}
    content = json.dumps(document).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def named(found: TraceSet, root: Path) -> dict[int, str]:
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
    assert "node_a.json does not say its rank: taken as rank 0" in found.warnings[0]


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
        find_traces(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_single_file(tmp_path: Path) -> None:
    assert named(find_traces(trace(tmp_path / "rank3.json")), tmp_path) == {3: "rank3.json"}
    assert named(find_traces(trace(tmp_path / "x.json", rank=2)), tmp_path) == {2: "x.json"}
    assert named(find_traces(trace(tmp_path / "y.json")), tmp_path) == {0: "y.json"}
    with pytest.raises(TraceError, match="no such file"):
        find_traces(tmp_path / "nothing")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(TraceError, match=r"empty\.json: the file is empty"):
        find_traces(tmp_path / "empty.json")


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
    assert any("1 of 4 ranks left nothing: 1" in warning for warning in found.warnings)
    assert any(warning.startswith("rank 3: ") for warning in found.warnings)


def test_a_run_without_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no rank left a trace"):
        find_traces(run_directory(tmp_path / "run", {0: False}, world_size=1))


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
