"""Runs the training command under the recorder and says how it ended.

The command keeps its stdin, stdout, stderr, working directory and process group. The launcher only adds to
its environment, hands on the signals it gets, and waits.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.errors import InputError
from fsdp2prof.manifest import RecordOptions, Rehearsal, RunInfo
from fsdp2prof.recorder.launch.recording import NodeRecording

_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_FROM_KERNEL = 0x80
"""``si_code`` of a signal that a terminal sent: to the whole process group, so the command has it already."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the command ended."""

    exit_code: int
    """Its own, or 128 + n if signal n ended it."""
    info: RunInfo


def launch(
    command: list[str],
    path: Path,
    options: RecordOptions,
    *,
    node_rank: int = 0,
    force: bool = False,
    rehearsal: Rehearsal | None = None,
    told: Callable[[str], None] | None = None,
) -> Outcome:
    """Record ``command`` into ``path`` and wait for it; other nodes may record into the same directory.

    With ``rehearsal`` the command is one process, which acts as one rank of a larger world. ``told``
    receives messages for the user while the command runs. Raises ``RunDirectoryError`` if the directory
    exists, ``InputError`` if the command cannot start. Any other failure costs the recording: the command
    runs and its exit code is returned.
    """
    if shutil.which(command[0]) is None:
        raise InputError(_why_not_found(command))
    recording = NodeRecording(path, options, node_rank, rehearsal)
    recording.prepare(command, force=force, told=told or (lambda _: None))
    try:
        status, interrupted = _run(command, recording)
    except InputError:
        recording.remove()
        raise
    code = 128 - status if status < 0 else status
    return Outcome(code, recording.finish(code, interrupted=interrupted))


def _why_not_found(command: list[str]) -> str:
    name = command[0]
    if name.endswith(".py") or Path(name).is_file():
        line = shlex.join(command)
        return f"{name}: a script needs its interpreter: record -- python {line}, or torchrun ... {line}"
    return f"{name}: command not found"


def _run(command: list[str], recording: NodeRecording) -> tuple[int, bool]:
    """Start the command and hand on signals until it ends; returns its status and whether any came."""
    watched = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    interrupted = False
    try:
        try:
            pid = os.posix_spawnp(
                command[0],
                command,
                recording.environment,
                setsigmask=mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            raise InputError(
                f"{command[0]}: cannot be started ({error.strerror}); a script needs its interpreter "
                "before it, or a first line that names it"
            ) from error
        while True:
            received = signal.sigtimedwait(watched, recording.look())
            if received is not None and received.si_signo == recording.trigger:
                recording.request()
                continue
            if received is not None and received.si_signo in _FORWARDED:
                interrupted = True
                if received.si_code != _FROM_KERNEL:
                    os.kill(pid, received.si_signo)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), interrupted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
