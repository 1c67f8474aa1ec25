"""A model ready to be sharded: a module on the meta device and what training it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp2prof.estimators.models.catalog import TransformerConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from fsdp2prof.estimators.spec.policy import Loss

__all__ = ["ADAPTERS", "Batch", "LayerPattern", "Model"]

ADAPTERS = (".lora_a.", ".lora_b.")
"""In the names of low-rank adapters' parameters."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """How the blocks of a model repeat: after the first ``start`` of them, every ``period`` blocks."""

    start: int = 0
    period: int = 1

    @classmethod
    def of(cls, kinds: Sequence[object]) -> LayerPattern:
        """The pattern of a list of kinds with the fewest blocks that describe it."""
        count = len(kinds)
        best = cls(0, max(count, 1))
        for period in range(1, count):
            breaks = [index for index in range(count - period) if kinds[index] != kinds[index + period]]
            start = breaks[-1] + 1 if breaks else 0
            if start + period < best.start + best.period:
                best = cls(start, period)
        return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one micro-batch passes to the model and to the loss."""

    args: tuple[Tensor, ...] = ()
    """Positional arguments of the model's forward."""
    targets: Tensor | None = None
    """What the loss compares with."""
    reference: Tensor | None = None
    """Log-probabilities (B, S) of the targets by a reference model, for the losses that use them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model ready to be sharded: the module and what training it needs."""

    name: str
    module: nn.Module
    """On the meta device, in the original dtype, parameters frozen as the policy asks by the caller."""
    blocks: tuple[str, ...]
    """FQNs of the repeated layers in forward order; empty if none repeat."""
    towers: tuple[str, ...] = ()
    """FQNs of repeated layers beside them (a vision tower's); ``block`` wraps these too."""
    idle: tuple[str, ...] = ()
    """Modules that the batches do not pass through: their parameters get no gradient."""
    experts: tuple[str, ...] = ()
    """Modules whose parameters are experts, stacked along dimension 0."""
    expert_ranks: int = 1
    """Ranks that these experts are divided among; the module holds this rank's."""
    pattern: LayerPattern = LayerPattern()
    config: TransformerConfig | None
    """Shape of the transformer, if known."""
    make_batch: Callable[[int, int, torch.device], Batch]
    """(batch size, sequence length, device) -> one micro-batch."""
    loss: Callable[[nn.Module, Batch, Loss], Tensor]
    """(module, batch, ``PolicySpec.loss``) -> scalar loss; runs the forward.

    Raises ``ModelError`` for a loss that the model cannot have."""
    tensor_parallel: Callable[[bool], dict[str, ParallelStyle]] | None = None
    """(loss parallel) -> plan of ``parallelize_module`` for the whole model; ``None`` without one."""
    tensor_parallel_dim: Callable[[str], int | None] | None = None
    """Parameter FQN -> tensor dimension that plan shards, ``None`` for replicated."""
    notes: tuple[str, ...] = ()
    """What an estimate of it rests on, one sentence each."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters, those of experts on other ranks among them."""
        here = sum(parameter.numel() for parameter in self.module.parameters())
        if self.expert_ranks == 1:
            return here
        modules = [self.module.get_submodule(fqn) for fqn in self.experts]
        local = sum(parameter.numel() for module in modules for parameter in module.parameters())
        return here + (self.expert_ranks - 1) * local
