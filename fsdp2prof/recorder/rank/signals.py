"""Signals, heard where the training sees nothing of it.

``faulthandler`` has a handler in C, which writes the stack to a pipe of ours and then calls the handler that
was there before it, also while the main thread hangs in C++. Neither ``signal.getsignal`` nor
``signal.set_wakeup_fd`` shows it, and a handler that the training installs takes its place.
"""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from fsdp2prof.recorder.guard import guard, in_c

_STACK_S = 0.01
"""Seconds in which a stack is written."""
_STACK_BYTES = 1 << 16
_END_S = 0.5
"""Seconds that a thread with nothing to do has to end, on a busy host."""


class HeardSignal:
    """Calls ``action`` on a thread when a signal arrives; what else the signal does, but to kill, stays.

    Raises ``ValueError`` where a handler of other C code stands, the training's own ``faulthandler`` for one.
    """

    def __init__(self, number: signal.Signals, action: Callable[[], object]) -> None:
        self._number, self._action = int(number), action
        is_handled = callable(in_c.getsignal(number))
        if not is_handled and not (kills(number) or address(number) == signal.SIG_IGN):
            raise ValueError(f"{number.name} is handled by other C code")
        self._reader, self._writer = os.pipe()
        self._pipe = os.fstat(self._writer).st_ino
        os.set_blocking(self._writer, False)
        faulthandler.register(self._number, self._writer, all_threads=False, chain=is_handled)
        self._ours = address(self._number)
        os.register_at_fork(after_in_child=guard.hook("ending", self.close))
        self._listens = _thread.allocate_lock()
        self._listens.acquire()
        guard.thread("ending", self._listen)

    def close(self) -> None:
        """Hear it no longer; a handler or a pipe that is not ours any more stays."""
        if address(self._number) == self._ours:
            faulthandler.unregister(self._number)
        for descriptor in (self._reader, self._writer):
            with suppress(OSError):
                if self._is_ours(descriptor):
                    os.close(descriptor)

    def wait(self) -> None:
        """Give the thread of a closed one time to end before Python, which stops those that still run."""
        self._listens.acquire(timeout=_END_S)

    def _listen(self) -> None:
        try:
            while self._came():
                self._action()
        finally:
            self.close()
            self._listens.release()

    def _came(self) -> bool:
        """Wait for the signal; ``False`` where the training closed a descriptor that it does not know."""
        with suppress(OSError):
            if self._is_ours(self._reader) and os.read(self._reader, 1):
                time.sleep(_STACK_S)
                os.read(self._reader, _STACK_BYTES)
                return True
        return False

    def _is_ours(self, descriptor: int) -> bool:
        return os.fstat(descriptor).st_ino == self._pipe


def kills(number: int) -> bool:
    """Whether a signal has no handler, in Python or C, and ends the process."""
    return signal.getsignal(number) == signal.SIG_DFL and address(number) == signal.SIG_DFL


def address(number: int) -> int:
    """Address of the handler that the process has for a signal; 0 is the default, 1 ignores it."""
    found = (ctypes.c_void_p * 64)()  # more than a struct sigaction, whose first member it is
    ctypes.CDLL(None).sigaction(number, None, found)
    return found[0] or 0
