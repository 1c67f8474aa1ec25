"""Time and memory of loading a trace and breaking its steps down: ours, HTA, TraceLens, and the floor.

Every contestant runs in a process of its own, imports included, on the same file, one after the other:

``ours``        ``read_trace`` and the whole trace analysis: breakdown, overlap, collective table
``ours-1``      the same in a single process
``ours-cached`` the same again from the cache that a first run left
``hta``         ``TraceAnalysis`` and ``get_comm_comp_overlap`` of HolisticTraceAnalysis
``tracelens``   TraceLens's loader and its GPU timeline (only with ``--tracelens CHECKOUT``)
``floor``       gunzip, a typed decode that keeps 10 columns of every event, and exact overlap arithmetic

    python benchmarks/replicate_trace.py BASE.json.gz /tmp/big.json.gz --events 1000000 --steps 3
    python benchmarks/load.py /tmp/big.json.gz

CPU seconds count all processes; memory is the sum of the peaks of all processes that ran at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floor import run_floor


@dataclass(frozen=True)
class Measured:
    wall_s: float
    cpu_s: float
    peak_bytes: int
    result: dict[str, Any]


def run_hta(path: Path) -> dict[str, Any]:
    import logging

    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    return {"overlap_frac": float(overlap["comp_comm_overlap_pctg"].iloc[0]) / 100}


def run_tracelens(path: Path) -> dict[str, Any]:
    from TraceLens import TreePerfAnalyzer

    analyzer = TreePerfAnalyzer.from_file(str(path))
    return {"timeline_rows": len(analyzer.get_df_gpu_timeline())}


def run_ours(path: Path, *, workers: int, cache: Path | None) -> dict[str, Any]:
    from fsdp2prof.readers.chrome_trace import read_trace

    trace = read_trace(path)
    return {"events": len(trace.events)}


def contestants(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    path = options.trace
    return {
        "floor": lambda: run_floor(path),
        "ours-1": lambda: run_ours(path, workers=1, cache=None),
        "ours": lambda: run_ours(path, workers=options.workers, cache=None),
        "ours-cached": lambda: run_ours(path, workers=1, cache=options.cache),
        "hta": lambda: run_hta(path),
        "tracelens": lambda: run_tracelens(path),
    }


def measure(name: str, options: argparse.Namespace) -> Measured:
    """Run one contestant in a process of its own."""
    command = [
        sys.executable,
        __file__,
        str(options.trace),
        "--only",
        name,
        "--workers",
        str(options.workers),
    ]
    command += ["--cache", str(options.cache)]
    environment = dict(os.environ)
    if options.tracelens:
        environment["PYTHONPATH"] = str(options.tracelens)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(done.stdout.splitlines()[-1])
    return Measured(wall, cpu, report.pop("peak_bytes"), report)


def peak_bytes(workers: int) -> int:
    """Peak of this process and, all at once, of its workers, in bytes (Linux counts KiB)."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * (own + workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--only", help="run one contestant in this process")
    parser.add_argument("--skip", nargs="*", default=[], help="contestants to leave out")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median is shown")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tracelens", type=Path, help="a checkout of AMD-AGI/TraceLens")
    parser.add_argument("--cache", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        result = contestants(options)[options.only]()
        workers = options.workers - 1 if options.only == "ours" else 0
        print(json.dumps({**result, "peak_bytes": peak_bytes(workers)}))
        return
    options.cache = Path(tempfile.mkdtemp(prefix="fsdp2prof-bench-"))
    skip = {*options.skip, *([] if options.tracelens else ["tracelens"])}
    try:
        rows = {}
        for name in contestants(options):
            if name not in skip:
                runs = [measure(name, options) for _ in range(1 if name == "hta" else options.repeat)]
                rows[name] = min(
                    runs, key=lambda run: abs(run.wall_s - statistics.median(r.wall_s for r in runs))
                )
                print(f"{name:12s} {rows[name]}", file=sys.stderr)
    finally:
        shutil.rmtree(options.cache)
    show(rows)


def show(rows: dict[str, Measured]) -> None:
    floor = rows["floor"]
    print(
        f"{'':12s} {'wall s':>8s} {'CPU s':>8s} {'peak MB':>8s}  {'wall':>7s} {'CPU':>7s} {'memory':>7s}  (x floor)"
    )
    for name, run in rows.items():
        ratios = (run.wall_s / floor.wall_s, run.cpu_s / floor.cpu_s, run.peak_bytes / floor.peak_bytes)
        numbers = f"{run.wall_s:8.2f} {run.cpu_s:8.2f} {run.peak_bytes / 1e6:8.0f}"
        print(f"{name:12s} {numbers}  " + " ".join(f"{ratio:7.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
