"""``reshard_after_forward=False``: parameters stay gathered, so backward gathers nothing."""

from __future__ import annotations

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh, train
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).pow(2).mean())


if __name__ == "__main__":
    main()
