"""A training command run as one rank on tensors without data, for estimates that know no model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.recorder.rehearsal import as_one_process
from fsdp2prof.tables.allocations import MemoryRecording

_POLL_S = 0.25
_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt))\b:? ?.*)")
"""A line that names an exception, as Python or torch on a rank prints it."""
_OF_NO_DATA = ("DynamicOutputShapeException", "DataDependentOutputException")


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """Recording of rank 0 of a rehearsal."""

    manifest: RankManifest
    recording: MemoryRecording


def rehearsed(command: Sequence[str], world_size: int | None) -> RehearsedRank:
    """Run a command as rank 0 of ``world_size`` ranks until its third step is recorded, then end it.

    ``world_size`` defaults to torchrun's ranks per node. Raises ``UsageError`` if no rank count is known
    and ``InputError`` for a command that ends earlier.
    """
    world_size = world_size or as_one_process(command)[1]
    if world_size is None:
        raise UsageError("the command has no rank count: add --world-size")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with _started(command, world_size, run) as process:
            while process.poll() is None and not _is_recorded(run):
                time.sleep(_POLL_S)
            code = process.poll()
        if not _is_recorded(run):
            raise InputError(_why_it_ended((Path(folder) / "stderr").read_text(errors="replace"), code))
        record = open_run(run).ranks[0]
        assert record.manifest is not None
        assert record.memory is not None
        return RehearsedRank(manifest=record.manifest, recording=read_memory(record.memory)[0])


def _why_it_ended(printed: str, code: int | None) -> str:
    """Explain why a command ended too early: its last printed exception, otherwise its last line."""
    errors = [found for line in printed.splitlines() if (found := _ERROR.match(line.strip()))]
    ended = f"the command ended with exit code {code} before its third step was recorded"
    if not errors:
        last = printed.strip().rpartition("\n")[2]
        return f"{ended}: {last}" if last else f"{ended}; `fsdp2prof rehearse --meta` shows its output"
    said, kind = errors[-1].groups()
    if kind in _OF_NO_DATA:
        operator = said.rpartition(": ")[2]
        return f"the script looks at values ({operator}) that tensors here do not have: add --model"
    return f"{ended}: {said}"


@contextmanager
def _started(command: Sequence[str], world_size: int, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--meta", "--world-size", str(world_size), "--wait", "0", "--warmup", "0", "--active", "0"]
    own = [
        sys.executable,
        "-m",
        "fsdp2prof",
        "rehearse",
        *options,
        "--memory-steps",
        "3",
        "-q",
        "-o",
        str(run),
    ]
    with (run.parent / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [*own, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_recorded(run: Path) -> bool:
    """Whether rank 0 has written its memory recording, whole."""
    try:
        ranks = open_run(run).ranks
    except (InputError, OSError):
        return False
    return any(
        one.memory is not None and one.manifest is not None and one.manifest.state == "complete"
        for one in ranks
    )
