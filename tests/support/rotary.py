"""The rotary table of a built-in model, for tests that run it on real tensors."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["fill_rotary"]


def fill_rotary(module: Any) -> None:
    """Fill the table that construction and ``to_empty`` leave empty."""
    config = module.config
    width = config.head_dim if config.latent is None else config.latent.rope_dim
    with torch.device(module.rotary.device):
        steps = torch.arange(0, width, 2, dtype=torch.float32) / width
        positions = torch.arange(module.rotary.shape[-2], dtype=torch.float32)
        angles = torch.outer(positions, config.rope_theta**-steps)
        if config.family == "llama":
            module.rotary.copy_(torch.polar(torch.ones_like(angles), angles))
        else:
            angles = torch.cat((angles, angles), dim=-1)
            module.rotary.copy_(torch.stack((angles.cos(), angles.sin())))
