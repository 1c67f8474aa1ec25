"""Gradient accumulation: only the last micro-batch reduces its gradients."""

from __future__ import annotations

from typing import Any

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments(micro_batches=3)
    with process_group() as device:
        mesh = shard_mesh()
        model: Any = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(args.steps):
            for micro_batch in range(args.micro_batches):
                model.set_requires_gradient_sync(micro_batch == args.micro_batches - 1)
                (model(batch()).pow(2).mean() / args.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
