"""Trains three steps, then ends badly in one way, while a thread dumps the Flight Recorder every 20 ms."""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import DIM, Block, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

EVERY_S, ODD = 0.02, 1
_ONE_AT_A_TIME = threading.Lock()


class Uneven(nn.Module):
    """Layers of different sizes, of which one can be left out."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden=DIM * (1 if alike else n + 1)) for n in range(3))
        self.head = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: torch.Tensor, left_out: int = -1, stop_before: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == stop_before:
                time.sleep(60)
            if number != left_out:
                x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def dump(folder: Path) -> None:
    """Write the dump as a pickle, or as JSON for odd ranks; whole or not at all."""
    rank = dist.get_rank()
    recorder: Any = torch._C._distributed_c10d
    temporary = folder / f".{rank}"
    with _ONE_AT_A_TIME:
        if rank % 2:
            temporary.write_bytes(recorder._dump_fr_trace_json())
        else:
            temporary.write_bytes(recorder._dump_fr_trace(includeStackTraces=False))
        temporary.replace(folder / f"nccl_trace_rank_{rank}")


def keep_dumping(folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        dump(folder)
        time.sleep(EVERY_S)
    os._exit(3)


def end_badly(how: str, model: Uneven, x: torch.Tensor, dumps: Path) -> None:
    odd = dist.get_rank() == ODD
    if how == "layer":
        model(x, stop_before=2 if odd else -1)
    if how == "skip":
        model(x, left_out=1 if odd else -1)
    if how == "sleep" and odd:
        time.sleep(60)
    if how == "leave" and odd:
        (dumps / f"nccl_trace_rank_{ODD}").unlink(missing_ok=True)
        os._exit(0)
    first, second = [torch.ones(8), torch.ones(2, 3)]
    if how == "shape" and odd:
        first = torch.ones(9)
    if how == "reorder" and odd:
        first, second = second, first
    with _ONE_AT_A_TIME:  # gloo aborts the process as soon as sizes differ: nothing may come between
        work = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    dump(dumps)
    for one in work:
        one.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--how", choices=("layer", "skip", "sleep", "leave", "shape", "reorder"), required=True
    )
    parser.add_argument("--dumps", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--alike", action="store_true", help="layers of the same size")
    args = parser.parse_args()
    with process_group() as device:
        mesh = shard_mesh()
        model = Uneven(args.alike).to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.ones(4, DIM, device=device)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        args.dumps.mkdir(parents=True, exist_ok=True)
        if args.how != "leave" or dist.get_rank() != ODD:
            threading.Thread(target=keep_dumping, args=(args.dumps, args.seconds), daemon=True).start()
        dist.barrier()
        try:
            end_badly(args.how, model, x, args.dumps)
        finally:
            time.sleep(60)


if __name__ == "__main__":
    main()
