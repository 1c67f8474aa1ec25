"""Models, batches and ways to shard them, right and wrong, for the parity check."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM = 13, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 8)
        self.down = nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Rows that no number of ranks divides, a tied head, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def model() -> tuple[nn.Module, Any]:
    return Tower(), loss


def batch(index: int, rank: int, world_size: int) -> Tensor:
    return torch.randint(VOCAB, (2, 7))


def other_batch_on_rank_1(index: int, rank: int, world_size: int) -> Tensor:
    return (
        torch.randint(VOCAB, (2, 7))
        if os.environ.get("RANK") != "1"
        else torch.zeros(2, 7, dtype=torch.int64)
    )


def other_weights_on_rank_1() -> tuple[nn.Module, Any]:
    made = Tower()
    if os.environ.get("RANK") == "1":
        nn.init.zeros_(made.head.weight)
    return made, loss


def _data(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def _shard(module: Any, mesh: DeviceMesh, **options: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def in_bf16(module: Any, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _shard(module, _data(mesh), mp_policy=policy)


def tensor_parallel(module: Any, mesh: DeviceMesh) -> None:
    for layer in module.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _shard(module, _data(mesh))


def parameter_left_out(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh), ignored_params={module.layers[2].up.weight})


def wrong_divide_factor(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh))
    for part in (*module.layers, module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


def missing_sync(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh))
    module.set_requires_gradient_sync(False)


def wrong_dimension(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, mesh["dp_shard"])


def that_fails(module: Any, mesh: DeviceMesh) -> None:
    raise ValueError("no such\nlayer")
