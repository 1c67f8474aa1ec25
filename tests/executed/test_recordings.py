"""When a run with several recordings records, on one rank or two that share a store and a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from support.present import manifest_of

from fsdp2prof.errors import RunDirectoryError, UsageError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RankManifest, RecordOptions, RunInfo, StepInfo
from fsdp2prof.readers.run.directory import open_rank, open_run
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.rank.manifest import ManifestFile
from fsdp2prof.recorder.rank.recordings import Recordings
from fsdp2prof.recorder.rank.stepping import OptimizerWatch
from fsdp2prof.recorder.rank.training_profilers import training_profilers
from fsdp2prof.recorder.requests import ask_and_wait, read_plan, request_recording, take_request
from fsdp2prof.recorder.settings import Settings, leader, validate
from fsdp2prof.run_directory import recording_folder, recording_number

SECOND = 10**9


class Rank:
    """A rank whose steps take a second each, unless told."""

    def __init__(self, run: Path, rank: int = 0, **options: object) -> None:
        given = RecordOptions(warmup=1, active=2, memory=False, **options)  # type: ignore[arg-type]
        validate(given)
        identity = Identity(rank=rank, local_rank=rank, world_size=2)
        settings = Settings(run=str(run), options=given)
        roots, watch = Roots(lambda: None), OptimizerWatch(lambda _: None)
        self.file = ManifestFile(settings, identity, roots, watch)
        self.recordings = Recordings(settings, identity, roots, watch, self.file)
        self.step = 0
        self.begin()

    def begin(self) -> None:
        self.recordings.current.advance(self.step)
        self.recordings.next_step(self.step)

    def run(self, steps: int, seconds: float = 1.0) -> None:
        for _ in range(steps):
            time = StepInfo(step=self.step, start_ns=0, duration_ns=int(seconds * SECOND))
            self.recordings.keep(time)
            self.step += 1
            self.begin()


def plans(run: Path) -> list[tuple[int, int]]:
    """Number and first step of every recording announced."""
    found = (read_plan(run, number) for number in range(1, 100))
    return [(plan.number, plan.step) for plan in found if plan is not None]


def test_every_so_many_steps_from_the_first_on(tmp_path):
    rank = Rank(tmp_path, at_step=10, every=20)
    rank.run(60)
    assert plans(tmp_path) == [(1, 10), (2, 30), (3, 50)]
    assert rank.file.manifest.recordings == [1, 2, 3]


@pytest.fixture
def store(monkeypatch):
    """Of the process groups, as if this process were a rank of several."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
    return shared


