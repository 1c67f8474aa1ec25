"""Ranks of a run among this host's processes: why one never came to life, and which outlived the command."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.manifest import RankManifest
from fsdp2prof.recorder.settings import VARIABLE

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")
_UNTIL_SEEN_S = 2.0
"""Between two looks for a first rank: one that ends at once takes longer to import torch."""
_LET_FINISH_S, _LET_TERMINATE_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A Python process that carried a rank in its environment."""

    pid: int
    rank: int
    arguments: tuple[str, ...]
    python_path: str

    def why_silent(self, bootstrap: str) -> str:
        """Say why the recorder never came to life in it, and what to do."""
        flag = _isolating_flag(self.arguments)
        if flag is not None:
            return f"it runs `python {flag}`, which leaves the recorder out; start it without {flag}"
        entries = self.python_path.split(os.pathsep)
        if bootstrap not in entries:
            return "its PYTHONPATH was reset; add to PYTHONPATH instead of replacing it"
        for entry in entries[: entries.index(bootstrap)]:
            if (file := Path(entry, "sitecustomize.py")).is_file():
                return f"{file} precedes the recorder's own; move {entry} behind it in PYTHONPATH"
        return "python -I, -E or -S, a foreign sitecustomize or a reset PYTHONPATH kept the recorder out"


class RankProcesses:
    """Looks for the run's ranks in ``/proc`` (Linux): often until one is there."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._delay_s = 0.5
        self._next = time.monotonic() + self._delay_s
        self.seen: dict[int, RankProcess] = {}
        """By pid."""

    def look(self) -> float:
        """Look if it is time to; returns the seconds until the next time."""
        if time.monotonic() >= self._next:
            for process in _rank_processes(self._settings):
                self.seen[process.pid] = process
            self._delay_s = 2 * self._delay_s if self.seen else min(2 * self._delay_s, _UNTIL_SEEN_S)
            self._next = time.monotonic() + self._delay_s
        return max(0.05, self._next - time.monotonic())

    def silent(self, alive: set[int]) -> list[RankProcess]:
        """Return one process of every rank none of whose processes left a sign of life."""
        heard = {process.rank for process in self.seen.values() if process.pid in alive}
        silent = {process.rank: process for process in self.seen.values() if process.rank not in heard}
        return [silent[rank] for rank in sorted(silent)]


def end_orphans(manifests: Iterable[RankManifest], settings: str) -> list[int]:
    """End the ranks on this host that outlived the command; returns those that had to be signalled.

    They get a few seconds to end by themselves, then SIGTERM, then SIGKILL. Only processes that carry this
    run's settings in their environment are touched: a pid may have been used again.
    """
    host = socket.gethostname()
    ranks = {manifest.pid: manifest.rank for manifest in manifests if manifest.host == host}
    alive = _wait({pid for pid in ranks if _carries(pid, settings)}, settings, _LET_FINISH_S)
    told = sorted(ranks[pid] for pid in alive)
    for number, patience in ((signal.SIGTERM, _LET_TERMINATE_S), (signal.SIGKILL, 1.0)):
        for pid in alive:
            _kill(pid, number)
        alive = _wait(alive, settings, patience)
    return told


def _wait(pids: set[int], settings: str, seconds: float) -> set[int]:
    end = time.monotonic() + seconds
    while pids := {pid for pid in pids if _carries(pid, settings)}:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return pids


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _rank_processes(settings: str) -> list[RankProcess]:
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        environment = _environment(int(folder.name))
        rank = next((environment[name] for name in _RANK_VARIABLES if name in environment), "")
        if environment.get(VARIABLE) != settings or not rank.isdigit():
            continue
        arguments = _read(folder / "cmdline").split("\0")
        if Path(arguments[0]).name.startswith("python"):
            path = environment.get("PYTHONPATH", "")
            processes.append(RankProcess(int(folder.name), int(rank), tuple(arguments), path))
    return processes


def _carries(pid: int, settings: str) -> bool:
    return _environment(pid).get(VARIABLE) == settings


def _environment(pid: int) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in _read(Path(f"/proc/{pid}/environ")).split("\0"))
    return {name: value for name, _, value in pairs}


def _read(file: Path) -> str:
    """Read a file of ``/proc``; empty when the process has gone or belongs to somebody else."""
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _isolating_flag(arguments: tuple[str, ...]) -> str | None:
    """Return ``-I``, ``-E`` or ``-S`` if the interpreter was given it, alone or among other letters."""
    for argument in arguments[1:]:
        if not argument.startswith("-") or argument in ("-m", "-c", "-"):
            return None
        for letter in "IES":
            if not argument.startswith("--") and letter in argument.partition("W")[0].partition("X")[0]:
                return f"-{letter}"
    return None
