"""A job that hangs: the activity of each rank, saved before the job is ended.

Every rank watches its own steps. In a hang no rank's step ends, so all of them save their state at about
the same time: torch's last collectives (the Flight Recorder) and the Python stacks of all threads. A main
thread that hangs in C++ and holds the GIL cannot do so; the launcher notices its silence
(:mod:`fsdp2prof.recorder.launch.host_processes`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, TracebackType

from fsdp2prof.files import replacing
from fsdp2prof.recorder.guard import guard
from fsdp2prof.run_directory import FLIGHT_RECORDER_FILE, STACKS_FILE

_STOPPED_S = 5.0
"""Seconds between two looks that are too many for a process whose Python runs."""
_DEEPEST = 500
"""Maximum number of calls per thread."""
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of NCCL's collectives, and of other backends'."""


def keep_state(folder: Path, why: str, crash: TracebackType | None = None) -> list[str]:
    """Write all threads' stacks and the Flight Recorder's dump into a rank's folder; return the files' names.

    The stacks come first: a dump can fail where a device has. ``crash`` is the traceback of an exception that
    ends the main thread. Raises ``OSError`` where they cannot be written.
    """
    with replacing(folder / STACKS_FILE) as temporary:
        temporary.write_text("\n".join(_stacks(why, crash)) + "\n", errors="backslashreplace")
    try:
        dump = _dump()
    except RuntimeError:
        dump = None
    if dump is None:
        return [STACKS_FILE]
    with replacing(folder / FLIGHT_RECORDER_FILE) as temporary:
        temporary.write_bytes(dump)
    return [FLIGHT_RECORDER_FILE, STACKS_FILE]


def _stacks(why: str, crash: TracebackType | None) -> Iterator[str]:
    """Lines in the format of ``faulthandler``, after one with the reason; the main thread first, with
    names."""
    yield f"# {why}"
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()
    for ident in sorted(running, key=lambda ident: ident != main):
        kind = "Main thread" if ident == main else "Thread"
        name = f" [{names[ident]}]" if ident in names else ""
        yield f"\n{kind} 0x{ident:016x}{name} (most recent call first):"
        if ident == main and crash is not None:
            calls = [(one.f_code, line) for one, line in traceback.walk_tb(crash)][::-1]
        else:
            calls = [
                (one.f_code, line) for one, line in islice(traceback.walk_stack(running[ident]), _DEEPEST)
            ]
        yield from (
            f'  File "{one.co_filename}", line {line} in {_name(one)}' for one, line in calls[:_DEEPEST]
        )


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.11 has it


def _dump() -> bytes | None:
    """torch's last collectives, as JSON; None if there are none or they are not recorded."""
    import torch

    module = getattr(torch._C, "_distributed_c10d", None)
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is not None:
            found = bytes(dump())
            if b'"entries"' in found:
                return found
    return None


class HangWatch:
    """Calls ``hung`` once whenever no step ends for ``after_s`` seconds.

    It begins with the first :meth:`step`, because initialisation may take any time.
    """

    def __init__(self, after_s: int, hung: Callable[[float], None]) -> None:
        self._after_s = after_s
        self._hung = hung
        self._last = time.monotonic()
        self._told = True
        self._over = threading.Event()
        self._pid = os.getpid()
        self._is_watching = False

    def step(self) -> None:
        """A step begins."""
        self._last, self._told = time.monotonic(), False
        if not self._is_watching:
            self._is_watching = True
            guard.thread("hang", self._run)

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(min(1.0, self._after_s / 4)):
            before, looked = looked, time.monotonic()
            if looked - before > _STOPPED_S:  # the process itself was stopped: begin anew
                self._last = looked
            waited = looked - self._last
            if waited >= self._after_s and not self._told:
                self._told = True
                self._hung(waited)
