"""What recording costs, as ratios of median step times against the same training in the same benchmark.

    python benchmarks/recording_overhead.py [--rounds 5] [--nproc 2] [--backend gloo] [--json ratios.json]

Every round trains three times, in an order that turns from round to round: plainly, under
``fsdp2prof record`` and under ``torch.profiler`` with the same options and schedule. Printed are

- after: recorded / plain, over the steps after the recording ended, and recorded / torch.profiler, since a
  profiler that has run may leave costs of its own;
- before: recorded / plain, over the steps before it began;
- inside: recorded / torch.profiler, over the traced steps. The last of them is left out: with ``record`` the
  trace is written in it, with ``torch.profiler`` after it.

each for wall time and for rank 0's CPU time, which other work on the machine disturbs less. A ratio is the
median over rounds of the ratio of median step times, with the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from small_training import begin

BEFORE, ACTIVE, AFTER = 20, 6, 30
WARMUP, MEMORY_STEPS = 1, 1
FIRST_TRACED = BEFORE + WARMUP
AFTERWARDS = FIRST_TRACED + ACTIVE + MEMORY_STEPS
STEPS = AFTERWARDS + AFTER
SETTLING = 5
"""Steps left out at the start of a run and after the recording."""
MODES = ("plain", "record", "profiler")


def train(mode: str, output: Path, backend: str | None) -> None:
    """Train on every rank and write rank 0's step times in seconds: wall and CPU."""
    training = begin(128, backend)
    step = training.step
    times = profiled(step, output) if mode == "profiler" else timed(step)
    if training.rank == 0:
        output.write_text(json.dumps(times))
    training.end()


def timed(step: Callable[[], None], after: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """Run all steps; ``after`` runs between them and is not timed."""
    times: dict[str, list[float]] = {"wall": [], "CPU": []}
    for _ in range(STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        times["wall"].append(time.perf_counter() - wall)
        times["CPU"].append(time.process_time() - cpu)
        after()
    return times


def profiled(step: Callable[[], None], output: Path) -> dict[str, list[float]]:
    """Run all steps under ``torch.profiler`` as ``record`` would have set it up."""
    import torch
    from torch.profiler import profile, schedule

    def export(profiler: profile) -> None:
        profiler.export_chrome_trace(f"{output}.{os.environ['RANK']}.trace.json")

    with profile(
        schedule=schedule(wait=BEFORE, warmup=WARMUP, active=ACTIVE, repeat=1),
        record_shapes=True,
        on_trace_ready=export,
        acc_events=torch.__version__ >= "2.6",
    ) as profiler:
        return timed(step, profiler.step)


def run(mode: str, nproc: int, backend: str | None, folder: Path) -> dict[str, list[float]]:
    """Train once in processes of their own."""
    output = folder / f"{mode}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += [__file__, "--train", mode, "--output", str(output)]
    if backend is not None:
        command += ["--backend", backend]
    if mode == "record":
        options = ["--wait", BEFORE, "--warmup", WARMUP, "--active", ACTIVE, "--memory-steps", MEMORY_STEPS]
        recorder = [sys.executable, "-m", "fsdp2prof", "record", "-f", "-o", str(folder / "run")]
        command = [*recorder, *map(str, options), "--", *command]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"training ({mode}) failed:\n{done.stderr}")
    times: dict[str, list[float]] = json.loads(output.read_text())
    return times


def report(ratios: dict[tuple[str, str], list[float]], output: Path | None) -> None:
    """Print every ratio over the rounds; as JSON, too, where asked."""
    rows = [
        {
            "ratio": name,
            "clock": clock,
            "median": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "rounds": len(values),
        }
        for (name, clock), values in ratios.items()
    ]
    for row in rows:
        name = f"{row['ratio']}, {row['clock']}"
        span = f"({row['lowest']:.3f} .. {row['highest']:.3f}, {row['rounds']} rounds)"
        print(f"{name:<47} {row['median']:.3f}  {span}")
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))


def main() -> None:
    """Compare the three ways to train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--backend", help="nccl on GPUs and gloo on a CPU, unless given")
    parser.add_argument("--json", type=Path, help="write the ratios here, too")
    parser.add_argument("--train", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.output, args.backend)
        return
    comparisons = {
        "outside, after: recorded / plain": ("plain", slice(AFTERWARDS + SETTLING, STEPS)),
        "outside, after: recorded / torch.profiler": ("profiler", slice(AFTERWARDS + SETTLING, STEPS)),
        "outside, before: recorded / plain": ("plain", slice(SETTLING, BEFORE - 1)),
        "inside: recorded / torch.profiler": ("profiler", slice(FIRST_TRACED, FIRST_TRACED + ACTIVE - 1)),
    }
    ratios: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds):
        order = MODES[number % 3 :] + MODES[: number % 3]
        with tempfile.TemporaryDirectory() as folder:
            times = {mode: run(mode, args.nproc, args.backend, Path(folder)) for mode in order}
        for name, (base, window) in comparisons.items():
            for clock, recorded in times["record"].items():
                ratio = statistics.median(recorded[window]) / statistics.median(times[base][clock][window])
                ratios.setdefault((name, clock), []).append(ratio)
    report(ratios, args.json)


if __name__ == "__main__":
    main()
