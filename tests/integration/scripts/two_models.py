"""Two wrapped models, trained together by an optimizer each: one training step steps both."""

from __future__ import annotations

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        actor, critic = Tower(layers=2).to(device), Tower(layers=3).to(device)
        for model in (actor, critic):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(args.steps):
            tokens = batch()
            loss = nn.functional.mse_loss(actor(tokens), critic(tokens))
            loss.backward()
            actor_optimizer.step()
            critic_optimizer.step()
            actor_optimizer.zero_grad()
            critic_optimizer.zero_grad()


if __name__ == "__main__":
    main()
