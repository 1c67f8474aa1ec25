"""Ranks of a run among this host's processes: ranks without a recorder, hung ranks, ranks that outlive the
command.

A hang is reported at once. A rank whose main thread holds the GIL cannot write its own stacks. py-spy, if
installed, reads them from outside, including native frames; such a rank is blocked anyway while it is
read.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdp2prof.files import replacing
from fsdp2prof.manifest import RankManifest
from fsdp2prof.recorder.settings import VARIABLE
from fsdp2prof.run_directory import MANIFEST_FILE, STACKS_FILE

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")
_UNTIL_SEEN_S = 2.0
"""Seconds between checks for a first rank: one that ends at once takes longer to import torch."""
_LET_FINISH_S, _LET_TERMINATE_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A Python process that carried a rank in its environment."""

    pid: int
    rank: int
    arguments: tuple[str, ...]
    python_path: str

    def why_silent(self, bootstrap: str) -> str:
        """Return why the recorder never started in the process, and the remedy."""
        flag = _isolating_flag(self.arguments)
        if flag is not None:
            return f"`python {flag}` disables it; start the rank without {flag}"
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
    """End the ranks on this host that outlived the command; return those that had to be signalled.

    They get a few seconds to end by themselves, then SIGTERM, then SIGKILL. Only processes with this run's
    settings in their environment are signalled, because a pid may have been reused.
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
    """Read a file of ``/proc``; empty if the process has ended or belongs to another user."""
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _isolating_flag(arguments: tuple[str, ...]) -> str | None:
    """Return ``-I``, ``-E`` or ``-S`` if the interpreter was started with it, alone or among other
    letters."""
    for argument in arguments[1:]:
        if not argument.startswith("-") or argument in ("-m", "-c", "-"):
            return None
        for letter in "IES":
            if not argument.startswith("--") and letter in argument.partition("W")[0].partition("X")[0]:
                return f"-{letter}"
    return None


_LOOK_S = 1.0
ANSWER_S = 10.0
"""Seconds that the other ranks have after the first to write their stacks: they are in the same step."""
_READ_S = 30
"""Seconds that py-spy has for one rank."""
_MOST_READ = 16
"""Silent ranks that py-spy is asked about."""
_HUNG = b"# no step ended"
_HOW = ("--native", "--nonblocking")
"""With C and C++ frames, for which py-spy briefly stops the process; otherwise without."""


class _Rank(msgspec.Struct):
    """Part of a manifest that identifies a running rank of this node."""

    rank: int
    pid: int
    node_rank: int = 0
    state: str = ""


class HangReport:
    """Watches a run's folders until :meth:`close`; ``told`` receives a line for every saved hang."""

    def __init__(self, run: Path, node_rank: int, told: Callable[[str], None]) -> None:
        self._run = run
        self._node_rank = node_rank
        self._told = told
        self._reported: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fsdp2prof-hangs", daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread takes them
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """Look no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                if self._new():
                    self._report()
        except Exception as error:
            self._told(f"hang reports stopped after an error: {type(error).__name__}: {error}")

    def _new(self) -> dict[Path, int]:
        """Stacks of hung ranks that were not reported yet, with the times they were written."""
        found = {
            file: written for file in self._run.glob(f"rank-*/{STACKS_FILE}") if (written := _written(file))
        }
        return {file: written for file, written in found.items() if self._reported.get(file) != written}

    def _report(self) -> None:
        end = time.monotonic() + ANSWER_S
        while (silent := self._silent(self._new())) and time.monotonic() < end and not self._over.wait(0.2):
            pass
        if self._over.is_set():
            return
        read = {rank for rank, pid in list(silent.items())[:_MOST_READ] if self._read(rank, pid)}
        kept = self._new()
        self._reported |= kept
        ranks = sorted(int(file.parent.name.removeprefix("rank-")) for file in kept)
        self._told(self._line(ranks, sorted(set(silent) - read)))

    def _line(self, ranks: list[int], silent: list[int]) -> str:
        without = "" if _py_spy() else "; with py-spy installed their stacks would be"
        more = f" ({_ranks(silent)} did not answer{without})" if silent else ""
        return (
            f"no step has ended for a while: stacks of {_ranks(ranks)} saved{more}; "
            f"see `fsdp2prof analyze hang {self._run}`"
        )

    def _silent(self, kept: Mapping[Path, int]) -> dict[int, int]:
        """Ranks of this node that run and have not written their stacks, with their processes."""
        found = {}
        for file in self._run.glob(f"rank-*/{MANIFEST_FILE}"):
            if file.with_name(STACKS_FILE) in kept:
                continue
            try:
                one = msgspec.json.decode(file.read_bytes(), type=_Rank)
                os.kill(one.pid, 0)
            except (OSError, msgspec.DecodeError):
                continue  # gone, or not written yet
            if one.node_rank == self._node_rank and one.state == "running":
                found[one.rank] = one.pid
        return found

    def _read(self, rank: int, pid: int) -> bool:
        """Let py-spy write a rank's stacks; whether it could."""
        py_spy = _py_spy()
        if py_spy is None:
            return False
        for how in _HOW:
            try:
                done = subprocess.run(
                    [py_spy, "dump", how, "--full-filenames", "--pid", str(pid)],
                    stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_S, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                with replacing(self._run / f"rank-{rank:05d}" / STACKS_FILE) as temporary:
                    temporary.write_bytes(
                        _HUNG + b"; it did not answer, and py-spy was asked\n" + done.stdout
                    )
                return True
        return False


def _written(file: Path) -> int:
    """When the stacks of a rank that stood still were written; 0 for others."""
    try:
        with file.open("rb") as opened:
            return file.stat().st_mtime_ns if opened.read(len(_HUNG)) == _HUNG else 0
    except OSError:
        return 0


def _py_spy() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
