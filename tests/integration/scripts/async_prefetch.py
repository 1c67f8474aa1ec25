"""Asynchronous all-gathers, with the modules to prefetch named explicitly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from _common import Tower, arguments, batch, process_group, shard_mesh, train
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = shard_mesh()
        model: Any = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model._set_unshard_async_op(True)
        for layer, following in pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).pow(2).mean())


if __name__ == "__main__":
    main()
