"""Activation checkpointing of a model's blocks: none, full, every K-th, or selective by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.compiler.recompute import Recompute
from fsdp2prof.estimators.spec.policy import PolicySpec

__all__ = ["checkpoint_blocks", "recomputation"]

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)
_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


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
        saved = (_REDUCE_SCATTER, *(() if policy.recomputes_attention else _ATTENTION))
        contexts = partial(_selective_contexts, _MatmulCount(), saved, not policy.compile)
        wrap = partial(wrap, context_fn=contexts)
    every = policy.ac_every or 1
    for fqn in blocks[every - 1 :: every]:
        parent, _, name = fqn.rpartition(".")
        root.get_submodule(parent).register_module(name, wrap(root.get_submodule(fqn)))


def recomputation(blocks: tuple[str, ...], policy: PolicySpec) -> dict[str, Recompute]:
    """What the backward of each compiled block runs again. Raises as :func:`checkpoint_blocks`."""
    if policy.ac != "none" and not blocks:
        raise ModelError(f"ac={policy.ac} needs a model with repeated blocks; this one has none")
    mode: Recompute = "none"
    if policy.ac == "op":
        mode = "op_and_attention" if policy.recomputes_attention else "op"
    elif policy.ac != "none":
        mode = "full"
    every = policy.ac_every or 1
    return {fqn: mode if index % every == every - 1 else "none" for index, fqn in enumerate(blocks)}


@dataclass(slots=True)
class _MatmulCount:
    """Matrix products in a block's forward, once one has run."""

    total: int = 0


def _selective_contexts(count: _MatmulCount, saved: Collection[object], keep_last: bool) -> Any:
    policy = _EverySecondMatmul(count, saved, keep_last=keep_last)
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class _EverySecondMatmul:
    """Save attention, reduce-scatters and every other matrix product of one block; recompute the rest.

    The operator-selective policy of torchtitan: the first, third, ... ``mm`` of the forward are kept. In
    eager mode that may include the last one, whose result is added to the residual and needed by no backward;
    the compiler drops that one (``keep_last`` is false).
    """

    def __init__(self, count: _MatmulCount, saved: Collection[object], *, keep_last: bool) -> None:
        self._count = count
        self._saved = saved
        self._last = None if keep_last else count.total
        self._matmuls: Counter[bool] = Counter()

    def __call__(
        self, context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operator in _MATMULS:
            self._matmuls[context.is_recompute] += 1
            index = self._matmuls[context.is_recompute]
            self._count.total = max(self._count.total, index)
            keep = index % 2 == 1 and index != self._last
        else:
            keep = operator in self._saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
