"""What is known while a job runs: a line for every step beside its trace, and a hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_day.backend import EXAMPLE, Backend, torchrun
from benchmarks.gpu_day.day import Day, Failed, Job, Outcome, Skipped

_LATE = "benchmarks/gpu_day/late_rank.py"
_LIMIT_S = 60.0
_QUIET_S, _SLEEP_S = 5, 15
_STEPS = ("--steps", "24")
_GPU_SIZE = ("--dim", "512", "--heads", "8", "--vocab", "8192", "--length", "256")
_TIMES = 2.0
"""How far apart two measures of the same waiting may be: the steps are not the same ones."""


def run(day: Day, backend: Backend) -> list[Outcome]:
    """Set the lines of ``--watch`` beside the same run's trace, and let a rank keep the others waiting."""
    jobs = [Job("watch", partial(_watch, day, backend)), Job("hang", partial(_hang, day, backend))]
    return day.perform("live", jobs)


def _record(
    day: Day, log: str, backend: Backend, options: Sequence[object], script: Sequence[object]
) -> Path:
    if backend.most_ranks == 1:
        raise Skipped(f"needs 2 ranks: {backend.why}")
    run = day.folder / "live" / log
    record = [sys.executable, "-m", "fsdp2prof", "record", "-f", "-o", run, "--no-memory", *options, "--"]
    command = [*record, *torchrun(2), *script, "--backend", backend.name]
    day.run(log, command, limit_s=_LIMIT_S, environment=backend.environment)
    return run


def _analyze(day: Day, what: str, run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "fsdp2prof", "analyze", what, run, "--format", "json"]
    analysis: dict[str, Any] = json.loads(day.run(f"{run.name}-{what}", command, limit_s=_LIMIT_S))
    return analysis


def _watch(day: Day, backend: Backend) -> tuple[str, dict[str, Any]]:
    size = _GPU_SIZE if day.machine.has_gpu else ()
    run = _record(day, "watch", backend, ["--watch", "--wait", "4"], [EXAMPLE, *_STEPS, *size])
    lines = [json.loads(line) for path in run.glob("rank-*/steps.jsonl") for line in path.open()]
    plain = [one for one in lines if one["kind"] == "plain" and one["step"] > 0]
    waits = [one["exposed_ns"] for one in plain if one["exposed_ns"] is not None]
    if not waits:
        raise Failed(f"none of {len(plain)} lines of unrecorded steps has the time of its waits")
    trace = _analyze(day, "trace", run)["totals"]
    watched, traced = median(waits), trace["exposed_ns"]
    row = {
        "name": "watch",
        "step_ns": median(one["duration_ns"] for one in plain),
        "traced_step_ns": trace["step_ns"],
        "waits_ns": watched,
        "exposed_ns": traced,
    }
    said = f"waits {watched / 1e6:.2f} ms a step, exposed in the trace {traced / 1e6:.2f} ms"
    if not traced / _TIMES <= watched <= traced * _TIMES:
        raise Failed(f"{said}: more than {_TIMES:g} times apart")
    return said, row


def _hang(day: Day, backend: Backend) -> tuple[str, dict[str, Any]]:
    options = ["--hang-after", _QUIET_S, "--watch", "--active", 0]
    run = _record(day, "hang", backend, options, [_LATE, "--seconds", _SLEEP_S])
    found = _analyze(day, "hang", run)
    said = f"{found['cause']}, ranks {found['culprits']}"
    if found["culprits"] != [1]:
        raise Failed(f"rank 1 kept the others waiting; found: {said}")
    return said, {"name": "hang", "cause": found["cause"], "verdict": found["verdict"][0]}
