"""Activation checkpointing of a model's blocks: none, full, every K-th, or selective by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.policy import PolicySpec

__all__ = ["checkpoint_blocks"]

_MATMUL = torch.ops.aten.mm.default
_SAVED = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def checkpoint_blocks(root: nn.Module, blocks: tuple[str, ...], policy: PolicySpec) -> None:
    """Replace the blocks that ``policy.ac`` asks for by checkpointed ones, in place.

    Raises ``ModelError`` if the model has no blocks.
    """
    if policy.ac == "none":
        return
    if not blocks:
        raise ModelError(f"ac={policy.ac} needs a model with repeated blocks; this one has none")
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False)
    if policy.ac == "op":
        wrap = partial(wrap, context_fn=_selective_contexts)
    every = policy.ac_every or 1
    for fqn in blocks[every - 1 :: every]:
        parent, _, name = fqn.rpartition(".")
        root.get_submodule(parent).register_module(name, wrap(root.get_submodule(fqn)))


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_EverySecondMatmul())  # type: ignore[no-untyped-call]


class _EverySecondMatmul:
    """Save attention, reduce-scatters and every other matrix product of one block; recompute the rest.

    The operator-selective policy of torchtitan: the first, third, ... ``mm`` of the forward are kept.
    """

    def __init__(self) -> None:
        self._matmuls: Counter[bool] = Counter()

    def __call__(
        self, context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operator is _MATMUL:
            self._matmuls[context.is_recompute] += 1
            keep = self._matmuls[context.is_recompute] % 2 == 1
        else:
            keep = operator in _SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
