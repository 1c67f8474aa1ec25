"""Runs the training command under the recorder and says how it ended.

The command keeps its stdin, stdout, stderr, working directory and process group. The launcher only adds to
its environment, hands on the signals it gets, and waits.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fsdp2prof.errors import InputError, RunDirectoryError
from fsdp2prof.files import remove_scratch, temporaries, write_json
from fsdp2prof.manifest import RankManifest, RecordOptions, Rehearsal, RunInfo, State
from fsdp2prof.recorder.hanging import buffer_variables
from fsdp2prof.recorder.launch.host_processes import HangReport, RankProcesses, end_orphans
from fsdp2prof.recorder.launch.summaries import Summaries
from fsdp2prof.recorder.requests import request_recording, summaries_folder
from fsdp2prof.recorder.run_folder import is_alone, now, prepare_run, records_of_node
from fsdp2prof.recorder.settings import ALIVE_VARIABLE, VARIABLE, Settings
from fsdp2prof.run_directory import FLIGHT_RECORDER_FOLDER, MANIFEST_FILE, STACKS_FILE, RankRecord, node_file

BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "bootstrap")
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
_NO_RECORDER = "python -I, -E or -S, a sitecustomize earlier on PYTHONPATH, or a reset PYTHONPATH"


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
    exists, ``InputError`` if the command cannot start.
    """
    if shutil.which(command[0]) is None:
        raise InputError(_why_not_found(command))
    info = prepare_run(path, options, command, node_rank=node_rank, force=force, rehearsal=rehearsal)
    settings = Settings(
        run=str(path.resolve()), options=options, node_rank=node_rank, rehearsal=rehearsal
    ).encode()
    alive = path.resolve() / f".alive-{node_rank:05d}"
    alive.mkdir(exist_ok=True)
    processes = RankProcesses(settings)
    summaries = Summaries(path, node_rank) if options.summary else None
    try:
        environment = _child_environment(settings, alive, path) | _rendezvous(rehearsal)
        with _hangs(path, options, node_rank, told):
            status, interrupted = _run(command, environment, processes, _Trigger(options, path), summaries)
    except InputError:
        (path / node_file(node_rank)).unlink()
        raise
    else:
        ended = _Ended(128 - status if status < 0 else status, interrupted, settings, processes)
        unsummarised = [] if summaries is None else summaries.finish(wait=not status and not interrupted)
        try:
            _sum_up(info, path, node_rank, alive, ended, unsummarised)
        except (OSError, RunDirectoryError) as error:  # its own exit code, whatever became of the folder
            info.state = "crashed" if ended.code else "partial"
            info.messages = [f"what was recorded may be lost: {_why_lost(path, error)}"]
    finally:
        for folder in (alive, summaries_folder(path, node_rank)):
            shutil.rmtree(folder, ignore_errors=True)
        _remove_if_empty(path / FLIGHT_RECORDER_FOLDER)
    return Outcome(ended.code, info)


def _why_lost(path: Path, error: OSError | RunDirectoryError) -> str:
    if not path.exists():
        return f"{path}: the run directory was removed"
    if isinstance(error, OSError):
        return f"{path}: the run directory cannot be read or written any more ({error.strerror})"
    return str(error)


@dataclass(frozen=True, slots=True)
class _Ended:
    """Outcome of the command, and observations while it ran."""

    code: int
    interrupted: bool
    settings: str
    processes: RankProcesses


def _sum_up(
    info: RunInfo, path: Path, node_rank: int, alive: Path, ended: _Ended, unsummarised: list[str]
) -> None:
    """Write how this node's part of the run ended. Raises ``OSError`` or ``RunDirectoryError``."""
    info.exit_code = ended.code
    info.finished_at = now()
    killed = end_orphans(_manifests(records_of_node(path, node_rank)), ended.settings)
    _mark_dead_ranks(records_of_node(path, node_rank), killed, ended.code)
    alive_pids = {int(file.name) for file in alive.iterdir()}
    notes = {line for file in alive.iterdir() for line in file.read_text("utf-8").splitlines()}
    failures = {note for note in notes if note.startswith("!")}
    wrappers = notes - failures
    records = records_of_node(path, node_rank)
    manifests = _manifests(records)
    info.hosts = sorted({manifest.host for manifest in manifests}) or info.hosts
    info.world_size = max((manifest.world_size for manifest in manifests), default=None)
    rehearsal = info.rehearsal
    seen = {process.rank for process in ended.processes.seen.values()}
    expected = set(range(info.world_size or 0)) if is_alone(path, node_rank) else seen
    if rehearsal is not None:
        expected = {rehearsal.rank}
    info.state = _state(ended.code, manifests, expected, ended.interrupted)
    info.wrappers = sorted(wrappers)
    info.messages = _messages(records, ended.code, expected, ended.processes, alive_pids, wrappers, failures)
    info.messages += unsummarised
    write_json(path / node_file(node_rank), info)


def _why_not_found(command: list[str]) -> str:
    name = command[0]
    if name.endswith(".py") or Path(name).is_file():
        line = shlex.join(command)
        return f"{name}: a script needs its interpreter: record -- python {line}, or torchrun ... {line}"
    return f"{name}: command not found"


@contextmanager
def _hangs(
    path: Path, options: RecordOptions, node_rank: int, told: Callable[[str], None] | None
) -> Iterator[None]:
    """Report hangs while the block runs, where the ranks watch for them."""
    if options.hang_after is None:
        yield
        return
    report = HangReport(path, node_rank, told or (lambda _: None))
    try:
        yield
    finally:
        report.close()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not there, or something in it
        folder.rmdir()


