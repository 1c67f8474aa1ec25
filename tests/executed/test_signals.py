"""Signals that the recorder hears in a process: unseen by its training, once each, not of its children."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.rank.signals import HeardSignal, address, kills

pytestmark = pytest.mark.usefixtures("forks")

heard: list[int] = []
own: list[int] = []
USR1, DEFAULT = signal.SIGUSR1, signal.SIG_DFL


def come(number: signal.Signals, *, is_heard: bool = False) -> None:
    """Send a signal and wait until it is heard, or where it is not for as long as that should take."""
    before, until = len(heard), time.monotonic() + (30 if is_heard else 0.2)
    os.kill(os.getpid(), number)
    while time.monotonic() < until and not (is_heard and len(heard) > before):
        time.sleep(0.01)


def hear(number: signal.Signals) -> HeardSignal:
    return HeardSignal(number, lambda: heard.append(number))


def handle(number: signal.Signals) -> object:
    return signal.signal(number, lambda *_: own.append(number))


def in_child(case: Callable[[], object]) -> str:
    """Return what a case returns in a process of its own, as text."""
    guard.run("ending", int)  # torch imports what its first call needs
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            faulthandler.unregister(USR1)
            signal.signal(USR1, DEFAULT)
            os.write(writer, repr(case()).encode())
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read()


def test_a_closed_signals_thread_ends() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def case() -> object:
        before, signals = threads(), [hear(USR1), hear(signal.SIGUSR2)]
        for one in signals:
            one.close()
            one.wait()
        until = time.monotonic() + 30  # the lock is the last thing that a thread lets go
        while time.monotonic() < until and threads() > before:
            time.sleep(0.01)
        return threads() - before

    assert in_child(case) == "0"


def test_a_signal_is_heard_once_and_its_handler_is_called() -> None:
    def case() -> object:
        def deep(calls: int) -> None:
            deep(calls - 1) if calls else come(USR1, is_heard=True)

        handle(USR1)
        hear(USR1)
        deep(300)
        deep(0)
        return len(heard), len(own), signal.set_wakeup_fd(-1)

    assert in_child(case) == "(2, 2, -1)"


def test_a_signal_that_would_kill_or_is_ignored_is_heard_alone() -> None:
    def case() -> object:
        for before in (DEFAULT, signal.SIG_IGN):
            signal.signal(USR1, before)
            one = hear(USR1)
            come(USR1, is_heard=True)
            own.append(signal.getsignal(USR1) is before)
            one.close()
        return len(heard), own, kills(USR1)

    assert in_child(case) == "(2, [True, True], False)"


def test_a_handler_of_the_trainings_takes_its_place() -> None:
    def case() -> object:
        one = hear(USR1)
        before = handle(USR1)
        come(USR1)
        one.close()
        come(USR1)
        return before is DEFAULT, len(heard), len(own)

    assert in_child(case) == "(True, 0, 2)"


def test_a_forked_child_has_none() -> None:
    def case() -> object:
        hear(USR1)
        child = os.fork()
        if not child:
            come(USR1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(heard)

    assert in_child(case) == f"({-USR1}, 0)"


def test_a_closed_pipe_is_written_to_no_more() -> None:
    def case() -> object:
        handle(USR1)
        one = hear(USR1)
        for descriptor in (one._reader, one._writer):
            with suppress(OSError):  # the first may have made it close the second
                os.close(descriptor)
        files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        until = time.monotonic() + 30
        while address(USR1) == one._ours and time.monotonic() < until:
            time.sleep(0.01)
        come(USR1)
        return [os.fstat(file.fileno()).st_size for file in files], len(heard), len(own)

    assert in_child(case) == "([0, 0, 0], 0, 1)"


def test_the_trainings_own_faulthandler_stays() -> None:
    def case() -> object:
        faulthandler.register(USR1, 2, chain=True)
        with pytest.raises(ValueError, match="SIGUSR1 is handled by other C code"):
            hear(USR1)
        return kills(USR1)

    assert in_child(case) == "False"
