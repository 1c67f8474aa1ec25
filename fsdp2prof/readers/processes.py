"""Work in other processes, without importing the user's main module there.

``multiprocessing`` either forks (unsafe once torch has threads) or imports ``__main__`` again (fatal for a
script without a guard). Here a child is an interpreter that reads one pickled call and writes its result.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import fsdp2prof
from fsdp2prof.errors import Fsdp2ProfError

__all__ = ["Task", "map_in_processes", "usable_cores"]

T = TypeVar("T")
Item = TypeVar("Item")

_IN_CHILD = "FSDP2PROF_WORKER"
_CHILD = "from fsdp2prof.readers.processes import _serve; _serve()"


class Task(Generic[T]):
    """``function(*args)`` running in a process of its own; all must pickle, by reference for the function."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        root = str(Path(fsdp2prof.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, "PYTHONPATH": path, _IN_CHILD: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._child.stdin is not None
        with self._child.stdin as pipe:
            pickle.dump((function, args), pipe, pickle.HIGHEST_PROTOCOL)

    def result(self) -> T:
        """Wait for the result; raises the error of this package that the function raised.

        Raises ``RuntimeError`` when the process died of anything else (its own words are on stderr).
        """
        assert self._child.stdout is not None
        with self._child.stdout as pipe:
            try:
                value = pickle.load(pipe)
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
        assert self._child.stdout is not None
        self._child.stdout.close()


def map_in_processes(function: Callable[[Item], T], items: Iterable[Item], workers: int) -> Iterator[T]:
    """Yield ``function(item)`` in the order of the items, at most ``workers`` at a time.

    With one worker or one item everything runs here. No more than ``workers`` results wait at once.
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


def usable_cores() -> int:
    """Cores this process may run on; 1 in a process that a :class:`Task` started."""
    if _IN_CHILD in os.environ:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _serve() -> None:
    """Child: run the pickled call on stdin, pickle its result to stdout."""
    function, args = pickle.load(sys.stdin.buffer)
    output = sys.stdout.buffer
    sys.stdout = sys.stderr
    try:
        value = function(*args)
    except Fsdp2ProfError as error:
        value = error
    pickle.dump(value, output, pickle.HIGHEST_PROTOCOL)
    output.flush()
