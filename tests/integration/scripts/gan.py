"""Generator and discriminator, wrapped each, trained in turn: two backwards and two optimizers a step."""

from __future__ import annotations

import torch
from _common import BATCH, DIM, Block, arguments, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard


class Stack(nn.Module):
    """Some layers and a projection."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        generator, critic = Stack(DIM).to(device), Stack(1).to(device)
        for model in (generator, critic):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (critic, generator)]
        ones = torch.ones(BATCH, 1, device=device)
        for _ in range(args.steps):
            noise, real = (torch.randn(BATCH, DIM, device=device) for _ in range(2))
            told_apart = nn.functional.mse_loss(critic(generator(noise).detach()) - critic(real), ones)
            told_apart.backward()  # type: ignore[no-untyped-call]
            optimizers[0].step()
            optimizers[0].zero_grad()
            taken_for_real = nn.functional.mse_loss(critic(generator(noise)), ones)
            taken_for_real.backward()  # type: ignore[no-untyped-call]
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
