"""A rank that stands still keeps its state once a hang, and only where it was asked to watch."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp2prof.manifest import RecordOptions
from fsdp2prof.readers.job.stacks import read_stacks
from fsdp2prof.recorder.hanging import HangWatch, keep_state
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.launch.recording import buffer_variables
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.settings import Settings
from fsdp2prof.run_directory import STACKS_FILE


def test_a_buffer_that_the_user_has_sized_stays_so() -> None:
    names = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"
    old = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"
    run = Path("/runs/one")
    assert buffer_variables({}, run, "2.13.0+cpu") == dict(
        zip(names, ("2000", "/runs/one/flight-recorder/nccl_trace_rank_", "1"), strict=True)
    )
    assert tuple(buffer_variables({}, run, "2.7.1")) == old
    for known in (names, old):
        assert buffer_variables(dict.fromkeys(known, "0"), run, "2.13.0") == {}


def test_each_hang_is_told_once_and_only_after_a_step_began() -> None:
    told: list[float] = []
    heard = threading.Event()

    def hung(waited_s: float) -> None:
        told.append(waited_s)
        heard.set()

    watch = HangWatch(1, hung)
    time.sleep(1.3)
    assert told == []
    for hangs in (1, 2):
        watch.step()
        assert heard.wait(30)
        heard.clear()
        time.sleep(0.6)
        assert len(told) == hangs
        assert told[-1] >= 1
    watch.close()


def test_stacks_name_where_every_thread_is(tmp_path: Path) -> None:
    leave = threading.Event()

    def stand_still() -> None:
        leave.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    try:
        assert STACKS_FILE in keep_state(tmp_path, "told to")
    finally:
        leave.set()
        thread.join()
    stacks = (tmp_path / STACKS_FILE).read_text()
    assert stacks.startswith("# told to\n")
    assert "stand_still" in stacks
    assert "test_stacks_name_where_every_thread_is" in stacks


def test_a_crash_leaves_the_line_that_raised(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError

    try:
        fails()
    except ValueError as error:
        keep_state(tmp_path, "ValueError", error.__traceback__)
    stacks = read_stacks(tmp_path / STACKS_FILE, 0)
    assert stacks.main is not None
    assert stacks.main.frames[0].function.endswith("fails")
    assert stacks.main.frames[-1].function == "test_a_crash_leaves_the_line_that_raised"


def test_a_process_that_was_stopped_is_watched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does after it was stopped says nothing of what it did before."""
    told: list[float] = []
    clock = iter([0.0, 0.0, 0.5, 1.0, 600.0, 600.5, 1200.0, 1201.0, 1202.0, 1203.0])
    watch = HangWatch(2, told.append)
    monkeypatch.setattr("fsdp2prof.recorder.hanging.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(watch, "_over", SimpleNamespace(wait=lambda _: watch._told and bool(told)))
    monkeypatch.setattr(watch, "_is_watching", True)
    watch.step()
    watch._run()
    assert told == [2.0]


def test_the_first_state_of_a_step_stays(tmp_path: Path) -> None:
    """A rank that is told to end has left the collective it hung in, since its peers have ended."""
    settings = Settings(run=str(tmp_path), options=RecordOptions(active=0, memory=False, hang_after=600))
    session = RankSession(settings, Identity(rank=0, local_rank=0, world_size=2), automatic=False)
    session.folder.mkdir(parents=True)
    for why in ("no step ended for 600 s", "SIGTERM"):
        session.keep_state(why)
    stacks = session.folder / STACKS_FILE
    assert stacks.read_text().startswith("# no step ended for 600 s\n")
    session._step += 1
    session.keep_state("SIGTERM")
    assert stacks.read_text().startswith("# SIGTERM\n")
