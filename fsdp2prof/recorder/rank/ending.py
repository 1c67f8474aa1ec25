"""The one session of this process, and its end: however it comes, nothing captured until then is lost.

- a normal end and an exception: ``atexit``, after ``sys.excepthook`` has named the exception;
- SIGTERM and Ctrl-C: a rank of several keeps at once what it is doing: its peers' ends get it out of it;
- SIGTERM, which torchrun sends to the peers of a crashed rank: the main thread ends the recording and then
  dies of the signal as it would have. If it hangs in C++ and does not hear the signal, a watching thread
  gives it :data:`GRACE_S` seconds, marks the manifest and lets the signal kill the process: torchrun would
  otherwise wait for it half a minute.

A training that handles SIGTERM itself, whenever it began to, is left alone with it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType

from fsdp2prof.recorder.guard import guard, in_c
from fsdp2prof.recorder.identity import identify
from fsdp2prof.recorder.rank.manifest import running_recorder
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.rank.signals import HeardSignal, kills
from fsdp2prof.recorder.rank.tracing import kineto_is_used
from fsdp2prof.recorder.settings import Settings
from fsdp2prof.vocabulary import ERROR_LENGTH

GRACE_S = 5.0
"""Seconds the main thread has to react to SIGTERM."""


_lock = threading.Lock()
_session: RankSession | None = None
_ending: _Ending | None = None
_is_second = False
"""Whether this process is one of a rank that another one records."""


def session_of_process() -> RankSession | None:
    """Return the session, starting it if a launcher recorded this process.

    None without a launcher, and where another process of the rank records: its first one is kept.
    """
    global _is_second
    with _lock:
        settings = Settings.from_environment()
        if _session is not None or settings is None or _is_second:
            return _session
        identity = identify()
        if (first := running_recorder(settings, identity.rank)) is not None:
            _is_second = True
            guard.say(f"rank {identity.rank}: process {first} is recorded as this rank; {os.getpid()} is not")
            return None
        return start_session(settings, automatic=True)


def start_session(settings: Settings, *, automatic: bool) -> RankSession:
    """Start the session of this process."""
    global _session
    session = RankSession(settings, identify(), automatic=automatic)
    session.begin()
    _watch_for_end(session)
    _session = session
    return session


def _watch_for_end(session: RankSession) -> None:
    """Make sure that ``session`` ends before the process does."""
    global _ending
    if _ending is not None:  # of a recording before this one
        _ending.leave_signals()
    ending = _ending = _Ending(session)
    atexit.register(guard.hook("ending", ending.at_exit))
    os.register_at_fork(after_in_child=guard.hook("ending", ending.forget))
    if threading.current_thread() is threading.main_thread():
        guard.run("ending", ending.watch_signals)


def _leave_before_kineto() -> None:
    """Let this forked child's ``exit`` end before the destructor of Kineto's configuration.

    Kineto keeps a thread that waits for changes of its configuration. A child has no such thread but the
    record that it waits, and the destructor would wait for it for ever. Handlers run last to first: those
    that the child itself adds come before these two, the destructor never.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)  # given the exit code
        libc.on_exit(libc.fcloseall, None)  # what C wrote is not lost


class _Ending:
    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._pid = os.getpid()
        self._error: str | None = None
        self._crashed = False
        self._previous_excepthook = sys.excepthook
        self._excepthook = guard.around("ending", sys.excepthook, self._note_exception)
        sys.excepthook = self._excepthook
        self._handler: Callable[..., None] | None = None
        self._heard: list[HeardSignal] = []
        self._told = threading.Event()

    def at_exit(self) -> None:
        """End the session; nothing in a forked child."""
        if os.getpid() == self._pid:
            self._told.set()
            self._session.end(self._error, crashed=self._crashed)
            heard = list(self._heard)
            self.leave_signals()
            for one in heard:
                one.wait()

    def watch_signals(self) -> None:
        """Be told of SIGTERM where it would kill the process, and of Ctrl-C in a job of several ranks."""
        if kills(signal.SIGTERM):
            self._handler = guard.before_death(signal.SIGTERM, self._save, self._told)
            try:
                self._heard.append(HeardSignal(signal.SIGTERM, self._sigterm_came))
            except BaseException:
                self.leave_signals()  # a main thread that hangs would not die of it
                raise
        if (
            self._session.manifest.world_size > 1
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._heard.append(HeardSignal(signal.SIGINT, partial(self._session.keep_state, "SIGINT")))

    def forget(self) -> None:
        """In a forked child: leave no trace of the recorder."""
        self._session.forget()
        self.leave_signals()
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._previous_excepthook
        if kineto_is_used():
            _leave_before_kineto()

    def leave_signals(self) -> None:
        """Give the signals back that the training has not taken since."""
        for heard in self._heard:
            heard.close()
        if self._handler is not None and in_c.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        line = traceback.format_exception_only(kind, error)[-1].strip().splitlines()[0]
        words = line[:ERROR_LENGTH].rpartition(" ")[0] or line[:ERROR_LENGTH]
        self._error = line if len(line) <= ERROR_LENGTH else f"{words} ..."
        self._crashed = not issubclass(kind, KeyboardInterrupt)
        if self._crashed and os.getpid() == self._pid and self._session.manifest.world_size > 1:
            self._session.keep_state(self._error, trace)

    def _save(self) -> None:
        self._session.keep_state("SIGTERM")
        self._session.end("SIGTERM")

    def _sigterm_came(self) -> None:
        if self._session.manifest.world_size > 1:
            self._session.keep_state("SIGTERM")
        if not self._told.wait(GRACE_S):
            self._session.tell("killed by SIGTERM while its main thread hung: the running capture is lost")
            self._session.keep_state("SIGTERM")
            self._session.manifest.error = "SIGTERM"
            self._session.manifest.state = "partial"
            self._session.write_manifest()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
            os.kill(self._pid, signal.SIGTERM)
