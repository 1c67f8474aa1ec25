"""``--summary``: processes of the launcher analyse the recordings of this node's ranks.

A rank only requests it, because the training might wait for a child of the rank.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from fsdp2prof.recorder.requests import summaries_folder, take_summary_requests
from fsdp2prof.recorder.settings import ALIVE_VARIABLE, VARIABLE

WAIT_S = 300.0
"""Seconds that are waited for summaries after the command has ended."""
MODULE = "fsdp2prof.workflows.summarise_rank"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_S = 1.0


class Summaries:
    """Starts a process for every recording that a rank submits, at most one per processor."""

    def __init__(self, run: Path, node_rank: int) -> None:
        self._run = run.resolve()
        self._folder = summaries_folder(self._run, node_rank)
        with suppress(OSError):  # a full disk: the ranks will say so
            self._folder.mkdir(exist_ok=True)
        self._waiting: list[Path] = []
        self._running: dict[int, Path] = {}
        self._failed: list[Path] = []

    def look(self) -> float:
        """Start requested analyses and note finished ones; return the seconds until the next check."""
        for pid, folder in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                self._failed += [folder] if status else []
        self._waiting += take_summary_requests(self._run, self._folder)
        while self._waiting and len(self._running) < (os.cpu_count() or 1):
            folder = self._waiting.pop(0)
            try:
                self._running[_start(folder)] = folder
            except OSError:  # no memory for a process, say
                self._failed.append(folder)
        return _LOOK_S

    def finish(self, *, wait: bool) -> list[str]:
        """Wait for all of them for a limited time; return messages about missing ones."""
        end = time.monotonic() + WAIT_S
        while wait and time.monotonic() < end:
            self.look()
            if not self._running and not self._waiting:
                break
            time.sleep(0.05)
        self._waiting += take_summary_requests(self._run, self._folder)
        missing = [*self._failed, *self._waiting, *(self._running.values() if wait else ())]
        if not missing:
            return []
        names = sorted(str(folder.relative_to(self._run)) for folder in missing)
        return [
            f"no summary of {', '.join(names[:8])}{', ...' * (len(names) > 8)}: the full recording is kept"
        ]


def _start(folder: Path) -> int:
    environment = {name: text for name, text in os.environ.items() if name not in (VARIABLE, ALIVE_VARIABLE)}
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", MODULE, str(folder)],
        environment | dict.fromkeys(_ONE_THREAD, "1"),
        file_actions=[(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)],
        setsigmask=[],
    )
