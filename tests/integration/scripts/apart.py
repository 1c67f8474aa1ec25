"""Trains with a first rank that takes longer than the others, which with ``--alone`` do not wait for it."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from _common import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 16
SLOW_S = 0.05


def main() -> None:
    with process_group() as device:
        ranks, alone = dist.get_world_size(), "--alone" in sys.argv
        mesh = init_device_mesh(
            device, (ranks, 1) if alone else (1, ranks), mesh_dim_names=("apart", "shard")
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            if dist.get_rank() == 0:
                time.sleep(SLOW_S)
            loss = model(torch.ones(2, 8, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # One write a line: the ranks share the stream.
            sys.stdout.write(f"rank {dist.get_rank()} step {step} {loss.item().hex()}\n")


if __name__ == "__main__":
    main()
