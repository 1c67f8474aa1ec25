"""Activation checkpointing inside wrapped layers: their forward runs again in backward."""

from __future__ import annotations

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
            fully_shard(model.layers[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).pow(2).mean())


if __name__ == "__main__":
    main()
