"""The models and losses of the scripts that integration tests record, as an estimator's factories.

The scripts' batches are made where they are used and kept by nothing: so here, inside of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from support.scripts import load_script

COMMON = Path(__file__).resolve().parents[1] / "integration" / "scripts" / "_common.py"
common = load_script(COMMON)


def hsdp():
    return common.Tower(), partial(_fp32_loss, _tokens), _nothing


def accumulation():
    return common.Tower(), lambda model, _: model(_tokens()).pow(2).mean() / 3, _nothing


def checkpointing():
    model, loss, batch = never_reshard()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model, loss, batch


def never_reshard():
    return common.Tower(), lambda model, _: model(_tokens()).pow(2).mean(), _nothing


def uneven():
    layers = (nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1), nn.Linear(1, 11))
    return nn.Sequential(*layers), partial(_fp32_loss, lambda: torch.randn(3, 5)), _nothing


def _nothing(batch_size: int, seq_len: int, device: torch.device) -> None:
    """A batch that the loss does not need."""


def _tokens() -> Tensor:
    return torch.randint(common.VOCAB, (common.BATCH, common.LENGTH))


def _fp32_loss(make: Callable[[], Tensor], model: nn.Module, _: None) -> Tensor:
    return model(make()).float().pow(2).mean()
