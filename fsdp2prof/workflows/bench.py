"""Measure a cluster: start the ranks' launcher, wait, read their measurements."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsdp2prof.analyzers.bench import bench_result
from fsdp2prof.errors import InputError
from fsdp2prof.measured import Measured, Wanted
from fsdp2prof.results.bench import BenchResult

_LAST_LINES = 3
_QUICK_SECONDS = 6.0


def bench(
    command: Sequence[str],
    *,
    mesh: dict[str, int] | None = None,
    seconds: float = 120.0,
    largest_bytes: int = 1 << 30,
    quick: bool = False,
) -> BenchResult:
    """Start the measuring ranks with a launcher (``torchrun --nproc-per-node 8``).

    Raises ``InputError`` if it cannot be started, fails, or writes no result.
    """
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: command not found")
    with tempfile.TemporaryDirectory(prefix="fsdp2prof-bench-") as folder:
        output = Path(folder, "measured.json")
        wanted = Wanted(
            output=str(output),
            mesh=mesh or {},
            seconds=_QUICK_SECONDS if quick else seconds,
            largest_bytes=largest_bytes,
            quick=quick,
        )
        script = str(Path(__file__).resolve().parents[1] / "bench" / "worker.py")
        done = subprocess.run(
            [*command, script, msgspec.json.encode(wanted).decode()],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise InputError(f"{command[0]} ended with exit code {done.returncode}: {_reason(done.stdout)}")
        try:
            measured = msgspec.json.decode(output.read_bytes(), type=Measured)
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(
                f"{command[0]} ended, rank 0 measured nothing: it must run on this machine ({error})"
            ) from None
    return bench_result(measured, quick=quick)


def _environment() -> dict[str, str]:
    """Let the ranks import this package wherever their launcher starts them."""
    package = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([known, package] if known else [package])}


def _reason(output: bytes) -> str:
    """Return the line with the cause of a failure: the last error of a rank."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return (errors or lines[-_LAST_LINES:] or ["no output"])[0]
