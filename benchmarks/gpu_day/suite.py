"""The tests that need a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

from benchmarks.gpu_day.day import Day, Job, Outcome, Skipped

__all__ = ["run"]

_LIMIT_S = 200.0


def run(day: Day) -> list[Outcome]:
    """Run ``tests/gpu``."""

    def work() -> tuple[str, dict[str, Any]]:
        if not day.machine.has_gpu:
            raise Skipped("no CUDA device: tests/gpu needs one")
        # What another torch warns of is no reason to fail here.
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-W", "default"]
        out = day.run("tests", [*command, "-p", "no:cacheprovider"], limit_s=_LIMIT_S)
        summary = out.strip().splitlines()[-1]
        if not re.search(r"\d+ passed", summary):
            raise Skipped(summary)
        return summary, {}

    return day.perform("tests", [Job("tests/gpu", work)])
