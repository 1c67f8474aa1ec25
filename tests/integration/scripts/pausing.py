"""Trains a little model for four steps; rank 1 pauses in the last, and the others wait for it.

Run: torchrun --nproc-per-node 2 pausing.py --seconds 12.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def pause(seconds: float) -> None:
    """Stand still."""
    time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    seconds = parser.parse_args().seconds
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 3 and dist.get_rank() == 1:
            pause(seconds)
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
