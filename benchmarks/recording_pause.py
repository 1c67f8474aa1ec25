"""How long a training pauses while its trace is stopped and written, by the number of events in it.

    python benchmarks/recording_pause.py [--operators 2000,100000,200000] [--json pauses.json]

One rank traces one step of small operators, in a process of its own for each number of them; its manifest
has the pause. Beside it, in a process of its own too, ``torch.profiler`` traces the same and exports a
``.json.gz`` into the run's folder: what a training pauses without the recorder. Printed are seconds of both,
seconds per 100,000 events and the growth from one row to the next: 1 where the pause is linear in the events.
An operator makes five.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_EVENT = b'"ph": "X"'


class Plain:
    """``torch.profiler`` around the third step; :attr:`pause_s` is the time of its stop and export."""

    def __init__(self, folder: Path) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._folder, self._step, self.pause_s = folder, 0, 0.0

    def step(self) -> None:
        """End a step."""
        self._step += 1
        if self._step == TRACED:
            self._profiler.start()
        elif self._step == TRACED + 1:
            begun = time.monotonic()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / "plain.json.gz"))
            self.pause_s = time.monotonic() - begun


TRACED = 2
"""The step that is traced."""


def train(folder: Path, operators: int, *, plain: bool) -> None:
    """Train four steps on one rank; the third of them is traced."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fsdp2prof import Recorder

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small = torch.zeros(4)
    with ExitStack() as stack:
        recorder: Any
        if plain:
            recorder = Plain(folder.parent)
        else:
            recorder = stack.enter_context(Recorder(folder, wait=1, warmup=1, active=1, memory=False))
        for step in range(4):
            for _ in range(operators if step == TRACED else 1):
                small.add_(1)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    dist.destroy_process_group()
    if plain:
        (folder.parent / "plain.txt").write_text(str(recorder.pause_s))


def measured(operators: int) -> dict[str, Any]:
    """Train in a process of its own; return the events in the trace, its bytes and the pause."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, __file__, "--train", str(run), "--operators", str(operators)]
        subprocess.run(command, check=True)
        subprocess.run([*command, "--plain"], check=True)
        plain_s = float(Path(folder, "plain.txt").read_text())
        [rank] = run.glob("rank-*")
        manifest = json.loads((rank / "manifest.json").read_text())
        with gzip.open(rank / "trace.json.gz") as trace:
            found = sum(line.count(_EVENT) for line in trace)
    [pause] = manifest["pauses"]
    return {
        "events": found,
        "pause_s": pause["duration_ns"] / 1e9,
        "plain_s": plain_s,
        "file_bytes": pause["file_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", default="2000,100000,200000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, int(args.operators), plain=args.plain)
        return
    rows = [measured(int(number)) for number in args.operators.split(",")]
    before: dict[str, Any] | None = None
    for row in rows:
        rate = 1e5 * row["pause_s"] / row["events"]
        line = f"{row['events']:>9,} events: {row['pause_s']:6.1f} s, {rate:.2f} s per 100,000"
        line += (
            f"; torch.profiler alone {row['plain_s']:6.1f} s ({row['plain_s'] / row['pause_s']:.2f} times)"
        )
        if before is not None:
            growth = (row["pause_s"] / before["pause_s"]) / (row["events"] / before["events"])
            line += f", growth {growth:.2f}"
        print(line, flush=True)
        before = row
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
