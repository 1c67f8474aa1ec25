"""Trains until a given step, where one rank raises, exits, is killed, or waits for a signal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard


def end(how: str, ready: Path | None) -> None:
    if how == "raise":
        raise ValueError("no such token")
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        if ready is not None:
            threading.Timer(1, ready.touch).start()
        store.get("never")  # in C++: no Python signal handler runs
    if ready is not None:
        ready.touch()
    time.sleep(240)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("raise", "exit", "kill", "wait", "hang"), required=True)
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--rank", type=int, default=-1, help="which rank does it; -1 is every rank")
    parser.add_argument("--ready", type=Path, help="file to create while waiting")
    args = parser.parse_args()
    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(args.at_step + 1):
            loss = model(batch()).pow(2).mean()
            if step == args.at_step and args.rank in (-1, dist.get_rank()):
                end(args.how, args.ready)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
