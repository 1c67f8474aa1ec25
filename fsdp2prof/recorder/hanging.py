"""A job that stands still: what each rank was doing, kept before somebody ends it.

Every rank watches its own steps. In a hang no rank's step ends, so all of them leave their part at about the
same moment: the last collectives that torch kept (the Flight Recorder) and the Python stacks of all threads.
A main thread that hangs in C++ and keeps the interpreter to itself is not heard.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp2prof.files import replacing
from fsdp2prof.manifest import FLIGHT_RECORDER_FILE, STACKS_FILE

__all__ = ["HangWatch", "buffer_variables", "keep_state"]

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Entries of the Flight Recorder's buffer, as newer and older torch call them."""
_KEPT = "2000"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of NCCL's collectives, and of other backends'."""


def buffer_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return what switches the Flight Recorder on, nothing where the user has said how much it keeps."""
    return {} if any(name in environment for name in _SIZES) else dict.fromkeys(_SIZES, _KEPT)


def keep_state(folder: Path) -> list[str]:
    """Write the Flight Recorder's dump and all threads' stacks into a rank's folder; return the files' names.

    Raises ``OSError`` where they cannot be written.
    """
    kept = []
    dump = _dump()
    if dump is not None:
        with replacing(folder / FLIGHT_RECORDER_FILE) as temporary:
            temporary.write_bytes(dump)
        kept.append(FLIGHT_RECORDER_FILE)
    with (folder / STACKS_FILE).open("w") as file:
        faulthandler.dump_traceback(file)
    return [*kept, STACKS_FILE]


def _dump() -> bytes | None:
    """The collectives that torch kept, as JSON; None where it has none or keeps none."""
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
    """Calls ``hung`` once for every stretch of ``after_s`` seconds in which no step ends.

    It begins with the first :meth:`step`: what comes before takes as long as it takes.
    """

    def __init__(self, after_s: int, hung: Callable[[float], None]) -> None:
        self._after_s = after_s
        self._hung = hung
        self._last = time.monotonic()
        self._told = True
        self._over = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """A step begins."""
        self._last, self._told = time.monotonic(), False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fsdp2prof-hang", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self._after_s / 4)):
            waited = time.monotonic() - self._last
            if waited >= self._after_s and not self._told:
                self._told = True
                self._hung(waited)
