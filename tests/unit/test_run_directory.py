"""Opening run directories, whole and broken."""

from __future__ import annotations

import msgspec
import pytest

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.manifest import RankManifest, RunInfo, rank_folder
from fsdp2prof.readers.run_directory import is_run_directory, open_run


def write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(document))


def make_rank(run, rank, *, files=("trace.json.gz", "memory.npz"), **manifest):
    defaults = {"state": "complete", "world_size": 2}
    write(run / rank_folder(rank) / "manifest.json", RankManifest(rank=rank, **{**defaults, **manifest}))
    for name in files:
        (run / rank_folder(rank) / name).touch()


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run" / "run.json", RunInfo(state="complete", world_size=2))
    return tmp_path / "run"


def test_a_whole_run(run):
    for rank in (0, 1):
        make_rank(run, rank)
    opened = open_run(run)
    assert opened.messages == ()
    assert [record.rank for record in opened.ranks] == [0, 1]
    assert opened.rank(1).trace == run / "rank-00001" / "trace.json.gz"
    assert opened.rank(1).memory == run / "rank-00001" / "memory.npz"
    assert opened.rank(2) is None


def test_missing_partial_and_crashed_ranks_are_told(run):
    write(run / "run.json", RunInfo(state="crashed", world_size=5, messages=["rank 4: no sign of life"]))
    make_rank(run, 0, state="crashed", error="ValueError: x", files=())
    make_rank(run, 1, state="partial", messages=["schedule cut short"])
    make_rank(run, 2, state="running", files=())
    (run / "rank-00003").mkdir()
    opened = open_run(run)
    assert opened.messages == (
        "rank 4: no sign of life",
        "1 of 5 ranks left nothing: 4",
        "rank 0: crashed: ValueError: x",
        "rank 1: schedule cut short",
        "rank 2: still running, or killed before it could say how it ended",
        "rank 3: manifest.json is missing",
    )
    assert [record.trace is None for record in opened.ranks] == [True, False, True, True]
    assert opened.rank(3).manifest is None


def test_what_the_launcher_summed_up_is_told_once(run):
    write(run / "run.json", RunInfo(state="partial", world_size=2, messages=["ranks 0, 1: cut short"]))
    for rank in (0, 1):
        make_rank(run, rank, state="partial", messages=["cut short"])
    assert open_run(run).messages == ("ranks 0, 1: cut short",)


def test_a_rank_left_out_on_purpose_misses_nothing(run):
    make_rank(run, 0, selected=False, files=())
    make_rank(run, 1, files=("memory.pickle",))
    assert open_run(run).messages == ("rank 1: complete, but trace.json.gz is missing",)
    assert open_run(run).rank(1).memory.name == "memory.pickle"


def test_a_rank_whose_manifest_is_no_json_is_told(run):
    make_rank(run, 0)
    make_rank(run, 1)
    (run / "rank-00001" / "manifest.json").write_text('{"schema": "fsdp2prof.manif')
    opened = open_run(run)
    assert opened.rank(1).manifest is None
    assert len(opened.messages) == 1
    assert "rank-00001/manifest.json: cannot be read" in opened.messages[0]


def test_without_run_json_the_ranks_are_read(run):
    (run / "run.json").unlink()
    make_rank(run, 0)
    make_rank(run, 1)
    assert "run.json is missing" in open_run(run).messages[0]
    assert len(open_run(run).ranks) == 2


def test_keys_of_a_newer_minor_writer_are_ignored(run):
    (run / "run.json").write_text('{"schema": "fsdp2prof.run/1", "state": "complete", "colour": "green"}')
    assert open_run(run).info.state == "complete"


@pytest.mark.parametrize(("name", "schema"), [("run.json", "run"), ("rank-00000/manifest.json", "manifest")])
def test_a_newer_schema_is_refused(run, name, schema):
    make_rank(run, 0)
    (run / name).write_text(f'{{"schema": "fsdp2prof.{schema}/2", "state": ["of", "another", "type"]}}')
    with pytest.raises(
        RunDirectoryError, match=rf"{name}: schema fsdp2prof\.{schema}/2 is newer .* upgrade fsdp2prof"
    ):
        open_run(run)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"schema": "something/1"}', "its schema is 'something/1'"),
        ('{"schema": "fsdp2prof.run/1", "hosts": 3}', "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_a_broken_run_json_is_one_clear_line(run, content, message):
    (run / "run.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=message) as caught:
        open_run(run)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_run_directory(tmp_path):
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="a file, not a run directory"):
        open_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="an empty folder"):
        open_run(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match=r"neither run\.json nor a rank's manifest"):
        open_run(tmp_path)
    assert not is_run_directory(tmp_path)
