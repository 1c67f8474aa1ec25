"""Modules used several times before a backward: a shared layer, two batches in one loss, another order."""

from __future__ import annotations

from typing import Any

import torch
from _common import BATCH, Tower, arguments, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Encoder(Tower):
    """Runs its last layer first, once more checkpointed, and its first layer last."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.layers
        x = last(self.embedding(tokens))
        x = checkpoint(last, middle(x), use_reentrant=False)
        logits: torch.Tensor = self.head(first(x))
        return logits.mean(1)


def main() -> None:
    args = arguments(micro_batches=3)
    with process_group() as device:
        mesh = shard_mesh()
        model: Any = Encoder().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not model.layers[0])
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(args.steps):
            for micro_batch in range(args.micro_batches):
                model.set_requires_gradient_sync(micro_batch == args.micro_batches - 1)
                left, right = model(batch()), model(batch())
                target = torch.arange(BATCH, device=device)
                loss: Any = torch.nn.functional.cross_entropy(left @ right.T, target)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
