"""A model ready to be sharded: a module on the meta device and what training it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp2prof.estimators.models.catalog import TransformerConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Batch", "Model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one micro-batch passes to the model and to the loss."""

    args: tuple[Tensor, ...] = ()
    """Positional arguments of the model's forward."""
    targets: Tensor | None = None
    """What the loss compares with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model ready to be sharded: the module and what training it needs."""

    name: str
    module: nn.Module
    """On the meta device, in the original dtype, parameters frozen as the policy asks by the caller."""
    blocks: tuple[str, ...]
    """FQNs of the repeated layers in forward order; empty if none repeat."""
    config: TransformerConfig | None
    """Shape of the transformer, if known."""
    make_batch: Callable[[int, int, torch.device], Batch]
    """(batch size, sequence length, device) -> one micro-batch."""
    loss: Callable[[nn.Module, Batch, int | None], Tensor]
    """(module, batch, chunks or None) -> scalar loss; runs the forward. Chunks: ``PolicySpec.loss_chunks``.

    Raises ``ModelError`` if the model cannot chunk its loss."""
    tensor_parallel: Callable[[bool], dict[str, ParallelStyle]] | None = None
    """(loss parallel) -> plan of ``parallelize_module`` for the whole model; ``None`` without one."""
    tensor_parallel_dim: Callable[[str], int | None] | None = None
    """Parameter FQN -> tensor dimension that plan shards, ``None`` for replicated."""
