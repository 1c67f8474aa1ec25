"""Runs the training command under the recorder and says how it ended.

The command keeps its stdin, stdout, stderr, working directory and process group. The launcher only adds to
its environment, hands on the signals it gets, and waits.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from fsdp2prof.errors import InputError, RunDirectoryError
from fsdp2prof.manifest import RUN_FILE, RankManifest, RecordOptions, RunInfo, State
from fsdp2prof.readers.run_directory import RunDirectory, is_run_directory, open_run
from fsdp2prof.recorder.files import temporaries, write_json
from fsdp2prof.recorder.processes import RankProcesses, end_orphans
from fsdp2prof.recorder.settings import ALIVE_VARIABLE, VARIABLE, Settings, validate
from fsdp2prof.recorder.variables import relevant_environment

__all__ = ["Outcome", "launch", "now", "prepare_run"]

BOOTSTRAP = str(Path(__file__).resolve().parent / "bootstrap")
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
_NO_RECORDER = "python -I or -E, a sitecustomize earlier on PYTHONPATH, or a command that resets PYTHONPATH"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the command ended."""

    exit_code: int
    """Its own, or 128 + n if signal n ended it."""
    info: RunInfo


def prepare_run(path: Path, options: RecordOptions, command: list[str], *, force: bool) -> RunInfo:
    """Make the run directory and write its ``run.json``. Raises ``RunDirectoryError`` if there is one.

    With ``force`` an old recording is removed, and only what a recorder wrote: any other folder is refused.
    """
    validate(options)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not force:
            raise RunDirectoryError(
                f"{path}: exists already; choose another, or record it anew with -f (force=True)"
            )
        if not is_run_directory(path):
            raise RunDirectoryError(f"{path}: exists and is not a run directory; -f does not remove it")
        (path / RUN_FILE).unlink(missing_ok=True)
        for folder in path.glob("rank-[0-9]*/"):
            shutil.rmtree(folder)
    info = RunInfo(
        command=command,
        started_at=now(),
        versions={
            "python": platform.python_version(),
            "torch": version("torch"),
            "fsdp2prof": version("fsdp2prof"),
        },
        environment=relevant_environment(),
        options=options,
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / RUN_FILE, info)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror})") from error
    return info


def launch(command: list[str], path: Path, options: RecordOptions, *, force: bool = False) -> Outcome:
    """Record ``command`` into ``path`` and wait for it.

    Raises ``RunDirectoryError`` if the directory is there, ``InputError`` if the command cannot start.
    """
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: command not found; put the training command after --")
    info = prepare_run(path, options, command, force=force)
    settings = Settings(run=str(path.resolve()), options=options).encode()
    alive = path.resolve() / ".alive"
    alive.mkdir(exist_ok=True)
    processes = RankProcesses(settings)
    try:
        status, interrupted = _run(command, _child_environment(settings, alive), processes)
        _mark_dead_ranks(path, end_orphans(_manifests(path), settings))
        pids = {int(file.name) for file in alive.iterdir()}
    finally:
        shutil.rmtree(alive)
    code = 128 - status if status < 0 else status
    run = open_run(path)
    info.exit_code = code
    info.finished_at = now()
    manifests = [record.manifest for record in run.ranks if record.manifest is not None]
    info.hosts = sorted({manifest.host for manifest in manifests})
    info.world_size = max((manifest.world_size for manifest in manifests), default=None)
    info.state = _state(code, manifests, info.world_size, interrupted)
    info.messages = _messages(run, info, processes, pids)
    write_json(path / RUN_FILE, info)
    return Outcome(code, info)


def _child_environment(settings: str, alive: Path) -> dict[str, str]:
    python_path = os.environ.get("PYTHONPATH")
    entries = [BOOTSTRAP, python_path] if python_path else [BOOTSTRAP]
    added = {"PYTHONPATH": os.pathsep.join(entries), VARIABLE: settings, ALIVE_VARIABLE: str(alive)}
    return {**os.environ, **added}


def _run(command: list[str], environment: dict[str, str], processes: RankProcesses) -> tuple[int, bool]:
    """Start the command and hand on signals until it ends; returns its status and whether any came."""
    watched = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    interrupted = False
    try:
        pid = os.posix_spawnp(
            command[0], command, environment, setsigmask=mask, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )
        while True:
            received = signal.sigtimedwait(watched, processes.look())
            if received is not None and received.si_signo in _FORWARDED:
                interrupted = True
                if received.si_code != _FROM_KERNEL:
                    os.kill(pid, received.si_signo)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), interrupted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _manifests(path: Path) -> list[RankManifest]:
    return [record.manifest for record in open_run(path).ranks if record.manifest is not None]


def _mark_dead_ranks(path: Path, killed: list[int]) -> None:
    """Say of ranks that died unheard (SIGKILL, ``os._exit``, a fault in C++) that they crashed."""
    for record in open_run(path).ranks:
        for leftover in temporaries(record.path):
            leftover.unlink()
        manifest = record.manifest
        if manifest is None or manifest.state != "running":
            continue
        manifest.state = "crashed"
        manifest.error = (
            "killed: it outlived the command" if record.rank in killed else "ended without a word"
        )
        manifest.messages.append("what was being captured then is lost")
        write_json(record.path / "manifest.json", manifest)


def _state(code: int, manifests: list[RankManifest], world_size: int | None, interrupted: bool) -> State:
    complete = len(manifests) == world_size and all(manifest.state == "complete" for manifest in manifests)
    if code and not interrupted:
        return "crashed"
    return "complete" if complete else "partial"


def _messages(run: RunDirectory, info: RunInfo, processes: RankProcesses, alive: set[int]) -> list[str]:
    messages = []
    if info.exit_code:
        messages.append(f"the command ended with exit code {info.exit_code}")
    present = {record.rank for record in run.ranks if record.manifest is not None}
    silent = [process for process in processes.silent(alive) if process.rank not in present]
    messages += [f"rank {one.rank}: no sign of life: {one.why_silent(BOOTSTRAP)}" for one in silent]
    if not present and not silent:
        if alive:
            messages.append("no process ever called fully_shard: nothing was recorded")
        else:
            messages.append(
                f"no process showed a sign of life; what can keep the recorder out: {_NO_RECORDER}"
            )
    missing = set(range(info.world_size or 0)) - present - {process.rank for process in silent}
    if missing:
        messages.append(
            f"{_ranks(missing)}: no sign of life, or fully_shard never called; "
            f"what can keep the recorder out: {_NO_RECORDER}"
        )
    texts: dict[str, set[int]] = defaultdict(set)
    for record in run.ranks:
        for text in record.messages:
            texts[text].add(record.rank)
    return messages + [f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def now() -> str:
    """Return the time as ISO 8601 with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
