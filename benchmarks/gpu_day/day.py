"""One run of all parts: where it writes, how long it may take, and how its jobs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, Literal

from benchmarks.gpu_day.machine import Machine
from benchmarks.gpu_day.packing import REPOSITORY, without_paths

_LEAST_S = 20.0
"""Seconds without which no further command is started."""
_GRACE_S = 40.0
"""Seconds a command that ran too long has to end by itself: torchrun gives its ranks 30."""
_LOGGED = 20_000
"""Last characters of each of a command's streams that are kept."""
_LONGEST = 300
"""Characters of a reason that are shown."""


_KEEPING = Lock()


class Skipped(Exception):  # noqa: N818
    """A job that does not apply here, and why."""


class Failed(Exception):  # noqa: N818
    """A job that went wrong, and why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do; ``work`` returns a line that says what came out, and a row of its part's table."""

    name: str
    work: Callable[[], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    part: str
    job: str
    state: Literal["done", "skipped", "failed"]
    detail: str
    row: dict[str, Any] = field(default_factory=dict)
    """What a done job measured."""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.part}: {self.job}: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """What every part is given."""

    folder: Path
    machine: Machine
    end_s: float
    """``time.monotonic()`` at which no command may run any more."""
    quick: bool
    """Only the first job of each part."""
    keep: Callable[[Outcome], None] = lambda _: None
    """Gets every outcome as soon as there is one, one at a time."""

    def perform(self, part: str, jobs: Sequence[Job], *, workers: int = 1) -> list[Outcome]:
        """Do the jobs, ``workers`` at a time; none stops another."""
        chosen = jobs[:1] if self.quick else jobs
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda job: self._attempt(part, job), chosen))

    def run(
        self,
        log: str,
        command: Sequence[object],
        *,
        limit_s: float,
        environment: dict[str, str] | None = None,
        may_fail: bool = False,
    ) -> str:
        """Run a command in the repository, keep its output in ``logs/LOG.txt`` and return its stdout.

        Raises :class:`Skipped` without time for it, :class:`Failed` if it fails or runs past ``limit_s``.
        """
        left_s = self.end_s - time.monotonic()
        if left_s < _LEAST_S:
            raise Skipped("out of time")
        limit_s = min(limit_s, left_s)
        with TemporaryFile("w+") as out_file, TemporaryFile("w+") as err_file:  # no pipe that orphans hold
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=REPOSITORY,
                env=_environment(environment or {}),
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            late = not _ends(process, limit_s)
            out_file.seek(0)
            err_file.seek(0)
            out, err = out_file.read(), err_file.read()
        self._keep(log, f"$ {' '.join(map(str, command))}\n{out[-_LOGGED:]}\n{err[-_LOGGED:]}")
        if late and limit_s == left_s:
            raise Skipped("out of time")
        if late:
            raise Failed(f"ran past {limit_s:.0f} s: see logs/{log}.txt")
        if process.returncode and not may_fail:
            raise Failed(f"exit code {process.returncode}: {_last_words(err or out)}; see logs/{log}.txt")
        return out

    def _keep(self, log: str, text: str) -> None:
        path = self.folder / "logs" / f"{log}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(without_paths(text))

    def _attempt(self, part: str, job: Job) -> Outcome:
        try:
            detail, row = job.work()
            outcome = Outcome(part=part, job=job.name, state="done", detail=detail, row=row)
        except Skipped as reason:
            outcome = Outcome(part=part, job=job.name, state="skipped", detail=str(reason))
        except Failed as reason:
            outcome = Outcome(part=part, job=job.name, state="failed", detail=str(reason))
        except Exception as error:  # whatever else is wrong with one job, the others go on
            what = f"{type(error).__name__}: {error}"[:_LONGEST]
            outcome = Outcome(part=part, job=job.name, state="failed", detail=what)
        print(outcome, file=sys.stderr, flush=True)
        with _KEEPING:
            self.keep(outcome)
        return outcome


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's, with fsdp2prof importable everywhere though it may not be installed."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **extra}


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a command; one that runs too long is ended with all it started, by SIGTERM first."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    killed_s = time.monotonic() + _GRACE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < killed_s:
            process.poll()
            os.killpg(process.pid, 0)  # the launcher of the ranks may outlive its own parent
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return False


def _last_words(text: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or line.startswith(("error", "FAILED"))]
    return (named or lines or ["it said nothing"])[-1][:_LONGEST]
