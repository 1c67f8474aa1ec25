"""Work in other processes, without importing the user's main module there.

A fork starts at once, but is safe only in a process without threads of its own, as the command line is (the
threads of :func:`repeated` keep clear of forks); torch starts some. Elsewhere a child is a fresh interpreter
that reads one pickled call and writes its result: ``multiprocessing``'s other methods import ``__main__``
again, fatal for a script without a guard. In either, :func:`no_garbage_collection` spares large tables.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import fsdp2prof
from fsdp2prof.errors import Fsdp2ProfError

T = TypeVar("T")
Item = TypeVar("Item")

_forking = threading.RLock()
"""Held while a fork is made."""
_repeating: set[threading.Thread] = set()
_IN_CHILD = "FSDP2PROF_WORKER"
_CHILD = "from fsdp2prof.worker_processes import _serve; _serve()"


class Task(Generic[T]):
    """``function(*args)`` running in a process of its own; all must pickle, by reference for the function."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._child = (_Fork if _may_fork() else _Interpreter)(function, args)

    def result(self) -> T:
        """Wait for the result; raises the error of this package that the function raised.

        Raises ``RuntimeError`` when the process died of anything else (its own words are on stderr).
        """
        try:
            value = self._child.receive()
        except EOFError:
            value = None
        code = self._child.wait()
        if code:
            raise RuntimeError(f"a worker process ended with exit code {code}")
        if isinstance(value, Fsdp2ProfError):
            raise value
        return value  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """End the process; nothing happens if it has ended."""
        self._child.kill()
        self._child.wait()


def map_in_processes(
    function: Callable[[Item], T], items: Iterable[Item], workers: int
) -> Generator[T, None, None]:
    """Yield ``function(item)`` in the order of the items, at most ``workers`` at a time.

    With one worker or one item everything runs here. No more than ``workers`` results wait at once.
    Closing the generator ends the processes that are still at work.
    """
    waiting = list(items)
    if min(workers, len(waiting)) <= 1:
        yield from map(function, waiting)
        return
    running: deque[Task[T]] = deque()
    try:
        for item in waiting:
            if len(running) == workers:
                yield running.popleft().result()
            running.append(Task(function, item))
        while running:
            yield running.popleft().result()
    finally:
        for task in running:
            task.cancel()


@contextmanager
def repeated(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call ``act`` every so many seconds, from a thread, as long as the block runs.

    A fork is made between two calls, so that the child finds no lock of theirs taken.
    """
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            with _forking:
                act()

    thread = threading.Thread(target=repeat, daemon=True)
    _repeating.add(thread)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _repeating.remove(thread)


def usable_cores() -> int:
    """Cores this process may run on; 1 in a process that a :class:`Task` started."""
    if _IN_CHILD in os.environ:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _may_fork() -> bool:
    others = {*threading.enumerate()} - {threading.current_thread()} - _repeating
    return sys.platform == "linux" and not others and "torch" not in sys.modules


class _Fork:
    """A copy of this process."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, child_end = context.Pipe(duplex=False)
        self._process = context.Process(target=_answer, args=(child_end, function, args))
        with _forking, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle BLAS threads: not used there
            self._process.start()
        child_end.close()

    def receive(self) -> Any:
        return self._pipe.recv()

    def wait(self) -> int | None:
        self._process.join()
        self._pipe.close()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Interpreter:
    """A fresh interpreter that imports this package only."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        root = str(Path(fsdp2prof.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        with self._process.stdin as pipe:
            pickle.dump((function, args), pipe, pickle.HIGHEST_PROTOCOL)

    def receive(self) -> Any:
        return pickle.load(self._pipe)

    def wait(self) -> int | None:
        code = self._process.wait()
        self._pipe.close()
        return code

    def kill(self) -> None:
        self._process.kill()


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Child: the function's value, or the error of ours that it raised; what it prints goes to stderr."""
    os.environ[_IN_CHILD] = "1"
    sys.stdout = sys.stderr
    try:
        return function(*args)
    except Fsdp2ProfError as error:
        return error


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Forked child: send the result."""
    value = _call(function, args)
    with _ends_with_its_parent():
        pipe.send(value)
        pipe.close()


def _serve() -> None:
    """Fresh child: run the pickled call on stdin, pickle its result to stdout."""
    output = sys.stdout.buffer
    value = _call(*pickle.load(sys.stdin.buffer))
    with _ends_with_its_parent():
        pickle.dump(value, output, pickle.HIGHEST_PROTOCOL)
        output.flush()


@contextmanager
def _ends_with_its_parent() -> Iterator[None]:
    """Child: a parent that was killed waits for no result; say nothing of it, and flush nothing again."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking millions of young objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