@pytest.mark.usefixtures("store")
def test_ranks_hear_of_it_through_the_store_where_the_disk_is_late(tmp_path):
    """The follower's view of the disk never shows the leader's file."""
    ranks = [Rank(tmp_path / str(rank), rank, on_demand=True) for rank in range(2)]
    (tmp_path / "0").mkdir()
    request_recording(tmp_path / "0", "test")
    for _ in range(15):
        for rank in ranks:
            rank.run(1)
    assert [rank.file.manifest.recordings for rank in ranks] == [[1], [1]]
    assert [number for number, _ in plans(tmp_path / "0")] == [1]
    assert plans(tmp_path / "1") == []
    assert [rank.file.manifest.messages for rank in ranks] == [[], []]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("every", [3, 5, 10])
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_on_schedule_needs_no_announcement(tmp_path, every, first):
    """One rank runs to its end before the other begins, whichever of them leads."""
    ranks = [Rank(tmp_path, rank, at_step=1, every=every) for rank in (first, 1 - first)]
    for rank in ranks:
        rank.run(30)
    assert [rank.file.manifest.messages for rank in ranks] == [[], []]
    assert ranks[0].file.manifest.recordings == ranks[1].file.manifest.recordings
    assert plans(tmp_path) == [(1 + n, 1 + every * n) for n in range(1 + 30 // every)]


def test_recordings_follow_each_other_without_a_step_between(tmp_path):
    rank = Rank(tmp_path, at_step=1, every=3)
    seen = ""
    for _ in range(9):
        seen += rank.recordings.current._schedule.kind(rank.step)[0]
        rank.run(1)
    assert seen == "wttwttwtt"


@pytest.mark.parametrize(("at_step", "steps"), [(100, [(1, 16)]), (18, [(1, 18)])])
def test_a_request_leaves_the_schedule_as_it_is(tmp_path, at_step, steps):
    """It gets a recording of its own if there is time for one before the next, which serves it otherwise."""
    rank = Rank(tmp_path, at_step=at_step, on_demand=True)
    rank.run(11)
    request_recording(tmp_path, "test")
    rank.run(9)
    assert plans(tmp_path) == steps
    assert take_request(tmp_path) is None


def test_recordings_without_a_step_between_serve_every_request(tmp_path):
    rank = Rank(tmp_path, at_step=1, every=3, on_demand=True)
    request_recording(tmp_path, "test")
    rank.run(3)
    assert take_request(tmp_path) is None
    rank.run(6)
    assert plans(tmp_path) == [(1, 1), (2, 4), (3, 7), (4, 10)]


@pytest.mark.usefixtures("store")
def test_a_rank_far_ahead_says_which_recordings_its_own_are(tmp_path):
    leads, ahead = (Rank(tmp_path, rank, at_step=40, every=20, on_demand=True) for rank in (0, 1))
    ahead.run(45)
    request_recording(tmp_path, "test")
    leads.run(70)
    ahead.run(25)
    assert leads.file.manifest.recordings == [1, 2, 3]
    assert ahead.file.manifest.recordings == [1, 3]
    assert ahead.file.manifest.messages == [
        "recording 1 was due at step 5; this rank learned of it at step 46 and skips it",
        "recording 1 of this rank is recording 2 of the others",
    ]


def test_a_recording_on_schedule_ends_one_that_is_late(tmp_path, monkeypatch):
    """The training's own profiler is in its way until another one is due."""
    monkeypatch.setattr(training_profilers, "active", True)
    rank = Rank(tmp_path, at_step=5, every=5)
    for _ in range(10):
        rank.run(1)
        rank.recordings.current.begin_step()
    folders = [tmp_path / recording_folder(number) / "rank-00000" for number in (1, 2)]
    manifests = [manifest_of(open_rank(folder).ranks[0]) for folder in folders]
    assert [one.state for one in manifests] == ["partial", "running"]
    assert manifests[0].messages[-1] == "ended early; complete: 0 of 2 traced steps"


def test_without_a_schedule_the_first_steps_are_not_recorded(tmp_path):
    Rank(tmp_path, on_demand=True).run(20)
    assert plans(tmp_path) == []


def test_a_slow_step_is_followed_by_a_recording(tmp_path):
    rank = Rank(tmp_path, on_slow=1.5)
    rank.run(5, seconds=9)  # before there is a median
    rank.run(15)
    rank.run(1, seconds=1.4)
    assert plans(tmp_path) == []
    rank.run(1, seconds=1.6)
    (number, first), plan = plans(tmp_path)[0], read_plan(tmp_path, 1)
    assert plan is not None
    assert (number, plan.announced_at_step) == (1, 22)
    assert first >= 22 + 3 + 1  # three steps ahead, and the warm-up
    assert plan.reason == "step 21 took 1.60 times as long as the median before it"


@pytest.mark.usefixtures("store")
def test_every_rank_records_the_same_steps_or_none(tmp_path):
    leads, follows, late = (Rank(tmp_path, rank, on_demand=True) for rank in (0, 1, 1))
    leads.run(3)
    follows.run(4)
    request_recording(tmp_path, "test")
    leads.run(1)
    ((_, first),) = plans(tmp_path)
    for rank in (leads, follows):
        rank.run(first - 1 - rank.step)
    assert follows.file.manifest.recordings == [1]
    assert all("t" in kinds(rank, first) for rank in (leads, follows))
    late.step = first
    late.begin()
    assert late.file.manifest.recordings == []
    assert "skips it" in late.file.manifest.messages[0]


def kinds(rank: Rank, step: int) -> str:
    """First letters of the kinds around a step, from the warm-up on."""
    schedule = rank.recordings.current._schedule
    return "".join(schedule.kind(one)[0] for one in range(step - 1, step + 3))


def test_a_request_waits_while_a_recording_runs(tmp_path):
    rank = Rank(tmp_path, at_step=1, every=1000, on_demand=True)
    request_recording(tmp_path, "test")
    rank.run(2)
    assert plans(tmp_path) == [(1, 1)]
    rank.run(1)
    assert plans(tmp_path) == [(1, 1), (2, 7)]  # three steps ahead, and the warm-up
    assert take_request(tmp_path) is None


@pytest.mark.parametrize(("every", "made"), [(10, [(1, 1)]), (3, [(1, 1), (2, 4)])])
def test_no_recording_is_added_beyond_the_size(tmp_path, every, made):
    """One that begins within three steps of the end of the first is made: other ranks may have begun it."""
    rank = Rank(tmp_path, at_step=1, every=every, max_size="1MB")
    rank.run(1)
    (tmp_path / recording_folder(1) / "trace").write_bytes(bytes(10**6))
    rank.run(40)
    assert plans(tmp_path) == made
    (message,) = rank.file.manifest.messages
    assert "--max-size 1MB" in message


def test_a_restart_counts_on(tmp_path, monkeypatch):
    Rank(tmp_path, at_step=1, every=100).run(5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = [Rank(tmp_path, rank, at_step=1, every=100) for rank in (0, 1)]
    assert [rank.file.manifest.recordings for rank in again] == [[2], [2]]


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": 2}, {"on_slow": 1.0}, {"signal": "TERM"}, {"max_size": "1GB"},
     {"max_size": "much", "every": 10}],
)  # fmt: skip
def test_options_that_cannot_be_meant(options):
    with pytest.raises(UsageError, match="--"):
        validate(RecordOptions(**options))


def test_names_and_the_leader():
    assert [recording_number(name) for name in ("recording-0012", "recording-x", "rank-0001")] == [
        12,
        None,
        None,
    ]
    assert [leader(ranks, 8) for ranks in ("all", "5,3", "sample:2")] == [0, 3, 0]


def test_only_a_run_that_listens_can_be_asked(tmp_path):
    from fsdp2prof.files import write_json

    for info, why in [
        (RunInfo(state="complete"), "has ended"),
        (RunInfo(state="running"), "accepts no requests"),
    ]:
        write_json(tmp_path / "run.json", info)
        with pytest.raises(RunDirectoryError, match=why):
            ask_and_wait(tmp_path, 0)
    write_json(tmp_path / "run.json", RunInfo(state="running", options=RecordOptions(on_demand=True)))
    assert ask_and_wait(tmp_path, 0) is None
    assert take_request(tmp_path) == "fsdp2prof trigger"


def test_a_recording_that_never_began_is_not_the_newest(tmp_path: Path) -> None:
    """The training ended before the step that was announced."""
    write_json(tmp_path / "run.json", RunInfo(state="complete"))
    for number in (1, 2):
        folder = tmp_path / recording_folder(number) / "rank-00000"
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", RankManifest(rank=0, world_size=1))
    assert open_run(tmp_path).recordings == (1, 2)
    (tmp_path / recording_folder(1) / "rank-00000" / "summary.json").touch()
    assert open_run(tmp_path).recordings == (1,)
