"""Tells FSDP2 something unusual, as ``--how`` names it, and trains."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def sharded(how: str) -> Any:
    """A tower and its layers; how each is cast and what is left out as asked."""
    model, mesh = Tower(), shard_mesh()
    for index, layer in enumerate(model.layers):
        cast = torch.bfloat16 if index else None
        policy = MixedPrecisionPolicy(
            param_dtype=cast, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        fully_shard(layer, mesh=mesh, mp_policy=policy if how == "precision" else MixedPrecisionPolicy())
    left_out: Any = {model.embedding.weight} if how == "ignored" else None
    fully_shard(model, mesh=mesh, ignored_params=left_out)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True)
    how = parser.parse_args().how
    with process_group():
        models = [sharded(how) for _ in range(2 if how == "roots" else 1)]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
        for step in range(10):
            for layer in models[0].layers if (how, step) == ("reshard", 2) else ():
                layer.set_reshard_after_forward(False)
            for micro_batch in range(3 if how == "sync" else 1):
                if how == "sync":
                    models[0].set_requires_gradient_sync(micro_batch != 1)
                losses: list[Any] = [model(batch()).pow(2).mean() for model in models]
                total: Any = torch.stack(losses).sum()
                total.backward()
            optimizer.step()
            optimizer.zero_grad()


main()
