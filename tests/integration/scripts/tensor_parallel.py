"""Two-dimensional: tensor parallelism over two ranks, FSDP over the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _common import Tower, arguments, batch, device_type, process_group, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TP = 2


def main() -> None:
    args = arguments()
    with process_group() as device:
        shape = (dist.get_world_size() // TP, TP)
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp_shard", "tp"))
        model = Tower().to(device)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def loss() -> torch.Tensor:
            tokens = batch()
            logits: torch.Tensor = model(tokens)
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        train(optimizer, args.steps, loss)


if __name__ == "__main__":
    main()
