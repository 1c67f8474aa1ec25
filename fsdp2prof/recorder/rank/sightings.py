"""Python lines that the training's thread was seen on in a traced step, and garbage collections.

A thread of ours looks a few hundred times a second: that costs the training some microseconds each, where
stacks of every call would slow it several times. Long and repeated calls are seen, short ones are not.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

import fsdp2prof
from fsdp2prof.manifest import HostSpan
from fsdp2prof.recorder.guard import guard

__all__ = ["Collections", "Sightings", "cpu_of_threads", "line_of_thread"]

_INTERVAL_S = 0.005
"""Time between two looks: the interpreter's own interval for switching threads."""
_MOST = 2_000
"""Spans kept of one step."""
_SHORT_NS = 100_000
"""Garbage collections below this are summed and not listed."""
_LIBRARIES = tuple(f"{Path(str(one.__file__)).parent}{os.sep}" for one in (torch, fsdp2prof))
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_WRAPPERS = frozenset({"wrapper", "decorate_context", "inner", "guarded", "fn", "_fn"})
"""Names of functions that only call another."""


class Sightings:
    """Where one thread is, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._spans: list[HostSpan] = []
        guard.thread("host", self._watch)

    def end(self) -> list[HostSpan]:
        """Stop looking; return what was seen, in order of time."""
        self._over.set()
        spans, self._spans = self._spans, []
        return spans

    def _watch(self) -> None:
        spans = self._spans
        while not self._over.wait(_INTERVAL_S) and len(spans) < _MOST:
            frame = sys._current_frames().get(self._thread)
            now = time.time_ns()
            line = _line(frame)
            if not line:
                continue
            if spans and spans[-1].line == line:
                spans[-1].duration_ns = max(0, now - spans[-1].start_ns)
            else:
                spans.append(HostSpan(start_ns=now, line=line))


class Collections:
    """Garbage collections of the process, from the beginning to :meth:`end`."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.spans: list[HostSpan] = []
        self._began = 0
        self._callback = guard.hook("host", self._note)
        gc.callbacks.append(self._callback)

    def end(self) -> None:
        """Stop timing them."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = time.time_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            took = max(0, now - self._began)
            self.total_ns += took
            if took >= _SHORT_NS and len(self.spans) < _MOST:
                self.spans.append(HostSpan(start_ns=self._began, duration_ns=took))
            self._began = 0


def cpu_of_threads() -> dict[int, int]:
    """Return the CPU time of every other Python thread that the training started, by its identity (Linux)."""
    found = {}
    mine = threading.get_ident()
    for thread in threading.enumerate():
        # Autograd's threads are dummies: what they run is the training's own work.
        dummy = isinstance(thread, threading._DummyThread)
        if dummy or thread.ident is None or thread.native_id is None or thread.ident == mine:
            continue
        try:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[thread.ident] = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return found


def line_of_thread(thread: int) -> str:
    """Return the line that a thread is on; empty where it is in no code of the training's."""
    return _line(sys._current_frames().get(thread))


def _line(frame: FrameType | None) -> str:
    """Name the innermost line outside torch, the standard library and this package, and what it calls.

    ``full_tensor() in train.py:88 (clip)``; empty where no frame is such a line.
    """
    inner: list[str] = []
    for one in _outwards(frame):
        code = one.f_code
        if not _is_library(code.co_filename):
            at = f"{_short(code.co_filename)}:{one.f_lineno} ({code.co_name})"
            called = next((name for name in reversed(inner) if name not in _WRAPPERS), "_")
            return at if called.startswith(("_", "<")) else f"{called}() in {at}"
        inner.append(code.co_name)
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    """Whether a file is torch's, ours, or the standard library's."""
    standard = file.startswith(_STANDARD) and "-packages" not in file[len(_STANDARD) :]
    return standard or file.startswith(_LIBRARIES) or file.startswith("<")


@lru_cache(maxsize=4096)
def _short(file: str) -> str:
    """The last two parts of a path outside the working directory, else the part inside it."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(Path(*path.parts[-2:]))
