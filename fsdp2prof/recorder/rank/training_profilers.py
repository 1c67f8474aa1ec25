"""The training's own profilers, seen coming and going: torch has one profiler, and theirs comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.autograd.profiler as entry_points
from torch.autograd import _profiler_enabled

from fsdp2prof.recorder.guard import Enter, guard

PATIENCE_S = 20.0
"""Seconds that the training's profiler on another thread waits until ours has stopped on its own. The thread
of ours may be waiting for that thread, so that more would not help."""


class ProfilerListener(Protocol):
    """Who has to make way."""

    def profiler_begins(self) -> None:
        """A profiler of the training's is about to be set up or started on this thread."""

    def trace_exported(self, path: Path) -> None:
        """It has written a Chrome trace."""


class TrainingProfilers:
    """Watches every profiler of this process except the recorder's own.

    ``torch.profiler``, ``torch.autograd.profiler`` and ``emit_nvtx`` all pass through three functions, by the
    names that ``torch.autograd.profiler`` bound them to. They are wrapped before the training can hold a
    profiler that is set up; what they do stays the same.

    Kineto has one session for the process, and torch keeps the other half of a profiler's state per thread: a
    profiler can be stopped on its own thread alone, and crashes the process where another thread has begun a
    session since. So the training's profiler waits on another thread until ours has left
    (:meth:`claim`, :meth:`release`). If it waits in vain it takes the session over, and ours is taken out of
    its thread once theirs has ended, with a session that is prepared anew (:meth:`leave`).
    """

    def __init__(self) -> None:
        self.active = False
        """Whether the training has a profiler set up or running."""
        self.listener: ProfilerListener | None = None
        self._restore: list[tuple[Any, str, Any, Any]] = []
        self._within = threading.local()
        self._turn = threading.Condition()
        self._thread: int | None = None
        """On which a profiler of ours is set up or runs."""
        self._beginner: int | None = None
        """The thread on which the training's profiler begins or runs."""
        self.has_taken_over = False
        """Whether it took the session of a profiler of ours, which is still to be taken out."""
        self._is_leaving = False

    def claim(self) -> bool:
        """Take the process's profiler for ours, on this thread; False where the training has it."""
        with self._turn:
            if self.active or self.has_taken_over:
                return False
            self._thread = threading.get_ident()
            return True

    def release(self) -> None:
        """Ours has stopped."""
        with self._turn:
            self._thread, self._is_leaving, self.has_taken_over = None, False, False
            self._turn.notify_all()

    def leave(self) -> bool:
        """Let theirs wait while ours is stopped; False as long as one runs that has taken the session."""
        with self._turn:
            if self.has_taken_over and self.active and self._beginner != threading.get_ident():
                return False
            self._thread, self._is_leaving = threading.get_ident(), True
            return True

    def install(self) -> None:
        """Begin watching, once."""
        if self._restore:
            return
        self.active = bool(_profiler_enabled())
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._wrap(entry_points, name, self._begin)
        self._wrap(entry_points, "_disable_profiler", self._end)
        self._wrap(entry_points.profile, "export_chrome_trace", self._export)

    def remove(self) -> None:
        """Stop watching."""
        for owner, name, original, replacement in reversed(self._restore):
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
        self._restore.clear()
        self.listener = None
        self.release()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """While it lasts, what this thread does with profilers is the recorder's own doing."""
        before = self.is_aside
        self._within.aside = True
        try:
            yield
        finally:
            self._within.aside = before

    @property
    def is_aside(self) -> bool:
        """Whether what this thread does with profilers is the recorder's own doing."""
        return getattr(self._within, "aside", False)

    def _wrap(self, owner: Any, name: str, enter: Enter) -> None:
        original = getattr(owner, name)
        watched = guard.around("profilers", original, enter)
        setattr(owner, name, watched)
        self._restore.append((owner, name, original, watched))

    @property
    def _watches(self) -> bool:
        return bool(self._restore) and not self.is_aside

    def _begin(self, *_: Any, **__: Any) -> None:
        if not self._watches or self.active:
            return
        here = threading.get_ident()

        def is_free() -> bool:
            return self._thread in (None, here)

        with self._turn:
            self.active, self._beginner = True, here
        if self.listener is not None:
            self.listener.profiler_begins()
        with self._turn:
            if not self._turn.wait_for(is_free, PATIENCE_S) and not (
                self._is_leaving and self._turn.wait_for(is_free)
            ):
                self._thread, self.has_taken_over = None, True

    def _end(self, *_: Any, **__: Any) -> Callable[[bool, Any], None] | None:
        def ended(returned: bool, _: Any) -> None:
            self.active = self.active and not returned

        return ended if self._watches else None

    def _export(self, _: Any, path: Any, *__: Any, **___: Any) -> Callable[[bool, Any], None] | None:
        def exported(returned: bool, _: Any) -> None:
            if returned and self.listener is not None:
                self.listener.trace_exported(Path(path))

        return exported if self._watches else None


training_profilers = TrainingProfilers()
"""Of this process: torch has one profiler."""
