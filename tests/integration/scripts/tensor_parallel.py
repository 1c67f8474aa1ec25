"""Tensor parallelism in pairs, sharded over the others, with numbers that the script adds up and shares."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _common import DIM, Block, arguments, process_group, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(Block(), Block()).to(device)
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def loss() -> torch.Tensor:
            counted = torch.ones(2, dtype=torch.float64)
            dist.all_reduce(counted)
            dist.all_gather([torch.empty_like(counted) for _ in range(dist.get_world_size())], counted)
            result: torch.Tensor = model(torch.randn(4, DIM)).pow(2).mean()
            return result

        train(optimizer, args.steps, loss)


if __name__ == "__main__":
    main()
