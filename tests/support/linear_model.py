"""A model whose every byte under FSDP can be written down by hand."""

from __future__ import annotations

import torch
from torch import nn


class Linears(nn.Module):
    """Three square blocks and a head of 3 rows, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.head = nn.Linear(64, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().sum()


def batch(batch_size: int, seq_len: int, device: torch.device) -> torch.Tensor:
    return torch.randn(batch_size, seq_len, 64, device=device, dtype=torch.bfloat16)


def factory():
    return Linears(), loss, batch


def broken_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such target")


def broken():
    return Linears(), broken_loss, batch
