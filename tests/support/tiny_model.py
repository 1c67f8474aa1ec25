"""The model of ``examples/train_tiny_fsdp2.py`` as an estimator's factory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from support.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_fsdp2.py"


def factory():
    script = load_script(SCRIPT)
    return script.TinyTransformer(vocab=1024, dim=128, layers=4, heads=4), loss, batch


def batch(batch_size: int, seq_len: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1024, (batch_size, seq_len + 1), device=device)


KEPT: dict[str, torch.Tensor] = {}
"""The script's variables: they keep a step's tensors until the next step assigns them."""


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    KEPT["tokens"] = tokens
    KEPT["logits"] = logits = model(tokens[:, :-1])
    KEPT["loss"] = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    return KEPT["loss"]
