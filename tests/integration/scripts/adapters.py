"""A frozen base with low-rank adapters: some groups train nothing, some a little, one everything."""

from __future__ import annotations

from typing import Any

import torch
from _common import DIM, Tower, arguments, batch, process_group, shard_mesh, train
from torch import nn
from torch.distributed.fsdp import fully_shard


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        updated: torch.Tensor = self.base(x) + self.up(self.down(x))
        return updated


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        model: Any = Tower().requires_grad_(False)
        for layer in model.layers[1:]:
            layer.up = Adapted(layer.up)
        model.head = nn.Linear(DIM, model.head.out_features, bias=False)
        model.to(device)
        for layer in model.layers[1:]:
            fully_shard(layer.up.base, mesh=mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).pow(2).mean())


if __name__ == "__main__":
    main()
