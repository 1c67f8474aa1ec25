"""Stacks of a rank's threads: what the recorder and ``faulthandler`` write, and ``py-spy dump``.

Formats: CPython's ``Python/traceback.c`` (``_Py_DumpTracebackThreads``), py-spy's ``src/dump.rs``::

    Thread 0x00007f00 [name] (most recent call first):     Thread 4711 (idle): "MainThread"
      File "train.py", line 7 in main                          main (train.py:7)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp2prof.errors import InputError
from fsdp2prof.tables.flight_recorder import RankStacks, StackFrame, ThreadStack

_MOST_BYTES = 16 << 20
_BEGINNING = 1 << 16
_MOST_FRAMES = 1000
"""Of one thread: a recursion without end is deeper."""
_LONGEST = 1000
"""Characters of a line."""

_FAULTHANDLER_THREAD = re.compile(
    r"(?:Current thread|Thread|Main thread|Stack)(?: 0x[0-9a-f]+)?(?: \[(.*)\])? "
    r"\(most recent call first\):$"
)
_FAULTHANDLER_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_PYSPY_PROCESS = re.compile(r"^Process \d{1,10}: ", re.M)
_PYSPY_THREAD = re.compile(r'Thread (?:0x)?[0-9A-Fa-f]+ \([a-z+]+\)(?:: "(.*)")?$')
_PYSPY_FRAME = re.compile(r"    (.+) \((.+?)(?::(\d{1,9}))?\)$")
_NATIVE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|h|hpp|inc|rs|S)$|\.so(?:\.|$)")
"""File names of native frames: sources if a library gives them, otherwise the library."""
_MAIN = ("MainThread", "main thread")
_OUTERMOST = "<module>"


@dataclass
class _Thread:
    header: str
    name: str | None
    frames: list[StackFrame] = field(default_factory=list)

    def stack(self) -> ThreadStack:
        return ThreadStack(name=self.name, frames=tuple(self.frames))


def looks_like_stacks(path: Path) -> bool:
    """Whether a file is text in which a thread's stack begins."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return False
    if b"\0" in beginning:
        return False
    lines = beginning.decode(errors="replace").splitlines()
    return any(_FAULTHANDLER_THREAD.match(line) or _PYSPY_THREAD.match(line) for line in lines)


def read_stacks(path: Path, rank: int) -> RankStacks:
    """Read the stacks of one rank's threads. Raises ``InputError`` for a file without any."""
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InputError(f"{path}: too large for the stacks of a rank ({size} bytes)")
        text = path.read_text(errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if (processes := len(_PYSPY_PROCESS.findall(text))) > 1:
        raise InputError(f"{path}: stacks of {processes} processes; write those of each rank to its own file")
    threads = _threads(text.splitlines())
    if not threads:
        raise InputError(f"{path}: no thread stack in it, neither from faulthandler nor from `py-spy dump`")
    main = _main(threads)
    return RankStacks(
        rank=rank,
        source=str(path),
        tool="py-spy" if any(_PYSPY_THREAD.match(one.header) for one in threads) else "faulthandler",
        main=None if main is None else main.stack(),
        others=[one.stack() for one in threads if one is not main],
    )


def _threads(lines: Iterable[str]) -> list[_Thread]:
    """Threads in the order of the file; lines that are neither a thread's nor a frame's are left out."""
    threads: list[_Thread] = []
    for line in lines:
        if len(line) > _LONGEST:
            continue
        if (header := _FAULTHANDLER_THREAD.match(line) or _PYSPY_THREAD.match(line)) is not None:
            threads.append(_Thread(line, header[1]))
        elif threads and len(threads[-1].frames) < _MOST_FRAMES and (frame := _frame(line)) is not None:
            threads[-1].frames.append(frame)
    return threads


def _frame(line: str) -> StackFrame | None:
    if (match := _FAULTHANDLER_FRAME.match(line)) is not None:
        return StackFrame(match[1], int(match[2]) if match[2].isdigit() else None, match[3])
    if (match := _PYSPY_FRAME.match(line)) is not None:
        number = int(match[3]) if match[3] is not None else None
        return StackFrame(
            match[2], number, match[1], native=number is None or _NATIVE.search(match[2]) is not None
        )
    return None


def _main(threads: Sequence[_Thread]) -> _Thread | None:
    """The main thread by name, otherwise the last of those that began with a module (newest come first)."""
    for one in threads:
        if one.name in _MAIN or one.header.startswith("Main thread"):
            return one
    began = [one for one in threads if any(frame.function == _OUTERMOST for frame in one.frames[-3:])]
    return began[-1] if began else None
