"""The guard between a training and the recorder: a part that fails is off, the training is untouched."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsdp2prof.recorder.guard import Guard


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def guard(tmp_path: Path, messages: list[str]) -> Guard:
    made = Guard()
    made.start(tmp_path / "errors.txt", messages.append, lambda: 7)
    return made


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("no such field\nin this torch")


def test_a_failure_is_said_once_everywhere_and_costs_its_part_alone(
    guard: Guard, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undone: list[str] = []
    guard.when_off("trace", lambda: undone.append("trace"))
    assert guard.run("trace", broken) is None
    assert guard.run("trace", lambda: "still on") is None
    assert guard.run("memory", lambda: "on") == "on"
    assert guard.run("manifest", broken) is None
    assert guard.run("manifest", lambda: "tried again") == "tried again"
    said = "the trace failed at step 7: no such field"
    assert messages == [said, "writing the manifest failed at step 7: no such field"]
    assert undone == ["trace"]
    first, _ = capsys.readouterr().err.splitlines()
    assert first == f"fsdp2prof: rank 0: {said}; it is switched off, the training continues"
    assert "in broken" in (tmp_path / "errors.txt").read_text()


class Unusual(BaseException):
    """As foreign extensions raise."""


def test_any_class_of_exception_is_caught_but_those_that_signals_raise(guard: Guard) -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind

    assert guard.run("trace", fail, Unusual) is None
    assert guard.is_off("trace")
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            guard.run("memory", fail, kind)
    assert not guard.is_off("memory")


def test_with_the_recording_everything_is_off_but_the_end(guard: Guard) -> None:
    guard.run("recording", broken)
    assert guard.run("watch", lambda: 1) is None
    assert guard.run("ending", lambda: 1) == 1
    assert guard.clean("watch", lambda: 1) == 1


@pytest.mark.parametrize("at", ["enter", "leave", "nowhere"])
def test_a_wrapped_function_is_called_once_and_returns_its_own(guard: Guard, at: str) -> None:
    calls: list[tuple[int, int]] = []

    def original(a: int, *, part: int) -> int:
        calls.append((a, part))
        return a + part

    def enter(a: int, *, part: int) -> Callable[[bool, Any], None]:
        if at == "enter":
            broken()
        return leave

    def leave(returned: bool, result: int) -> None:
        assert (returned, result) == (True, 5)
        if at == "leave":
            broken()

    wrapped = guard.around("trace", original, enter)
    assert wrapped(2, part=3) == wrapped(2, part=3) == 5
    assert calls == [(2, 3)] * 2
    assert guard.is_off("trace") is (at != "nowhere")


def test_exceptions_of_the_training_pass(guard: Guard) -> None:
    seen: list[tuple[bool, object]] = []
    wrapped = guard.around("trace", broken, lambda: lambda *how: seen.append(how))
    with pytest.raises(ZeroDivisionError):
        wrapped()
    assert seen == [(False, None)]
    assert not guard.is_off("trace")
    with pytest.raises(SystemExit):
        guard.run("trace", exit)


class TooSlow(Exception):
    """A training's own timeout."""


class Alarm:
    """Handlers that raise it."""

    def __call__(self, *_: object) -> None:
        raise TooSlow

    def late(self, number: int, frame: object) -> None:
        raise TooSlow

    def named(self, name: str, number: int, frame: object) -> None:
        raise TooSlow(name)

    def once(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.late(number, None)


@pytest.mark.parametrize("handler", [Alarm().late, Alarm(), partial(Alarm().named, "a batch"), Alarm().once])
def test_a_timeout_of_the_training_that_hits_the_recorder_is_the_trainings(
    guard: Guard, handler: Callable[..., None]
) -> None:
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(TooSlow):
            guard.run("trace", time.sleep, 5)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not guard.is_off("trace")


@pytest.mark.usefixtures("forks")
def test_a_death_waits_until_a_file_is_whole_and_what_was_recorded_is_saved(guard: Guard) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            guard.before_death(signal.SIGTERM, lambda: os.write(writer, b"saved "), threading.Event())
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.write(writer, b"unseen ")

            def write() -> None:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                os.write(writer, b"whole ")

            guard.run("trace", write)
        finally:
            os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert os.read(reader, 100) == b"unseen whole saved "
    os.close(reader)


@pytest.mark.usefixtures("forks")
def test_a_forked_child_undoes_nothing_of_its_parent(guard: Guard) -> None:
    """Its manifest, its profiler and its device are not the child's to stop."""
    guard.when_off("captures", lambda: os._exit(3))
    child = os.fork()
    if not child:
        try:
            guard.run("captures", int, "no number")
            os._exit(0 if guard.is_off("captures") else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_failure_that_cannot_be_said_is_harmless(tmp_path: Path) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fails() -> None:
        raise Silent

    made = Guard()
    made.start(tmp_path / "no folder" / "errors.txt", broken, lambda: -1)
    made.when_off("trace", broken)
    assert made.run("trace", fails) is None
    assert made.run("watch", broken) is None
    assert made.is_off("trace")
    assert made.is_off("watch")


def test_a_run_directory_that_was_removed_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = Guard()
    made.start(tmp_path / "removed" / "rank-00000" / "errors.txt", lambda _: None, lambda: 3)
    for part in ("memory", "trace", "manifest"):
        made.run(part, (tmp_path / "removed" / "file").write_text, "")
    assert capsys.readouterr().err == (
        "fsdp2prof: rank 0: the run directory was removed: recording stops, the training continues\n"
    )
    assert made.is_off("trace")


def test_a_thread_of_ours_is_not_listed(guard: Guard) -> None:
    seen, over = threading.Event(), threading.Event()

    def watch() -> None:
        seen.set()
        over.wait(60)

    before = threading.enumerate()
    guard.thread("hang", watch)
    assert seen.wait(60)
    assert set(threading.enumerate()) <= set(before)
    over.set()
