"""Losses of models that are not ours, and how their failures are told."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.model import Batch

__all__ = ["logits_of_output", "one_line"]

_LONGEST = 300
"""Characters of another library's message that are shown."""


def logits_of_output(module: nn.Module, batch: Batch, chunks: int | None) -> Tensor:
    """Mean cross-entropy over fp32 logits of a model that returns them, or an output that holds them."""
    if chunks is not None:
        raise ModelError("loss=chunked:K is modelled for built-ins only")
    output = module(*batch.args)
    logits = output if isinstance(output, Tensor) else output.logits
    assert batch.targets is not None
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def one_line(error: BaseException) -> str:
    """An error of another library in one line of bounded length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
