"""Forks a child in some steps, which leaves by ``sys.exit`` as a whole Python program would."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard


def fork(code: int) -> int:
    """Run a child that works with tensors and exits with ``code``; returns the code it left with."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print("child", (torch.ones(3) + 1).sum().item())
        sys.exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, nargs="+", required=True)
    args = parser.parse_args()
    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(9):
            loss = model(batch()).pow(2).mean()
            if step in args.at:
                print("exit code", fork(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print("loss", loss.item().hex())


if __name__ == "__main__":
    main()
