"""What the training scripts of this folder share: a process group, a small model, a loop."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCAB, DIM, LAYERS, BATCH, LENGTH = 48, 16, 3, 2, 8


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, dim: int = DIM, hidden: int = 2 * DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Embedding, layers and head: what the head gives is the logits."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def arguments(**extra: int) -> argparse.Namespace:
    """Parse ``--steps`` and the extra integer options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--note", help="kept on the command line, for who reads it there")
    for name, default in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return parser.parse_args()


def device_type() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def process_group() -> Iterator[str]:
    """Start the default process group, seed, and leave it cleanly; yields the device type."""
    if device_type() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type() == "cuda" else "gloo")
    torch.manual_seed(0)
    yield device_type()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads may abort an interpreter that is already ending


def train_one_of(
    ways: Mapping[str, Callable[[], tuple[Callable[..., torch.Tensor], list[torch.optim.Optimizer]]]],
    *,
    by_step: bool = False,
) -> None:
    """Train four steps of the ``--way`` that the command line names; its loss may be given the step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=ways, required=True)
    way = parser.parse_args().way
    with process_group():
        loss, optimizers = ways[way]()
        for step in range(4):
            (loss(step) if by_step else loss()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()


def shard_mesh() -> DeviceMesh:
    """A one-dimensional mesh over all ranks."""
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def batch() -> torch.Tensor:
    """Random tokens of shape (BATCH, LENGTH)."""
    return torch.randint(VOCAB, (BATCH, LENGTH), device=device_type())


def train(optimizer: torch.optim.Optimizer, steps: int, loss: Callable[[], torch.Tensor]) -> None:
    """The usual loop: loss, backward, step, zero_grad."""
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
