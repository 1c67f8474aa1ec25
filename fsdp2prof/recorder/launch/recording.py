"""What the launcher does for one node's part of a run, before, while and after the command runs.

It prepares the run directory and the command's environment, finds ranks whose recorder did not start, has
recordings summarized, reports hangs, and says how each rank ended. A failure in it costs the recording.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fsdp2prof.errors import Fsdp2ProfError, RunDirectoryError
from fsdp2prof.files import remove_scratch, temporaries, write_json
from fsdp2prof.manifest import RankManifest, RecordOptions, Rehearsal, RunInfo, State
from fsdp2prof.recorder.launch.host_processes import HangReport, RankProcesses, end_orphans
from fsdp2prof.recorder.launch.summaries import Summaries
from fsdp2prof.recorder.requests import request_recording, summaries_folder
from fsdp2prof.recorder.run_folder import is_alone, now, prepare_run, records_of_node
from fsdp2prof.recorder.settings import ALIVE_VARIABLE, VARIABLE, Settings
from fsdp2prof.run_directory import (
    ERRORS_FILE,
    FLIGHT_RECORDER_FOLDER,
    MANIFEST_FILE,
    STACKS_FILE,
    RankRecord,
    node_file,
)

BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "bootstrap")
_NO_RECORDER = "python -I, -E or -S, a sitecustomize earlier on PYTHONPATH, or a reset PYTHONPATH"
_LOOK_S = 2.0

Value = TypeVar("Value")


class NodeRecording:
    """One node's part of a run, for the launcher. Only :meth:`prepare` raises."""

    def __init__(
        self, path: Path, options: RecordOptions, node_rank: int, rehearsal: Rehearsal | None
    ) -> None:
        self.environment = dict(os.environ)
        """Of the command."""
        self.trigger = None if options.signal is None else signal.Signals[f"SIG{options.signal}"]
        """The signal that asks for a recording, which the command does not get."""
        self._path, self._options, self._node_rank = path, options, node_rank
        self._info = RunInfo(rehearsal=rehearsal)
        self._alive = path.resolve() / f".alive-{node_rank:05d}"
        self._processes: RankProcesses | None = None
        self._summaries: Summaries | None = None
        self._hangs: HangReport | None = None
        self._failed: dict[str, str] = {}

    def prepare(self, command: list[str], *, force: bool, told: Callable[[str], None]) -> None:
        """Make the run directory and the command's environment, and look for hangs from now on.

        Raises ``RunDirectoryError`` if the directory exists or cannot be written.
        """
        try:
            self._prepare(command, force, told)
        except Exception as error:
            if isinstance(error, Fsdp2ProfError):
                raise
            if self._info.rehearsal is not None:  # nothing to run without it
                raise RunDirectoryError(f"{self._path}: {type(error).__name__}: {error}") from error
            self._processes = None
            self._fail("preparing the recording", error)

    def _prepare(self, command: list[str], force: bool, told: Callable[[str], None]) -> None:
        path, options, node_rank, rehearsal = self._path, self._options, self._node_rank, self._info.rehearsal
        self._info = prepare_run(
            path, options, command, node_rank=node_rank, force=force, rehearsal=rehearsal
        )
        self._settings = Settings(
            run=str(path.resolve()), options=options, node_rank=node_rank, rehearsal=rehearsal
        ).encode()
        self._alive.mkdir(exist_ok=True)
        if options.summary:
            self._summaries = Summaries(path, node_rank)
        environment = _child_environment(self._settings, self._alive, path) | _rendezvous(rehearsal)
        self._processes = RankProcesses(self._settings)
        if options.hang_after is not None:
            self._hangs = HangReport(path, node_rank, told)
        self.environment = environment

    def look(self) -> float:
        """Look for ranks and for work; return the seconds until the next look."""
        waits = [
            self._try(what, watched.look)
            for what, watched in (("looking for ranks", self._processes), ("summaries", self._summaries))
            if watched is not None
        ]
        return min((seconds for seconds in waits if seconds is not None), default=_LOOK_S)

    def request(self) -> None:
        """Ask the ranks for a recording."""
        self._try("asking for a recording", request_recording, self._path, f"signal {self._options.signal}")

    def remove(self) -> None:
        """Undo :meth:`prepare`: the command could not start."""
        self._stop_looking()
        self._try("removing the recording", (self._path / node_file(self._node_rank)).unlink)
        self._tidy()

    def finish(self, code: int, *, interrupted: bool) -> RunInfo:
        """Say how this node's part of the run ended: in its file and in what is returned."""
        self._info.state = "crashed" if code else "partial"
        self._info.exit_code = code
        self._try("ending the recording", self._finish, code, interrupted)
        self._info.messages = list(dict.fromkeys([*self._info.messages, *self._failed.values()]))
        return self._info

    def _finish(self, code: int, interrupted: bool) -> None:
        info = self._info
        info.finished_at = now()
        self._stop_looking()
        missing = None
        if self._summaries is not None:
            missing = self._try("summaries", self._summaries.finish, wait=not code and not interrupted)
        if self._processes is not None:
            self._try("summing up", self._sum_up, self._processes, code, interrupted)
        info.messages += [*(missing or ()), *self._failed.values()]
        self._try("writing the file of the run", write_json, self._path / node_file(self._node_rank), info)
        self._tidy()

    def _stop_looking(self) -> None:
        if self._hangs is not None:
            self._try("reporting hangs", self._hangs.close)

    def _tidy(self) -> None:
        for folder in (self._alive, summaries_folder(self._path, self._node_rank)):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not there, or something in it
            (self._path / FLIGHT_RECORDER_FOLDER).rmdir()

    def _sum_up(self, processes: RankProcesses, code: int, interrupted: bool) -> None:
        """Say how the ranks ended. Raises ``OSError`` or ``RunDirectoryError``."""
        path, node_rank, info = self._path, self._node_rank, self._info
        killed = end_orphans(_manifests(records_of_node(path, node_rank)), self._settings)
        _mark_dead_ranks(records_of_node(path, node_rank), killed, code)
        alive_pids = {int(file.name) for file in self._alive.iterdir()}
        notes = {line for file in self._alive.iterdir() for line in file.read_text("utf-8").splitlines()}
        failures = {note for note in notes if note.startswith("!")}
        wrappers = notes - failures
        records = records_of_node(path, node_rank)
        manifests = _manifests(records)
        info.hosts = sorted({manifest.host for manifest in manifests}) or info.hosts
        info.world_size = max((manifest.world_size for manifest in manifests), default=None)
        seen = {process.rank for process in processes.seen.values()}
        expected = set(range(info.world_size or 0)) if is_alone(path, node_rank) else seen
        if info.rehearsal is not None:
            expected = {info.rehearsal.rank}
        elif not all(one.has_peers for one in manifests):
            expected = {one.rank for one in manifests}
        info.state = _state(code, manifests, expected, interrupted)
        info.wrappers = sorted(wrappers)
        info.messages = _messages(records, code, expected, processes, alive_pids, wrappers, failures)

    def _try(self, what: str, action: Callable[..., Value], /, *arguments: Any, **named: Any) -> Value | None:
        """Return what ``action`` returns; None if it raises, or if ``what`` failed before."""
        if what in self._failed:
            return None
        try:
            return action(*arguments, **named)
        except Exception as error:
            self._fail(what, error)
            return None

    def _fail(self, what: str, error: Exception) -> None:
        if isinstance(error, OSError | RunDirectoryError):
            self._failed[what] = f"what was recorded may be lost: {_why_lost(self._path, error)}"
            return
        self._failed[what] = f"{what} failed: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        with suppress(OSError), (self._path / ERRORS_FILE).open("a", errors="backslashreplace") as file:
            file.write(f"{self._failed[what]}\n{trace}\n")


def _why_lost(path: Path, error: OSError | RunDirectoryError) -> str:
    if not path.exists():
        return f"{path}: the run directory was removed"
    if isinstance(error, OSError):
        return f"{path}: the run directory cannot be read or written any more ({error.strerror})"
    return str(error)


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


_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 8))
"""Entries of the Flight Recorder's buffer: the name, the older one, the first torch that knows the new."""
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 9))
"""Where NCCL's watchdog writes its dump, to which torch adds the rank."""
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", (2, 2))
_KEPT = "2000"


def buffer_variables(environment: Mapping[str, str], run: Path, torch: str) -> dict[str, str]:
    """Return the variables that switch the Flight Recorder on, and let NCCL's watchdog dump it into the
    run.

    The user's own settings stay. ``torch`` is the version that trains: newer ones warn of old names.
    """
    variables = {}
    file = str(run.resolve() / FLIGHT_RECORDER_FOLDER / "nccl_trace_rank_")
    for (new, old, since), value in ((_SIZE, _KEPT), (_FILE, file), (_ON_TIMEOUT, "1")):
        if new not in environment and old not in environment:
            variables[new if _minor(torch) >= since else old] = value
    return variables


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
