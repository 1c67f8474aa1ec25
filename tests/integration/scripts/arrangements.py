"""Arrangements of one model over two or four ranks: right ones, and two mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from _common import DIM, Tower, batch, shard_mesh, train_one_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

Loss = Callable[[int], torch.Tensor]
Made = tuple[Loss, list[torch.optim.Optimizer]]


def wrapped(model: Any, mesh: DeviceMesh | None = None, **policy: Any) -> Any:
    """Blocks, then the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh or shard_mesh(), **policy)
    return fully_shard(model, mesh=mesh or shard_mesh(), **policy)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def language_loss(model: Any) -> Loss:
    return lambda _: model(batch()).pow(2).mean()


def layer_lists() -> Made:
    """Blocks wrapped two by two, as one group."""
    model: Any = Tower(4)
    for first in (0, 2):
        fully_shard([model.layers[first], model.layers[first + 1]], mesh=shard_mesh())
    fully_shard(model, mesh=shard_mesh())
    return language_loss(model), [adam(model.parameters())]


def context_parallel() -> Made:
    """Sharded over the flattened dimensions, so that replicas of the context are reduced, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_shard_cp")
    model = wrapped(Tower(), mesh["dp_shard_cp"])
    return language_loss(model), [adam(model.parameters())]


def skipped_blocks() -> Made:
    """Stochastic depth: in every step another block is left out."""
    model = wrapped(Tower())

    def loss(step: int) -> torch.Tensor:
        x = model.embedding(batch())
        for number, layer in enumerate(model.layers):
            x = layer(x) if number != step % 3 else x
        logits: torch.Tensor = model.head(x)
        return logits.pow(2).mean()

    model.forward = lambda step: loss(step)
    return lambda step: model(step), [adam(model.parameters())]


def offloaded() -> Made:
    """Shards on the host."""
    model = wrapped(Tower(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return language_loss(model), [adam(model.parameters())]


def vision() -> Made:
    """Convolutions with a norm that keeps running statistics."""
    stages = [
        nn.Sequential(nn.Conv2d(3 if not i else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        for i in range(3)
    ]
    model: Any = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    for stage in stages:
        fully_shard(stage, mesh=shard_mesh())
    fully_shard(model, mesh=shard_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lambda _: model(torch.randn(4, 3, 8, 8)).pow(2).mean(), [optimizer]


def two_optimizers() -> Made:
    """Matrices by one, everything else by another, as with Muon."""
    model = wrapped(Tower())
    flat = [one for one in model.parameters() if one.ndim < 2]
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    return language_loss(model), [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), adam(flat)]


def in_backward() -> Made:
    """An optimizer a parameter, which steps as soon as the gradient is there."""
    model = wrapped(Tower())
    each = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def update(one: Any) -> None:
        each[one].step()
        one.grad = None

    for one in each:
        one.register_post_accumulate_grad_hook(update)
    return language_loss(model), []


def stages() -> Made:
    """Two pipeline stages of two ranks each, each stage with a part of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    whole: Any = Tower(4)
    last = mesh.get_local_rank("pp")
    part: Any = nn.Module()
    part.layers = whole.layers[2:] if last else whole.layers[:2]
    part.ends = whole.head if last else whole.embedding
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    part.forward = lambda x: run(x)
    fully_shard(part, mesh=mesh["dp_shard"])

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x if last else part.ends(x)
        for layer in part.layers:
            x = layer(x)
        return part.ends(x) if last else x

    return lambda _: part(torch.randn(2, 8, DIM) if last else batch()).pow(2).mean(), [
        adam(part.parameters())
    ]


class Experts(nn.Module):
    """This rank's half of four experts, as one parameter each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, DIM, DIM) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bld,edf->blf", x, self.up)


def experts() -> Made:
    """Experts on a mesh of their own (efsdp), everything else on all ranks."""
    world = shard_mesh()
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: Any = Tower()
    for layer in model.layers:
        layer.experts = Experts(4 // own["ep"].size())
        before = layer.forward
        layer.forward = lambda x, layer=layer, before=before: before(x) + layer.experts(x)
        fully_shard(layer.experts, mesh=own["efsdp"]).set_gradient_divide_factor(4.0)
        layer.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=world)
    fully_shard(model, mesh=world)
    return language_loss(model), [adam(model.parameters())]


def reduced_by_script() -> Made:
    """A parameter that FSDP ignores; a hook averages its gradient."""
    model: Any = Tower()
    scale = model.scale = nn.Parameter(torch.ones(DIM))
    scale.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh())
    fully_shard(model, mesh=shard_mesh(), ignored_params={scale})
    return lambda _: model(batch()).pow(2).mean() * scale.mean(), [adam(model.parameters())]


def average(parameter: nn.Parameter) -> None:
    """All-reduce a gradient over the ranks."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def seeds_alike() -> Made:
    """Replicas made from one seed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = wrapped(Tower(), mesh)
    return language_loss(model), [adam(model.parameters())]


def seeds_of_ranks() -> Made:
    """Mistake: every replica with weights of its own."""
    torch.manual_seed(int(os.environ["RANK"]) // 2)
    return seeds_alike()


def partly_covered() -> Made:
    """Mistake: blocks are wrapped and the root is not, so embedding and head are nobody's."""
    model: Any = Tower()
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh())
    return language_loss(model), [adam(model.parameters())]


WAYS = {
    one.__name__: one
    for one in (
        layer_lists,
        context_parallel,
        skipped_blocks,
        offloaded,
        vision,
        two_optimizers,
        in_backward,
        reduced_by_script,
        stages,
        experts,
        seeds_alike,
        seeds_of_ranks,
        partly_covered,
    )
}


if __name__ == "__main__":
    train_one_of(WAYS, by_step=True)
