"""What a Hugging Face model makes of its logits after the head: capped (Gemma 2) or scaled (Granite, Cohere).

A loss in pieces runs in the head's place, so that the model would cap or scale the loss; these functions have
it leave that out, and do it to each piece's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["taken_over"]

_CAP, _DIVISOR, _FACTOR = "final_logit_softcapping", "logits_scaling", "logit_scale"


@contextmanager
def taken_over(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Have a model leave its logits as its head makes them, and give what it would have made of them."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap, divisor = getattr(config, _CAP, None), getattr(config, _DIVISOR, None)
    factor = getattr(module, _FACTOR, None)
    factor = factor if isinstance(factor, int | float) else None
    replaced: list[tuple[Any, str, Any, Any]] = [
        (config, _CAP, cap, None),
        (config, _DIVISOR, divisor, 1.0),
        (module, _FACTOR, factor, 1.0),
    ]
    replaced = [(owner, name, own, neutral) for owner, name, own, neutral in replaced if own is not None]
    for owner, name, _, neutral in replaced:
        setattr(owner, name, neutral)

    def after(logits: Tensor) -> Tensor:
        if divisor is not None:
            logits = logits / divisor
        if factor is not None:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    try:
        yield after
    finally:
        for owner, name, own, _ in replaced:
            setattr(owner, name, own)
