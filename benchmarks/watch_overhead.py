"""What a line a step costs: ``record --watch`` on and off within one training, block by block.

    python benchmarks/watch_overhead.py [--blocks 40] [--steps 25] [--nproc 2] [--json ratio.json]

Blocks of steps alternate: without lines, with, with, without. Printed are of rank 0 the ratio with / without
of the median step, over groups of four blocks, for wall time and CPU time; the same of neighbouring blocks
that are both without; and the CPU time that a line takes, measured around it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_training import begin, quartiles


def train(output: Path, blocks: int, steps: int) -> None:
    """Train on every rank; rank 0 writes the medians of its blocks and the cost of a line."""
    from fsdp2prof.manifest import StepInfo
    from fsdp2prof.recorder.rank.watching import StepLines

    training = begin(256)
    folder = output.parent / f"rank-{training.rank:05d}"
    folder.mkdir(exist_ok=True)
    medians: list[dict[str, float]] = []
    lines_s: list[float] = []
    for block in range(-1, blocks):  # the first one warms up
        lines = StepLines(folder) if block % 4 in (1, 2) else None
        if lines is not None:
            lines.begin(training.device, blocking=True)
        wall, cpu = [], []
        for number in range(steps):
            start, start_cpu = time.time_ns(), time.process_time()
            training.step()
            if lines is not None:
                before = time.thread_time()
                lines.end_step(StepInfo(step=number, start_ns=start, duration_ns=time.time_ns() - start))
                lines_s.append(time.thread_time() - before)
            wall.append((time.time_ns() - start) / 1e9)
            cpu.append(time.process_time() - start_cpu)
        if lines is not None:
            lines.end()
        if block >= 0:
            medians.append({"wall": statistics.median(wall), "CPU": statistics.median(cpu)})
    if training.rank == 0:
        output.write_text(json.dumps({"blocks": medians, "line_s": statistics.median(lines_s)}))
    training.end()


def report(measured: dict[str, list[dict[str, float]]], line_s: float, output: Path | None) -> None:
    """Print the ratios; as JSON, too, where asked."""
    blocks = measured["blocks"]
    rows = []
    for clock in ("wall", "CPU"):
        times = [block[clock] for block in blocks]
        # without, with, with, without: a drift of the machine weighs on both alike
        groups = [times[at : at + 4] for at in range(0, len(times) - 3, 4)]
        with_lines = [(group[1] + group[2]) / (group[0] + group[3]) for group in groups]
        without = [after[0] / before[3] for before, after in itertools.pairwise(groups)]
        for name, ratios in (("with / without", with_lines), ("without / without", without)):
            low, median, high = quartiles(ratios)
            rows.append({"ratio": name, "clock": clock, "median": median, "low": low, "high": high})
            print(f"{name}, {clock:<4} {median:.4f}  (half of them {low:.4f} to {high:.4f})")
    step_s = statistics.median(block["wall"] for block in blocks)
    part = f"{line_s / step_s:.4%} of a step of {step_s * 1e3:.1f} ms"
    print(f"a line: {line_s * 1e6:.1f} us of CPU time, {part}")
    if output is not None:
        output.write_text(json.dumps({"ratios": rows, "line_s": line_s, "step_s": step_s}, indent=1))


def main() -> None:
    """Train once, with and without lines in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.blocks, args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "blocks.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.nproc), __file__, "--train", str(output)]
        command += ["--blocks", str(args.blocks), "--steps", str(args.steps)]
        subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)
        measured = json.loads(output.read_text())
    report(measured, measured["line_s"], args.json)


if __name__ == "__main__":
    main()
