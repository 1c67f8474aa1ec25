"""Forward and backward in a closure that the optimizer calls, as Lightning's Trainer has it."""

from __future__ import annotations

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def closure() -> torch.Tensor:
            loss = nn.functional.gelu(model(batch())).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        for _ in range(args.steps):
            optimizer.step(closure)


if __name__ == "__main__":
    main()
