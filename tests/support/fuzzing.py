"""How inputs are spoiled, by their structure and by their bytes, and what bounds their use."""

from __future__ import annotations

import copy
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.mutations import HOSTILE, mutated
from support.results import HOSTILE as HOSTILE_NAME

__all__ = ["Kind", "good", "limited", "spoil", "spoil_bytes"]

CPU_SECONDS = 30.0
"""Of one input: good ones take some hundredths."""
MEMORY_BYTES = 4 << 30
"""Of address space on top of what the process has."""

_VALUES = (*HOSTILE, HOSTILE_NAME, "../../escaped", "/etc/passwd", "<script>alert(1)</script>")


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    file: str
    """Where it lies under a folder of its own."""
    make: Callable[[Path], Any]
    """(empty folder) -> a good document, JSON-like or bytes; other files that belong to it are written."""
    encode: Callable[[Any], bytes]
    use: Callable[[Path], Any]
    """(folder) -> result."""


def spoil(kind: Kind, document: Any, seed: int) -> bytes:
    """Spoil a document: by its structure, by its bytes, or both."""
    rng = random.Random(seed)
    how = rng.random()
    if not isinstance(document, bytes) and how < 0.7:
        (document,) = mutated(document, 1, seed, _VALUES)
        try:
            content = kind.encode(document)
        except (ValueError, TypeError, OverflowError, RecursionError):  # what its format cannot hold
            content = kind.encode({})
        return content if how < 0.6 else spoil_bytes(content, rng)
    return spoil_bytes(document if isinstance(document, bytes) else kind.encode(document), rng)


def spoil_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change, cut, drop, insert or repeat some bytes."""
    spoiled = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if not spoiled:
            break
        at, how = rng.randrange(len(spoiled)), rng.randrange(5)
        if how == 0:
            spoiled[at] = rng.randrange(256)
        elif how == 1:
            del spoiled[at:]
        elif how == 2:
            del spoiled[at : at + rng.randrange(1, 40)]
        elif how == 3:
            spoiled[at:at] = rng.choice(
                (b"\x00", b"\xff" * 8, b"9" * 400, b"[" * 3000, b"\x1b]52;c;A\x07", b'"')
            )
        else:
            spoiled[at:at] = spoiled[at : at + rng.randrange(1, 200)]
    return bytes(spoiled)


class TookTooLongError(Exception):
    """An input took more time than any may."""


@contextmanager
def limited() -> Iterator[None]:
    """Bound the processor time and the memory of what runs inside; the machine's load does not count."""

    def stop(*_: Any) -> None:
        raise TookTooLongError

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def good(kind: Kind, folder: Path) -> Any:
    """A good document of a kind; what belongs to it lies in the folder."""
    return copy.deepcopy(kind.make(folder))
