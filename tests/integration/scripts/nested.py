"""Nested wrapping: the linears of a block, the block around them, and the model around all."""

from __future__ import annotations

from typing import Any

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh, train
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer.up, mesh=mesh, mp_policy=policy)
            fully_shard(layer.down, mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).float().pow(2).mean())


if __name__ == "__main__":
    main()
