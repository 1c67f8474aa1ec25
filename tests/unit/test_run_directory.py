"""Opening run directories, whole and broken."""

from __future__ import annotations

import msgspec
import pytest
from support.present import present

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.manifest import RankManifest, RecordOptions, RunInfo
from fsdp2prof.readers.run.directory import is_run_directory, open_recording, open_run
from fsdp2prof.run_directory import node_file, rank_folder
from fsdp2prof.workflows.check import check_run
from fsdp2prof.workflows.inspect import inspect_run_sharding
from fsdp2prof.workflows.job.job_files import open_job


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
    assert present(opened.rank(1)).trace == run / "rank-00001" / "trace.json.gz"
    assert present(opened.rank(1)).memory == run / "rank-00001" / "memory.npz"
    assert opened.rank(2) is None


def test_missing_partial_and_crashed_ranks_are_told(run):
    write(
        run / "run.json",
        RunInfo(state="crashed", world_size=5, messages=["rank 4: the recorder did not start"]),
    )
    make_rank(run, 0, state="crashed", error="ValueError: x", files=())
    make_rank(run, 1, state="partial", messages=["schedule cut short"])
    make_rank(run, 2, state="running", files=())
    (run / "rank-00003").mkdir()
    opened = open_run(run)
    assert opened.messages == (
        "rank 4: the recorder did not start",
        "1 of 5 ranks left no recording: rank 4",
        "rank 0: crashed: ValueError: x",
        "rank 1: schedule cut short",
        "rank 2: still running, or killed before it wrote its outcome",
        "rank 3: manifest.json is missing",
    )
    assert [record.trace is None for record in opened.ranks] == [True, False, True, True]
    assert present(opened.rank(3)).manifest is None


def test_what_the_launcher_summed_up_is_told_once(run):
    write(run / "run.json", RunInfo(state="partial", world_size=2, messages=["ranks 0, 1: cut short"]))
    for rank in (0, 1):
        make_rank(run, rank, state="partial", messages=["cut short"])
    assert open_run(run).messages == ("ranks 0, 1: cut short",)


def test_a_rank_left_out_on_purpose_misses_nothing(run):
    make_rank(run, 0, selected=False, files=())
    make_rank(run, 1, files=("memory.pickle",), traced_steps=[2])
    left_out, missing = open_run(run).messages
    assert left_out == "1 of 2 ranks were not recorded (--ranks): 0"
    assert missing == "rank 1: complete, but trace.json.gz is missing"
    assert present(present(open_run(run).rank(1)).memory).name == "memory.pickle"


def test_a_packed_snapshot_is_a_rank_s_recording(run):
    make_rank(run, 0, files=("memory.pickle.gz", "oom.pickle.gz"), memory_steps=[2])
    assert not any("memory" in line for line in open_run(run).messages)
    found = open_job(run).memory.files
    assert [file.path.name for file in found] == ["memory.pickle.gz", "oom.pickle.gz"]


def test_a_rank_whose_manifest_is_no_json_is_told(run):
    make_rank(run, 0)
    make_rank(run, 1)
    (run / "rank-00001" / "manifest.json").write_text('{"schema": "fsdp2prof.manif')
    opened = open_run(run)
    assert present(opened.rank(1)).manifest is None
    assert len(opened.messages) == 1
    assert "rank-00001/manifest.json: cannot be read" in opened.messages[0]


@pytest.mark.parametrize("verb", [check_run, inspect_run_sharding])
def test_a_run_of_which_no_manifest_can_be_read_is_not_one_that_shards_nothing(run, verb):
    for rank in (0, 1):
        make_rank(run, rank)
        (run / rank_folder(rank) / "manifest.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"no rank's manifest can be read; rank 0: .*manifest\.json"):
        verb(run)


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


def at(minute):
    return f"2026-01-01T10:{minute:02d}:00+00:00"


def make_node(run, node, **info):
    defaults = {
        "command": [f"of node {node}"],
        "state": "complete",
        "exit_code": 0,
        "started_at": at(node),
        "finished_at": at(30 + node),
        "hosts": [f"host-{node}"],
        "world_size": 2,
    }
    write(run / node_file(node), RunInfo(**{**defaults, **info}))


def test_the_nodes_of_a_run_are_put_together(run):
    for node in (0, 1):
        make_node(run, node)
        make_rank(run, node, node_rank=node)
    opened = open_run(run)
    info = opened.info
    assert opened.messages == ()
    assert (info.state, info.exit_code, info.command) == ("complete", 0, ["of node 0"])
    assert (info.hosts, info.world_size) == (["host-0", "host-1"], 2)
    assert (info.started_at, info.finished_at) == (at(0), at(31))


def test_times_of_nodes_compare_over_time_zones(run):
    make_node(run, 0, started_at="2026-01-01T10:00:00+00:00", finished_at="2026-01-01T10:40:00+00:00")
    make_node(run, 1, started_at="2026-01-01T11:30:00+02:00", finished_at="2026-01-01T12:41:00+02:00")
    info = open_run(run).info
    assert (info.started_at, info.finished_at) == ("2026-01-01T11:30:00+02:00", "2026-01-01T12:41:00+02:00")


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        (("complete", "partial"), "partial"),
        (("running", "partial"), "running"),
        (("crashed", "running", "complete"), "crashed"),
    ],
)
def test_the_worst_state_of_a_node_is_the_runs(run, states, worst):
    for node, state in enumerate(states):
        make_node(run, node, state=state)
    assert open_run(run).info.state == worst


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 137, 1), 137), ((None, 0), None), ((None, 1), 1)]
)
def test_the_first_exit_code_that_is_not_zero_is_the_runs(run, codes, code):
    for node, own in enumerate(codes):
        make_node(run, node, exit_code=own)
    assert open_run(run).info.exit_code == code


