"""The tests that need a GPU, each as a job of its own."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

from benchmarks.gpu_day.day import Day, Failed, Job, Outcome, Skipped

_LIMIT_S = 60.0
_PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
"""Warnings of another torch are not failures here."""


def run(day: Day) -> list[Outcome]:
    """Run ``tests/gpu``, test by test: a test that runs out of time takes no other with it."""
    try:
        tests = _collected(day) if day.machine.has_gpu else ["tests/gpu"]
    except (Failed, Skipped):
        tests = ["tests/gpu"]
    jobs = [Job(name, partial(_test, day, name)) for name in tests]
    return day.perform("tests", jobs, workers=4 if day.machine.has_gpu else 1)


def _collected(day: Day) -> list[str]:
    out = day.run("tests-collected", [*_PYTEST, "--collect-only", "tests/gpu"], limit_s=_LIMIT_S)
    return [line for line in out.splitlines() if "::" in line] or ["tests/gpu"]


def _test(day: Day, name: str) -> tuple[str, dict[str, Any]]:
    if not day.machine.has_gpu:
        raise Skipped("no CUDA device: tests/gpu needs one")
    log = re.sub(r"\W+", "-", name.rpartition("::")[2] or "tests").strip("-")
    summary = day.run(log, [*_PYTEST, name], limit_s=_LIMIT_S).strip().splitlines()[-1]
    if not re.search(r"\d+ passed", summary):
        raise Skipped(summary)
    return summary, {}
