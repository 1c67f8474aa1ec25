"""How long a training pauses while its trace is stopped and written, by the number of events in it.

    python benchmarks/recording_pause.py [--operators 2000,100000,200000] [--json pauses.json]

One rank traces one step of small operators, in a process of its own for each number of them; its manifest
has the pause. Printed are seconds, seconds per 100,000 events and the growth from one row to the next: 1
where the pause is linear in the events. An operator makes five.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_EVENT = b'"ph": "X"'


def train(folder: Path, operators: int) -> None:
    """Train three steps on one rank; the last of them is traced."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fsdp2prof import Recorder

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small = torch.zeros(4)
    with Recorder(folder, wait=1, warmup=1, active=1, memory=False) as recorder:
        for step in range(4):
            for _ in range(operators if step == 2 else 1):
                small.add_(1)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    dist.destroy_process_group()


def measured(operators: int) -> dict[str, Any]:
    """Train in a process of its own; return the events in the trace, its bytes and the pause."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        subprocess.run(
            [sys.executable, __file__, "--train", str(run), "--operators", str(operators)], check=True
        )
        [rank] = run.glob("rank-*")
        manifest = json.loads((rank / "manifest.json").read_text())
        with gzip.open(rank / "trace.json.gz") as trace:
            found = sum(line.count(_EVENT) for line in trace)
    [pause] = manifest["pauses"]
    return {"events": found, "pause_s": pause["duration_ns"] / 1e9, "file_bytes": pause["file_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", default="2000,100000,200000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, int(args.operators))
        return
    rows = [measured(int(number)) for number in args.operators.split(",")]
    before: dict[str, Any] | None = None
    for row in rows:
        rate = 1e5 * row["pause_s"] / row["events"]
        line = f"{row['events']:>9,} events: {row['pause_s']:6.1f} s, {rate:.2f} s per 100,000"
        if before is not None:
            growth = (row["pause_s"] / before["pause_s"]) / (row["events"] / before["events"])
            line += f", growth {growth:.2f}"
        print(line, flush=True)
        before = row
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
