"""Trains models of several kinds side by side, all with dropout, and says what became of their parameters.

``--compiled`` trains one whose layers inductor compiled instead; with ``--pause`` rank 1 sleeps in a step.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _common import Tower, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

STEPS = 8


class Dropped(nn.Module):
    """A layer whose output is dropped in part."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.gelu(self.layer(x)), 0.2)


def sharded(
    device: str, *, checkpointed: bool = False, offloaded: bool = False, compiled: bool = False
) -> Any:
    mesh = shard_mesh()
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloaded else {}
    model = Tower().to(device)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(Dropped(layer)) if checkpointed else Dropped(layer)
        if compiled:
            model.layers[index].compile()
        fully_shard(model.layers[index], mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def checksum(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds")
    args = parser.parse_args()
    with process_group() as device:
        if args.compiled:
            models = {"compiled": sharded(device, compiled=True)}
        else:
            models = {
                "eager": sharded(device),
                "checkpointed": sharded(device, checkpointed=True),
                "offloaded": sharded(device, offloaded=True),
                "accumulated": sharded(device),
            }
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models.values()]
        for step in range(STEPS):
            if step == STEPS - 2 and dist.get_rank() == 1:
                time.sleep(args.pause)
            for name, model in models.items():
                micro_batches = 3 if name == "accumulated" else 1
                for micro_batch in range(micro_batches):
                    model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                    model(batch()).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, model in models.items():
            # One write a line: the ranks share the stream.
            sys.stdout.write(f"{name} {checksum(model)}\n")


if __name__ == "__main__":
    main()
