"""What recording costs, outside and inside its window (``benchmarks/recording_overhead.py``)."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.gpu_day.backend import Backend
from benchmarks.gpu_day.day import Day, Job, Outcome

__all__ = ["run"]

_LIMIT_S = 240.0


def run(day: Day, backend: Backend) -> list[Outcome]:
    """Measure the ratios; on a CPU with one round, which shows little more than that it works."""

    def work() -> tuple[str, dict[str, Any]]:
        rounds = 2 if day.machine.has_gpu else 1
        ranks = min(2, backend.most_ranks or 2)
        output = day.folder / "overhead.json"
        command = [sys.executable, "benchmarks/recording_overhead.py", "--rounds", rounds, "--nproc", ranks]
        command += ["--backend", backend.name, "--json", output]
        day.run("overhead", command, limit_s=_LIMIT_S, environment=backend.environment)
        ratios = json.loads(output.read_text())
        wall = [f"{row['ratio']} {row['median']:.3f}" for row in ratios if row["clock"] == "wall"]
        return "; ".join(wall), {"ratios": ratios}

    return day.perform("overhead", [Job(f"{backend.name} ranks", work)])
