"""Profiles itself all the time; every rank notes the last loss and which ranges each of its traces holds."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile, schedule


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--schedule", nargs=3, type=int, default=(1, 1, 2), help="wait, warm-up, active")
    args = parser.parse_args()
    traces: list[Path] = []

    def write(profiler: profile) -> None:
        traces.append(args.folder / f"{dist.get_rank()}-{len(traces)}.json")
        profiler.export_chrome_trace(str(traces[-1]))

    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wait, warmup, active = args.schedule
        plan = schedule(wait=wait, warmup=warmup, active=active)
        with profile(schedule=plan, on_trace_ready=write) as profiler:
            for _ in range(args.steps):
                loss = model(batch()).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
        notes = {"loss": loss.item().hex()}
        for path in traces:
            events = json.loads(path.read_text())["traceEvents"]
            notes[path.name] = Counter(
                event["name"] for event in events if event.get("cat") == "user_annotation"
            )
        (args.folder / f"notes-{dist.get_rank()}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
