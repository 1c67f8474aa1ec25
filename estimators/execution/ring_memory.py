"""Memory of attention around a ring of context-parallel ranks, which an execution of one rank lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOAT32 = 4
"""Bytes of an element of merges and gradients."""


@contextmanager
def memory_of_a_ring(ranks: int) -> Iterator[None]:
    """Hold what attention around a ring of ``ranks`` holds beside that of a rank's own tokens.

    The forward holds keys and values of all ranks, gathered once (``_AllGatherRotater``, the default), and
    while it merges in float32 the sum, a part, their difference and its product (``_SDPAMerger``).
    The backward holds them too, the queries' gradients in float32, those of keys and values three times
    (kept, sent, received), and what the kernel returned before (``_templated_ring_attention_backward``).
    """
    own = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        held: list[Tensor] = []
        rows, kv = query.numel(), key.numel() + value.numel()
        gathered, narrow = ranks * kv * query.element_size(), query.element_size()
        merged = gathered + 4 * _FLOAT32 * rows
        gradients = gathered + _FLOAT32 * (rows + 3 * kv) + narrow * (rows + kv)
        query, key, value = _RingBegins.apply(held, query, key, value)  # type: ignore[no-untyped-call]
        held.append(query.new_empty(merged, dtype=torch.uint8))
        out = own(query, key, value, *others, **named)
        held.clear()
        ended: Tensor = _RingEnds.apply(held, gradients, out)  # type: ignore[no-untyped-call]
        return ended

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


class _RingBegins(torch.autograd.Function):
    """Passes queries, keys and values on; backward lets go of what it held for them."""

    @staticmethod
    def forward(ctx: Any, held: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        ctx.held = held
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return their gradients."""
        ctx.held.clear()
        return None, *gradients


class _RingEnds(torch.autograd.Function):
    """Passes the output on; backward then holds ``size`` bytes."""

    @staticmethod
    def forward(ctx: Any, held: list[Tensor], size: int, out: Tensor) -> Tensor:
        """Return the output."""
        ctx.held, ctx.size = held, size
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return its gradient."""
        ctx.held.append(gradients[0].new_empty(ctx.size, dtype=torch.uint8))
        return None, None, *gradients
