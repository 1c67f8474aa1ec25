"""A hang as the launcher sees it: it says at once that one was kept, and asks py-spy about silent ranks.

A rank whose main thread holds Python's lock cannot write its own stacks. py-spy, where it is installed, reads
them from outside, native frames too; such a rank is blocked anyway while it is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from fsdp2prof.files import replacing
from fsdp2prof.run_directory import MANIFEST_FILE, STACKS_FILE

_LOOK_S = 1.0
ANSWER_S = 10.0
"""Seconds that the other ranks have after the first to write their stacks: they are in the same step."""
_READ_S = 30
"""Seconds that py-spy has for one rank."""
_MOST_READ = 16
"""Silent ranks that py-spy is asked about."""
_HUNG = b"# no step ended"
_HOW = ("--native", "--nonblocking")
"""With frames of C and C++, for which py-spy stops the process a moment; else without."""


class _Rank(msgspec.Struct):
    """Of a manifest, what tells a running rank of this node."""

    rank: int
    pid: int
    node_rank: int = 0
    state: str = ""


class HangReport:
    """Looks at a run's folders until :meth:`close`; ``told`` gets a line for every hang that was kept."""

    def __init__(self, run: Path, node_rank: int, told: Callable[[str], None]) -> None:
        self._run = run
        self._node_rank = node_rank
        self._told = told
        self._reported: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fsdp2prof-hangs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._new():
                self._report()

    def _new(self) -> dict[Path, int]:
        """Stacks of ranks that stood still and were not told of yet, with the times they were written at."""
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
        do = "do" if len(ranks) > 1 else "does"
        return (
            f"no step ends: what {_ranks(ranks)} {do} was saved{more}; `fsdp2prof analyze hang {self._run}`"
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
