"""Model input: a built-in name, a Hugging Face ``config.json`` or ``package.module:factory``.

Every source ends in a :class:`Model`: a module on the meta device (no memory, no weights, no downloads)
with the layers FSDP wraps, a batch to feed it and a loss to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.builtin_models import TransformerConfig, builtin_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Batch", "Model", "ModelSpec"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Which model, by name.

    ``source`` is a built-in name (``llama3-8b``), a path of a Hugging Face ``config.json`` (or its folder),
    or ``package.module:factory``. The factory takes no argument and returns the module, or
    ``(module, loss)`` or ``(module, loss, batch)`` where ``loss(module, batch)`` gives the scalar and
    ``batch(batch_size, seq_len, device)`` what it is passed; it runs under ``torch.device("meta")``.
    """

    source: str
    layers: int | None = None
    """Number of blocks, instead of the model's own; built-ins and Hugging Face models only."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ModelError("model: empty; name a built-in, a config.json or package.module:factory")
        if self.layers is not None and self.layers < 1:
            raise ModelError(f"model: layers={self.layers} must be at least 1")

    @property
    def kind(self) -> str:
        """``huggingface``, ``factory`` or ``builtin``, from the look of ``source``."""
        if self.source.endswith(".json") or Path(self.source).is_dir():
            return "huggingface"
        return "factory" if ":" in self.source else "builtin"

    def with_layers(self, layers: int) -> ModelSpec:
        """The same model with another number of blocks."""
        return replace(self, layers=layers)

    def config(self) -> TransformerConfig:
        """Shape of a built-in model. Raises ``ModelError`` for any other source."""
        config = builtin_config(self.source)
        return config if self.layers is None else replace(config, layers=self.layers)

    def build(self, *, seq_len: int, orig_dtype: str = "float32") -> Model:
        """Build the model on the meta device with parameters of ``orig_dtype``.

        Raises ``ModelError`` for an unknown model, a configuration without an architecture, or a factory
        that fails or allocates memory.
        """
        if self.kind == "huggingface":
            from fsdp2prof.estimators.foreign_models import build_huggingface

            return build_huggingface(Path(self.source), orig_dtype, self.layers)
        if self.kind == "factory":
            from fsdp2prof.estimators.foreign_models import build_factory

            if self.layers is not None:
                raise ModelError(f"model {self.source}: a factory decides its own number of layers")
            return build_factory(self.source, orig_dtype)
        from fsdp2prof.estimators.builtin_models_build import build_builtin

        return build_builtin(self.config(), seq_len, orig_dtype)
