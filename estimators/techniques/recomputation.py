"""Activation checkpointing: the operators that a block's backward recomputes, one rule for eager and
compiled blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.policy import PolicySpec

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
_REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor"
_ATTENTION = "aten._scaled_dot_product_"


@dataclass(frozen=True, slots=True)
class Selective:
    """Some operators' results are saved: torchtitan's policy.

    The first, third, ... matrix product, attention and reduce-scatters are; everything else is run again.
    """

    attention: bool = True
    besides: frozenset[str] = frozenset()
    """Other operators that are saved, as ``aten.abs``."""
    recomputed_shapes: frozenset[tuple[int, ...]] = frozenset()
    """Right factors (inner, outer) of products that are run again and not counted."""

    def counts(self, target: object, arguments: Sequence[Any]) -> bool:
        """Whether this is one of the products of which every other one is saved."""
        return target in MATMULS and not (
            self.recomputed_shapes and _shape(arguments[1]) in self.recomputed_shapes
        )

    def saves(self, target: object) -> bool:
        """Whether the results of any other operator are saved."""
        if target in MATMULS:
            return False
        name = str(target).rpartition(".")[0]
        if name.startswith(_ATTENTION):
            return self.attention
        return name == _REDUCE_SCATTER or name in self.besides


Recompute = Literal["none", "full", "children"] | Selective
"""Operators that backward recomputes: the partitioner's choice, all, all of each child by itself, or those
not selected."""


def _shape(factor: Any) -> tuple[int, ...]:
    tensor = factor.meta["val"] if isinstance(factor, Node) else factor
    return tuple(tensor.shape)


def checkpoint_blocks(root: nn.Module, blocks: tuple[str, ...], policy: PolicySpec) -> None:
    """Replace the blocks that ``policy.ac`` asks for by checkpointed ones, in place.

    Raises ``ModelError`` if the model has no blocks.
    """
    count = _MatmulCount()
    for fqn, mode in recomputation(root, blocks, policy).items():
        options: dict[str, Any] = {}
        if isinstance(mode, Selective):
            options["context_fn"] = partial(_selective_contexts, count, mode, not policy.compile)
        block = root.get_submodule(fqn)
        if mode == "children":
            for name, child in list(block.named_children()):
                block.register_module(name, checkpoint_wrapper(child, preserve_rng_state=False))
        elif mode != "none":
            parent, _, name = fqn.rpartition(".")
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
            root.get_submodule(parent).register_module(name, wrapped)


def recomputation(root: nn.Module, blocks: tuple[str, ...], policy: PolicySpec) -> dict[str, Recompute]:
    """Return the operators that the backward of each block recomputes. Raises as
    :func:`checkpoint_blocks`."""
    if policy.ac != "none" and not blocks:
        raise ModelError(f"ac={policy.ac} needs a model with repeated blocks; this one has none")
    mode: Recompute = "none"
    if policy.ac == "op":
        mode = _selective(root, blocks, policy)
    elif policy.ac != "none":
        mode = "children" if policy.ac == "children" else "full"
    return {fqn: mode if policy.checkpoints(at) else "none" for at, fqn in enumerate(blocks)}


def _selective(root: nn.Module, blocks: tuple[str, ...], policy: PolicySpec) -> Selective:
    """What ``ac="op"`` saves. Raises ``ModelError`` for an operator that there is not."""
    for name in policy.ac_saves or ():
        namespace, _, operator = name.partition(".")
        if not hasattr(getattr(torch.ops, namespace), operator or "-"):
            raise ModelError(f"ac_saves: torch has no operator {name!r}; write for example aten.abs")
    shapes: set[tuple[int, ...]] = set()
    for part in policy.ac_recomputes or ():
        found = [
            layer.weight
            for fqn in blocks
            for name, layer in root.get_submodule(fqn).named_modules()
            if isinstance(layer, nn.Linear) and part in f"{fqn}.{name}"
        ]
        shapes.update(tuple(reversed(weight.shape)) for weight in found)
    return Selective(
        attention=not policy.recomputes_attention,
        besides=frozenset(policy.ac_saves or ()),
        recomputed_shapes=frozenset(shapes),
    )


@dataclass(slots=True)
class _MatmulCount:
    """Matrix products in a block's forward, once one has run."""

    total: int = 0


def _selective_contexts(count: _MatmulCount, selected: Selective, keep_last: bool) -> Any:
    policy = _EverySecondMatmul(count, selected, keep_last=keep_last)
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class _EverySecondMatmul:
    """Save what is selected and every other matrix product of one block; recompute the rest.

    In eager mode that may include the last product, whose result is added to the residual and needed by no
    backward; the compiler drops that one (``keep_last`` is false).
    """

    def __init__(self, count: _MatmulCount, selected: Selective, *, keep_last: bool) -> None:
        self._count = count
        self._selected = selected
        self._last = None if keep_last else count.total
        self._matmuls: Counter[bool] = Counter()

    def __call__(
        self, context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if self._selected.counts(operator, args):
            self._matmuls[context.is_recompute] += 1
            index = self._matmuls[context.is_recompute]
            self._count.total = max(self._count.total, index)
            keep = index % 2 == 1 and index != self._last
        else:
            keep = self._selected.saves(operator)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