def test_messages_name_their_node_unless_they_name_their_rank(run):
    make_node(run, 0, messages=["rank 0: cut short"])
    make_node(run, 1, hosts=["b", "c"], state="crashed", messages=["the command ended with exit code 1"])
    make_node(run, 2, hosts=[], state="running", finished_at=None, options=RecordOptions(active=9))
    for rank in (0, 1):
        make_rank(run, rank, node_rank=rank)
    assert open_run(run).messages == (
        "rank 0: cut short",
        "node 1 (b, c): the command ended with exit code 1",
        "node 2: recorded with different options from node 0 (host-0)",
    )
    assert open_run(run).info.finished_at is None


def test_a_node_that_has_not_ended_is_named(run):
    make_node(run, 0)
    make_node(run, 1, state="running", finished_at=None, exit_code=None)
    for rank in (0, 1):
        make_rank(run, rank, node_rank=rank)
    assert open_run(run).messages == (
        "the run of node 1 (host-1) has not ended, or was killed before it wrote its outcome",
    )


def test_without_the_file_of_node_0_the_others_are_read(run):
    (run / "run.json").unlink()
    make_node(run, 1)
    make_rank(run, 1, node_rank=1)
    opened = open_run(run)
    assert opened.messages == (
        "run.json is missing: the command and the outcome of the run are unknown of node 0",
        "1 of 2 ranks left no recording: rank 0",
    )
    assert (opened.info.state, opened.info.command) == ("partial", ["of node 1"])
    assert is_run_directory(run)


def test_a_node_of_an_older_run_is_told(run):
    make_node(run, 0, started_at=at(50), finished_at=at(59))
    make_node(run, 1)
    for rank in (0, 1):
        make_rank(run, rank, node_rank=rank)
    assert open_run(run).messages == (
        "node 1 (host-1): ended before another node started, so it is from an older run; "
        "record again with -f",
    )


@pytest.mark.parametrize(
    "name",
    [
        "rank-٠٠٠٠١",
        "rank-000001",
        "rank-1",
        "rank-131072",
        "rank-" + "9" * 40,
        "rank-00001\n",
        "rank-00001\x1b",
    ],
)
def test_only_names_that_a_recorder_gives_are_ranks(run, name):
    """Digits of other scripts, a second name of the same rank, more ranks than there are."""
    make_rank(run, 0)
    (run / rank_folder(0)).rename(run / "kept")
    (run / "kept").rename(run / name)
    make_rank(run, 0)
    assert [record.rank for record in open_run(run).ranks] == [0]


@pytest.mark.parametrize("name", ["recording-000²", "recording-٠٠٠١", "recording-00001", "recording-1"])
def test_only_names_that_a_recorder_gives_are_recordings(run, name):
    make_rank(run, 0)
    (run / name / rank_folder(0)).mkdir(parents=True)
    assert open_run(run).recordings == ()


def test_a_recording_without_its_document_is_told(run):
    make_rank(run, 0)
    (run / "recording-0001").symlink_to(run)
    opened = open_recording(open_run(run), 1)
    assert "recording.json: cannot be read (No such file or directory)" in opened.messages[-1]
    assert [record.rank for record in opened.ranks] == [0]


def test_documents_without_end_are_not_read_to_their_end(run):
    make_rank(run, 0)
    with (run / rank_folder(0) / "manifest.json").open("ab") as file:
        file.truncate(30 << 30)
    (record,) = open_run(run).ranks
    assert record.manifest is None
    assert "more than 256 MiB" in record.messages[0]
