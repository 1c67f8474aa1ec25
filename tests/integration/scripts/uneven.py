"""Dimensions that no number of ranks divides: shards are padded, short or empty."""

from __future__ import annotations

import torch
from _common import arguments, process_group, shard_mesh, train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        layers = (nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1), nn.Linear(1, 11))
        model = nn.Sequential(*layers).to(device)
        for layer in layers[:3]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(torch.randn(3, 5, device=device)).float().pow(2).mean())


if __name__ == "__main__":
    main()
