"""Checks of a run's sharding, of the environment that a launcher gives, and of parity with one process."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

import fsdp2prof
from fsdp2prof.analyzers.sharding import check
from fsdp2prof.analyzers.sharding.environment import judge_environment
from fsdp2prof.analyzers.sharding.parity import judge_parity
from fsdp2prof.analyzers.sharding.run_evidence import OwnCollectives
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.readers.job.nccl_log import read_transports
from fsdp2prof.readers.run.directory import open_run, read_manifests
from fsdp2prof.results.check import EnvironmentCheck, ParityCheck, RunCheck
from fsdp2prof.tables.probes import ParityMeasurements, RankProbe
from fsdp2prof.units import dtype_bytes
from fsdp2prof.worker_processes import Task
from fsdp2prof.workflows.analyze import read_tables
from fsdp2prof.workflows.job.job_files import open_job


def check_run(path: Path) -> RunCheck:
    """Check a recorded run. Raises ``RunDirectoryError`` for a folder without a readable manifest."""
    run = open_run(path)
    return check.check_run(run, read_manifests(run), lambda: _own_collectives(path))


def _own_collectives(path: Path) -> OwnCollectives | None:
    """Collectives without a layer in the traced steps of the first rank that has a trace."""
    job = open_job(path)
    for _, tables in islice(read_tables(job), 1):
        steps: dict[int, list[int]] = {step: [] for step in tables.analysed.step.tolist()}
        table = tables.collectives.table
        for row, (step, payload) in enumerate(
            zip(table.step.tolist(), table.payload_bytes.tolist(), strict=True)
        ):
            if step in steps and table.op[row] == "all_reduce" and table.fqn[row] is None and payload > 0:
                steps[step].append(payload // (dtype_bytes(table.dtype[row] or "float32") or 4))
        return OwnCollectives(list(steps.values()), "all_to_all" in set(table.op.to_list()))
    return None


_PROBE = "fsdp2prof.workflows.probes.env_probe"
_SHOWN_LINES = 5
_ERROR = re.compile(r"^(?:\[\w+\]:)?\s*[\w.]*(?:Error|Exception)\b")


def check_environment(
    command: Sequence[str],
    *,
    folder: Path,
    mesh: str = "",
    world_size: int | None = None,
    expected_bytes_per_s: int | None = None,
    timeout_s: float = 300.0,
) -> EnvironmentCheck:
    """Run ``command`` with ``-m`` and the probe; all ranks must see ``folder``, where recordings will go.

    Raises ``InputError`` if the command cannot start or no rank left a word.
    """
    root = str(Path(fsdp2prof.__file__).parents[1])
    try:
        made = tempfile.TemporaryDirectory(prefix=".fsdp2prof-env-", dir=folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({error.strerror})") from None
    with made as name:
        where = Path(name)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": str(where / "nccl.%h.%p"),
        }
        code, errors = _run([*command, "-m", _PROBE, name, mesh], environment, timeout_s)
        probes = [msgspec.json.decode(one.read_bytes(), type=RankProbe) for one in where.glob("rank-*.json")]
        said = [] if code == 0 else [f"the command ended with exit code {code}", *errors]
        if not probes:
            raise InputError(f"no rank reported: {'; '.join(said) or 'the probe was not run'}")
        return judge_environment(
            probes,
            command=command,
            world_size=world_size or max(one.world_size for one in probes),
            expected_bytes_per_s=expected_bytes_per_s,
            transports=read_transports(list(where.glob("nccl.*"))),
            said=said,
        )


def _run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> tuple[int, list[str]]:
    """Exit code and the last lines of stderr; -1 after the timeout."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            errors="replace",
        )
    except FileNotFoundError:
        raise InputError(f"{command[0]}: command not found") from None
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        return -1, [f"it did not end within {timeout_s:.0f} s (--timeout)"]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = list(dict.fromkeys(line for line in lines if _ERROR.match(line)))
    return done.returncode, (errors or lines)[-_SHOWN_LINES:]


def check_parity(
    *,
    model: str,
    batch: str,
    mesh: Mapping[str, int],
    shard: str | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    seed: int = 0,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> ParityCheck:
    """Train plain on one process and sharded on several, and compare every loss, gradient and parameter.

    ``model``, ``batch`` and ``shard`` are ``package.module:function``; ``mesh`` maps dimensions to sizes,
    the slowest first, and ``ep`` to the ranks in a row that experts are dealt out to. Raises ``ModelError``
    where the user's functions fail, hang or give nothing to train.
    """
    if shard is None and not mesh.keys() <= {"dp_replicate", "dp_shard"}:
        raise UsageError("--mesh: to shard over dimensions other than dp_replicate and dp_shard, add --shard")
    with tempfile.TemporaryDirectory(prefix="fsdp2prof-parity-") as folder:
        options: dict[str, Any] = {
            "model": model,
            "batch": batch,
            "shard": shard,
            "mesh": dict(mesh),
            "steps": steps,
            "micro_batches": micro_batches,
            "seed": seed,
            "device": device,
            "timeout_s": timeout_s,
            "folder": folder,
        }
        return judge_parity(Task(_train_both, options).result())


def _train_both(options: dict[str, Any]) -> ParityMeasurements:
    """Train both variants in a separate process, which imports torch first."""
    from fsdp2prof.workflows.probes.parity_processes import train_both
    from fsdp2prof.workflows.probes.parity_rank import ParitySettings

    return train_both(ParitySettings(**options))
