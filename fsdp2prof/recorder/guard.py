"""The guard between a training and the recorder: an error of the recorder costs a recording, never a
training.

Every entry point from the training into the recorder is made here: wrappers of torch's functions
(:meth:`Guard.around`), hooks, threads and ``atexit`` callbacks (:meth:`Guard.hook`), a signal handler
(:meth:`Guard.before_death`). An exception in one part of the recorder, of any class but Ctrl-C's and
``sys.exit``'s, switches that part off and leaves the others on. One line on stderr and a message in the
manifest report it; the traceback is in ``errors.txt`` of the rank's folder. The training's own functions
are called once, and none of their exceptions is caught.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import getargvalues
from io import UnsupportedOperation
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from torch._compile import _disable_dynamo

in_c: Any = import_module("_signal")
"""The handlers themselves; :mod:`signal` makes ``SIG_DFL`` of every ``int`` that equals it."""

Part: TypeAlias = Literal[
    "recording",
    "captures",
    "trace",
    "memory",
    "tags",
    "description",
    "roots",
    "inputs",
    "host",
    "watch",
    "hang",
    "oom",
    "summary",
    "trial",
    "profilers",
    "manifest",
    "ending",
]
"""Parts that fail independently; a failure of ``recording`` stops everything except the end of the rank."""

Enter: TypeAlias = Callable[..., Callable[[bool, Any], object] | None]
"""Called with a call's arguments before it. It returns None, or a function to call after it, with whether the
call returned and its result."""

_NAMES: dict[Part, str] = {
    "recording": "the recording",
    "captures": "trace and memory recording",
    "trace": "the trace",
    "memory": "the memory recording",
    "tags": "tagging allocations",
    "description": "the description of the model",
    "roots": "counting forwards and backwards",
    "inputs": "comparing what ranks read",
    "host": "reading the host's load",
    "watch": "--watch",
    "hang": "--hang-after",
    "oom": "the snapshot of an out-of-memory error",
    "summary": "--summary",
    "trial": "the trial of settings",
    "profilers": "watching the training's own profilers",
    "manifest": "writing the manifest",
    "ending": "watching for the end of the rank",
}
_LASTING: frozenset[Part] = frozenset({"manifest", "ending"})
"""Tried again after a failure: the disk may have room by then, and a rank ends once."""
_OF_THE_TRAINING = (KeyboardInterrupt, SystemExit)
"""Nothing of ours raises them: they come from a signal."""


class Guard:
    """Runs the recorder's code for the training, and knows which parts of it are off."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset: no part is off and no failure is remembered."""
        self._pid = os.getpid()
        self._failed: dict[Part, str] = {}
        self._undo: dict[Part, Callable[[], object]] = {}
        self._keep: Callable[[str], None] | None = None
        self._file: Path | None = None
        self._step: Callable[[], int] = lambda: -1
        self._local = threading.local()
        self._early: list[str] = []
        self._is_removed = False

    def start(self, file: Path, keep: Callable[[str], None], step: Callable[[], int]) -> None:
        """Report failures from now on: ``keep`` receives the message, ``file`` the traceback.

        ``step`` returns the running training step.
        """
        if self._keep is not None:  # a further session of this process
            self._failed.clear()
        self._pid = os.getpid()
        self._undo.clear()
        self._file, self._keep, self._step = file, keep, step
        for message in self._failed.values():
            keep(message)
        for text in self._early:
            self._try(_append, file, text)

    def when_off(self, part: Part, undo: Callable[[], object]) -> None:
        """Call ``undo`` when ``part`` fails: it removes the part's changes to the training."""
        self._undo[part] = undo

    def is_off(self, part: Part) -> bool:
        """Whether a part has failed, or the whole recording."""
        if part in _LASTING:
            return False
        return part in self._failed or "recording" in self._failed

    def run(self, part: Part, action: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Return what ``action`` returns; None if it raises, and from then on without calling it.

        A signal that :meth:`when_idle` serves waits until the outermost run of its thread is over.
        """
        return None if self.is_off(part) else self.clean(part, action, *arguments, **named)

    def run_in_dynamo(self, part: Part, action: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """As :meth:`run`, where dynamo cannot be disabled: in its own code, or half imported."""
        return None if self.is_off(part) else self._clean(part, action, *arguments, **named)

    @_disable_dynamo
    def clean(self, part: Part, action: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Like :meth:`run`, but also if the part is off: for removing it from the training."""
        return self._clean(part, action, *arguments, **named)

    def _clean(self, part: Part, action: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        local = self._local
        local.depth = getattr(local, "depth", 0) + 1
        try:
            return action(*arguments, **named)
        except _OF_THE_TRAINING:
            raise
        except BaseException as error:
            if any(_is_of_a_handler(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
                raise
            self.fail(part, error)
            return None
        finally:
            local.depth -= 1
            if not local.depth:
                self._serve()

    def hook(self, part: Part, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``action`` as a hook that the training may call: it never raises."""

        @_disable_dynamo
        def guarded(*arguments: Any, **named: Any) -> Any:
            return self.run(part, action, *arguments, **named)

        return guarded

    def thread(self, part: Part, action: Callable[..., object], *arguments: Any) -> None:
        """Run ``action`` on a thread that ends with the process, and that the training does not list.

        It takes none of the process's signals: the training may block them in order to wait for them.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self.hook(part, action), arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def around(
        self,
        part: Part,
        original: Callable[..., Any],
        enter: Enter,
        *,
        at: tuple[object, str] | None = None,
        in_dynamo: bool = False,
    ) -> Callable[..., Any]:
        """Return ``original``, a function of torch or of the training, with ``enter`` around each call.

        With ``at``, an owner and an attribute, the training's current replacement is called instead.
        Functions that dynamo calls to disable itself are ``in_dynamo``.
        """
        run = self.run_in_dynamo if in_dynamo else self.run

        @wraps(original)
        def guarded(*arguments: Any, **named: Any) -> Any:
            leave = run(part, enter, *arguments, **named)
            call = original if at is None else getattr(*at)
            if leave is None:
                return call(*arguments, **named)
            returned, result = False, None
            try:
                result = call(*arguments, **named)
                returned = True
            finally:
                run(part, leave, returned, result)
            return result

        return guarded

    def around_made(
        self,
        part: Part,
        make: Callable[..., Any],
        enter: Enter,
    ) -> Callable[..., Any]:
        """Return ``make`` such that ``enter`` is around the functions that it returns."""

        @wraps(make)
        def guarded(*arguments: Any, **named: Any) -> Any:
            return self.around(part, make(*arguments, **named), enter)

        return guarded

    def before_death(
        self, number: signal.Signals, action: Callable[[], object], told: threading.Event
    ) -> Callable[..., None]:
        """Run ``action`` once before a signal ends the process, when nothing of ours runs; then die of it.

        Only for a signal without a handler; :mod:`signal` still shows ``SIG_DFL``. ``told`` is set when
        the signal arrives. Returns the handler. Raises ``ValueError`` outside the main thread.
        """
        served = False

        def die() -> None:
            self.run("ending", action)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        def handle() -> None:
            nonlocal served
            told.set()
            if not served:
                served = True
                self.when_idle(die)

        handler = _ShownAsDefault(signal.SIG_DFL)
        handler.action = handle
        in_c.signal(int(number), handler)
        if signal.getsignal(number) is not signal.SIG_DFL:  # another Python
            signal.signal(number, signal.SIG_DFL)
        return handler

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or after the recorder's current call on this thread, so that files are
        written completely."""
        if getattr(self._local, "depth", 0):
            self._local.postponed = action
        else:
            action()

    def fail(self, part: Part, error: BaseException) -> None:
        """Switch a part off and say so."""
        try:
            first = part not in self._failed
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            step = self._step()
            at = f"at step {step}" if step >= 0 else "before the first step"
            message = f"{_NAMES[part]} failed {at}: {reason}"
            self._failed.setdefault(part, message)
            undo = self._undo.pop(part, None)
            if os.getpid() != self._pid:  # a forked child's device and profiler are the parent's
                return
            if undo is not None:
                self._try(undo)
            if first:
                self._try(self._tell, part, message, error)
        except _OF_THE_TRAINING:
            raise
        except BaseException:  # of a str() of the error's: the part is off all the same
            self._failed.setdefault(part, f"{_NAMES[part]} failed")

    def _tell(self, part: Part, message: str, error: BaseException) -> None:
        rank = os.environ.get("RANK", "0")
        if isinstance(error, OSError) and self._file is not None and not self._file.parents[1].is_dir():
            if not self._is_removed:
                self._is_removed = True
                line = "the run directory was removed: recording stops, the training continues"
                self.say(f"rank {rank}: {line}")
            return
        self.say(f"rank {rank}: {message}; it is switched off, the training continues")
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = f"{message}\n{trace}\n"
        if self._keep is not None and self._file is not None:
            self._try(self._keep, message)
            self._try(_append, self._file, text)
            return
        self._early.append(text)
        if part == "recording":
            self._try(_leave_without_session, message, text)

    @staticmethod
    def say(line: str) -> None:
        """Write a line to the training's stderr, if it accepts one.

        Not with ``print``: it writes to stdout if stderr is closed, and text that a full stderr does not
        accept stays in a buffer that fails again at the end of the interpreter.
        """
        text = f"fsdp2prof: {line}\n"
        with suppress(Exception):
            try:
                os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))
            except UnsupportedOperation:  # not a file: a notebook's, a test's
                sys.stderr.write(text)

    @staticmethod
    def _try(action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except _OF_THE_TRAINING:
            raise
        except BaseException:  # nothing is left to tell it to
            return

    def _serve(self) -> None:
        postponed = getattr(self._local, "postponed", None)
        if postponed is not None:
            self._local.postponed = None
            postponed()


guard = Guard()
"""Of this process."""


class _ShownAsDefault(int):
    """A signal handler that :mod:`signal` shows as the ``SIG_DFL`` that it equals."""

    action: Callable[[], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.action()


def _is_of_a_handler(frame: FrameType) -> bool:
    """Whether a frame is a signal handler's: its caller is the frame that it was given, after the number.

    Exceptions that it raises while the recorder runs belong to the training: a timeout, for example.
    """
    arguments, interrupted = getargvalues(frame), frame.f_back
    given = [arguments.locals.get(name) for name in arguments.args]
    given += arguments.locals.get(arguments.varargs or "", ())
    pairs = pairwise(given) if interrupted is not None else ()
    return any(type(number) is int and second is interrupted for number, second in pairs)


def _append(file: Path, text: str) -> None:
    with file.open("a", errors="backslashreplace") as opened:
        opened.write(text)


def _leave_without_session(message: str, text: str) -> None:
    """Write a manifest with the reason, if no session was created."""
    from fsdp2prof.manifest import MANIFEST_SCHEMA
    from fsdp2prof.run_directory import ERRORS_FILE, MANIFEST_FILE, rank_folder

    run = json.loads(os.environ["FSDP2PROF_RECORD"])["run"]
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(run, rank_folder(rank))
    folder.mkdir(parents=True, exist_ok=True)
    _append(folder / ERRORS_FILE, text)
    if not (folder / MANIFEST_FILE).exists():
        said = {"schema": MANIFEST_SCHEMA, "state": "partial", "rank": rank, "pid": os.getpid()}
        said["messages"] = [message]
        said["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
        (folder / MANIFEST_FILE).write_text(json.dumps(said))
