"""Trains in steps of the kind that ``--kind`` names: more than one forward and one backward of one model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _common import DIM, Tower, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard


class Headed(nn.Module):
    """Its norm and head are one unit; a loss in pieces runs them once a piece."""

    def __init__(self, pieces: int = 2) -> None:
        super().__init__()
        self.tower = Tower(2)
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, DIM, bias=False)
        self.pieces = pieces

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.tower.embedding(tokens)
        for layer in self.tower.layers:
            x = layer(x)
        return x

    def loss(self, tokens: torch.Tensor) -> Any:
        """Mean square of the head's output, piece by piece."""
        pieces = self(tokens).chunk(self.pieces, dim=1)
        return torch.stack([self.output(self.norm(piece)).pow(2).mean() for piece in pieces]).sum()


class Two(nn.Module):
    """Two projections that run and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.other = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[1](self.layers[0](x))


def sharded(model: Any, layers: Any, *together: Any, **options: Any) -> Any:
    """Shard the layers, the modules that are one unit, and the root."""
    for layer in layers:
        fully_shard(layer, mesh=shard_mesh(), **options)
    if together:
        fully_shard(list(together), mesh=shard_mesh())
    return fully_shard(model, mesh=shard_mesh(), **options)


def train(parameters: Any, steps: int, step: Callable[[int], None]) -> None:
    optimizer = torch.optim.SGD(list(parameters), lr=1e-2)
    for number in range(steps):
        step(number)
        optimizer.step()
        optimizer.zero_grad()


def rollouts(steps: int) -> None:
    """Eight forwards without gradients, then one trained one."""
    model = Tower(2)
    sharded(model, model.layers)

    def step(_: int) -> None:
        with torch.no_grad():
            for _ in range(8):
                model(batch())
        model(batch()).pow(2).mean().backward()

    train(model.parameters(), steps, step)


def evaluation(steps: int) -> None:
    """One forward of an evaluation behind each backward; the parameters are resharded by hand."""
    model: Any = Tower(2)
    sharded(model, model.layers)

    def step(_: int) -> None:
        model(batch()).pow(2).mean().backward()
        with torch.no_grad():
            model(batch())
        model.reshard()

    train(model.parameters(), steps, step)


def evaluation_now_and_then(steps: int) -> None:
    """An evaluation in every second step: no step stands for all."""
    model: Any = Tower(2)
    sharded(model, model.layers)

    def step(number: int) -> None:
        model(batch()).pow(2).mean().backward()
        if number % 2:
            with torch.no_grad():
                model(batch())
            model.reshard()

    train(model.parameters(), steps, step)


def reference(steps: int) -> None:
    """A frozen model beside the trained one, whose root the script reshards."""
    model: Any = Tower(2)
    frozen: Any = Tower(2).requires_grad_(False)
    sharded(model, model.layers)
    sharded(frozen, frozen.layers)

    def step(_: int) -> None:
        tokens = batch()
        with torch.no_grad():
            wanted = frozen(tokens)
        frozen.reshard()
        loss: Any = nn.functional.mse_loss(model(tokens), wanted)
        loss.backward()

    train(model.parameters(), steps, step)


def chunked_loss(steps: int) -> None:
    """The head runs once a piece, in two micro-batches."""
    model: Any = Headed()
    sharded(model, model.tower.layers, model.norm, model.output)

    def step(_: int) -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.loss(batch()).backward()

    train(model.parameters(), steps, step)


def kept(steps: int) -> None:
    """Parameters stay gathered between three micro-batches."""
    model: Any = Tower(2)
    sharded(model, model.layers)

    def step(_: int) -> None:
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            model.set_reshard_after_backward(number == 2)
            model(batch()).pow(2).mean().backward()

    train(model.parameters(), steps, step)


def two_of_three(steps: int) -> None:
    """Gradients are reduced after two of three micro-batches."""
    model: Any = Tower(2)
    sharded(model, model.layers)

    def step(_: int) -> None:
        for number in range(3):
            model.set_requires_gradient_sync(number > 0)
            model(batch()).pow(2).mean().backward()

    train(model.parameters(), steps, step)


def unused(steps: int) -> None:
    """Some trainable parameters take no part in the step."""
    model: Any = Two()
    sharded(model, [])

    def step(_: int) -> None:
        model(torch.randn(4, DIM)).pow(2).mean().backward()

    train(model.parameters(), steps, step)


def by_hand(steps: int) -> None:
    """The training gathers all layers before its forward."""
    model: Any = Tower(2)
    sharded(model, model.layers, reshard_after_forward=False)

    def step(_: int) -> None:
        for layer in model.layers:
            layer.unshard()
        model(batch()).pow(2).mean().backward()

    train(model.parameters(), steps, step)


KINDS = {
    one.__name__: one
    for one in (
        rollouts,
        evaluation,
        evaluation_now_and_then,
        reference,
        chunked_loss,
        kept,
        two_of_three,
        unused,
        by_hand,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    with process_group():
        KINDS[args.kind](args.steps)


if __name__ == "__main__":
    main()