def _child_environment(settings: str, alive: Path, run: Path) -> dict[str, str]:
    python_path = os.environ.get("PYTHONPATH")
    entries = [BOOTSTRAP, python_path] if python_path else [BOOTSTRAP]
    added = {"PYTHONPATH": os.pathsep.join(entries), VARIABLE: settings, ALIVE_VARIABLE: str(alive)}
    return {**os.environ, **buffer_variables(os.environ, run, version("torch")), **added}


def _rendezvous(rehearsal: Rehearsal | None) -> dict[str, str]:
    """Environment that torchrun would give the rank; its device is the first of this machine, and it has
    no peers."""
    if rehearsal is None:
        return {}
    node = rehearsal.rank // rehearsal.local_world_size
    sizes = {"WORLD_SIZE": rehearsal.world_size, "LOCAL_WORLD_SIZE": rehearsal.local_world_size}
    ranks = {"RANK": rehearsal.rank, "LOCAL_RANK": 0, "GROUP_RANK": node}
    numbers = {name: str(number) for name, number in (sizes | ranks).items()}
    return {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@dataclass(frozen=True, slots=True)
class _Trigger:
    """The signal that asks for a recording, which the command does not get."""

    options: RecordOptions
    run: Path

    def takes(self, number: int) -> bool:
        """Request a recording from the ranks if the signal is the configured one."""
        if self.options.signal is None or number != signal.Signals[f"SIG{self.options.signal}"]:
            return False
        with suppress(OSError):  # no folder to record into any more: the command goes on
            request_recording(self.run, f"signal {self.options.signal}")
        return True


def _run(
    command: list[str],
    environment: dict[str, str],
    processes: RankProcesses,
    trigger: _Trigger,
    summaries: Summaries | None,
) -> tuple[int, bool]:
    """Start the command and hand on signals until it ends; returns its status and whether any came."""
    watched = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    interrupted = False
    try:
        try:
            pid = os.posix_spawnp(
                command[0], command, environment, setsigmask=mask, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
            )
        except OSError as error:
            raise InputError(
                f"{command[0]}: cannot be started ({error.strerror}); a script needs its interpreter "
                "before it, or a first line that names it"
            ) from error
        while True:
            patience = processes.look()
            if summaries is not None:
                patience = min(patience, summaries.look())
            received = signal.sigtimedwait(watched, patience)
            if received is not None and trigger.takes(received.si_signo):
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


def _manifests(records: list[RankRecord]) -> list[RankManifest]:
    return [record.manifest for record in records if record.manifest is not None]


def _mark_dead_ranks(records: list[RankRecord], killed: list[int], code: int) -> None:
    """Say of ranks that died unheard (SIGKILL, ``os._exit``, a fault in C++) that they crashed.

    Where the command ended well, so did they.
    """
    for record in records:
        for leftover in temporaries(record.path):
            leftover.unlink()
        manifest = record.manifest
        if manifest is None or manifest.state != "running":
            continue
        remove_scratch(manifest.pid)
        manifest.state = "crashed"
        if record.rank in killed:
            manifest.error = "killed: it ran on after the command ended"
        elif code:
            manifest.error = "ended without a message"
        else:
            manifest.state = "partial"
            manifest.messages.append("it ended by os._exit, or could not write its manifest")
        manifest.messages.append("the capture in progress is lost")
        write_json(record.path / MANIFEST_FILE, manifest)


def _state(code: int, manifests: list[RankManifest], expected: set[int], interrupted: bool) -> State:
    present = {manifest.rank for manifest in manifests}
    complete = present and expected <= present and all(one.state == "complete" for one in manifests)
    if code and not interrupted:
        return "crashed"
    return "complete" if complete else "partial"


def _messages(
    records: list[RankRecord],
    code: int,
    expected: set[int],
    processes: RankProcesses,
    alive: set[int],
    wrappers: set[str],
    failures: set[str],
) -> list[str]:
    messages = [
        f"not recorded: {failure[1:]}; install fsdp2prof in the environment that trains"
        for failure in sorted(failures)
    ]
    if code:
        messages.append(f"the command ended with exit code {code}")
        if any((record.path / STACKS_FILE).is_file() for record in records):
            run = records[0].path.parent
            messages.append(f"last calls of its ranks were saved; see `fsdp2prof analyze hang {run}`")
    present = {record.rank for record in records if record.manifest is not None}
    silent = [process for process in processes.silent(alive) if process.rank not in present]
    messages += [
        f"rank {one.rank}: the recorder did not start: {one.why_silent(BOOTSTRAP)}" for one in silent
    ]
    if not present and not silent:
        if wrappers:
            names = " and ".join(sorted(wrappers))
            messages.append(f"this training uses {names}, not fully_shard: nothing was recorded")
        elif alive and not failures:
            messages.append("no process ever called fully_shard: nothing was recorded")
        elif not alive:
            messages.append(f"the recorder started in no process; possible causes: {_NO_RECORDER}")
    missing = expected - present - {process.rank for process in silent}
    if missing and present:
        messages.append(
            f"{_ranks(missing)}: the recorder did not start, or fully_shard was never called; "
            f"possible causes: {_NO_RECORDER}; "
            "record ranks of other nodes there, with --node-rank"
        )
    texts: dict[str, set[int]] = defaultdict(set)
    for record in records:
        for text in record.messages:
            texts[text].add(record.rank)
    return messages + [f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
