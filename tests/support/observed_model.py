"""The model of ``tests/integration/scripts/observed.py`` as an estimator's factory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from support.scripts import load_script

SCRIPTS = Path(__file__).resolve().parents[1] / "integration" / "scripts"


def factory():
    common = load_script(SCRIPTS / "_common.py")
    return common.Tower(), loss, batch


def batch(batch_size: int, seq_len: int, device: torch.device) -> torch.Tensor:
    return torch.randint(48, (batch_size, seq_len + 1), device=device)


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
