"""Trains a little model for four steps; before the last, odd ranks stand still in ways of their own.

Rank 1 waits for a worker of its data loader that stands still, rank 2 keeps Python's lock inside C, further
ranks go on and wait for them. Run: torchrun --nproc-per-node 3 pausing.py --seconds 12.
"""

import argparse
import ctypes
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

LAST = 3


class Batches(Dataset[torch.Tensor]):
    """Random rows; to make those of the last step takes rank 1 long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds if dist.get_rank() == 1 else 0.0

    def __len__(self) -> int:
        return LAST + 1

    def __getitem__(self, step: int) -> torch.Tensor:
        if step == LAST:
            time.sleep(self.seconds)
        return torch.randn(16)


def keep_the_lock(seconds: int) -> None:
    """Stand still inside C; no other thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, required=True)
    seconds = parser.parse_args().seconds
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(DataLoader(Batches(seconds), num_workers=1, prefetch_factor=1)):
        if step == LAST and dist.get_rank() == 2:
            keep_the_lock(seconds)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
