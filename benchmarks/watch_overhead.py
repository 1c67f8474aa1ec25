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


def train(output: Path, blocks: int, steps: int) -> None:
    """Train on every rank; rank 0 writes the medians of its blocks and the cost of a line."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from fsdp2prof.manifest import StepInfo
    from fsdp2prof.recorder.watching import StepLines

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    dim = 2048 if cuda else 256
    layers = [nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(*layers).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(4, 64, dim, device=device)
    folder = output.parent / f"rank-{dist.get_rank():05d}"
    folder.mkdir(exist_ok=True)
    medians: list[dict[str, float]] = []
    lines_s: list[float] = []
    for block in range(-1, blocks):  # the first one warms up
        lines = StepLines(folder) if block % 4 in (1, 2) else None
        if lines is not None:
            lines.begin(device, blocking=True)
        wall, cpu = [], []
        for number in range(steps):
            start, start_cpu = time.time_ns(), time.process_time()
            model(data).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if lines is not None:
                before = time.thread_time()
                lines.end_step(StepInfo(step=number, start_ns=start, duration_ns=time.time_ns() - start))
                lines_s.append(time.thread_time() - before)
            if cuda:
                torch.cuda.synchronize()
            wall.append((time.time_ns() - start) / 1e9)
            cpu.append(time.process_time() - start_cpu)
        if lines is not None:
            lines.end()
        if block >= 0:
            medians.append({"wall": statistics.median(wall), "CPU": statistics.median(cpu)})
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"blocks": medians, "line_s": statistics.median(lines_s)}))
    dist.destroy_process_group()
    time.sleep(0.2)


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
            low, median, high = statistics.quantiles(ratios, n=4)
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
