"""A linear layer that multiplies in float8: the operators, and so the memory, of torchao's ``Float8Linear``.

Its eager form is what runs; compiled, the same operators are traced and fused. Forward keeps its input and
weight as they came, and casts both; backward casts the gradient, and weight and input once more.

Source: torchao 0.18 ``float8_linear.py``, ``float8_utils.py``, ``float8_ops.py``. Values are not the point:
tensors stay alive as long as they do there, and no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp2prof.estimators.models.low_precision import Cast, Recipe
from fsdp2prof.estimators.techniques.float8.weight import Float8Shard, GatheredFloat8

_LEAST = 1e-12
"""Smallest value that a scale is computed from."""


class Float8Linear(nn.Linear):
    """A linear layer of which all three products run as a recipe says."""

    def __init__(self, base: nn.Linear, recipe: Recipe, gathered: bool) -> None:
        nn.Module.__init__(self)  # its tensors are another's
        self.in_features, self.out_features = base.in_features, base.out_features
        self.recipe = recipe
        self.bias = base.bias
        weight = base.weight
        self.weight = nn.Parameter(Float8Shard(weight.data), weight.requires_grad) if gathered else weight

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: (..., in) -> (..., out)."""
        out: Tensor = _Product.apply(x, self.weight.t(), self.recipe)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A matrix in float8 with its scale."""

    data: Tensor
    scale: Tensor
    is_by_row: bool

    def t(self) -> _Scaled:
        """The transposed matrix, a view."""
        return replace(self, data=self.data.t(), scale=self.scale.t() if self.scale.ndim > 1 else self.scale)


class _Product(torch.autograd.Function):
    """``x @ weight_t`` with its factors cast as the recipe says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, recipe: Recipe) -> Tensor:
        """``x`` (..., in), ``weight_t`` (in, out) -> (..., out)."""
        ctx.save_for_backward(x, weight_t)
        ctx.recipe = recipe
        left = _cast(x, recipe.input, -1, recipe)
        right = _cast(weight_t, recipe.weight, 0, recipe)
        out = _multiply(_rows(left), right, x.dtype, fast=True)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Give the gradients of ``x`` and ``weight_t``."""
        (gradient,), (x, weight_t), recipe = gradients, ctx.saved_tensors, ctx.recipe
        shape, dtype = gradient.shape, gradient.dtype
        gradient = gradient.reshape(-1, shape[-1])
        left = _cast(gradient, recipe.gradient, -1, recipe)
        weight = _cast(weight_t, recipe.weight_for_input, -1, recipe)
        of_input = _multiply(left, weight.t(), dtype, fast=False)
        of_input = of_input.reshape(*shape[:-1], of_input.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        by_column = _cast(gradient, recipe.gradient_for_weight, 0, recipe)
        right = _cast(rows, recipe.input_for_weight, 0, recipe)
        of_weight = _multiply(by_column.t(), right, dtype, fast=False)
        return of_input, of_weight.t(), None


def _cast(x: Tensor, how: Cast, dim: int, recipe: Recipe) -> _Scaled | Tensor:
    """Cast a matrix, or a tensor whose last dimensions are one; scales of rows run along ``dim``."""
    if isinstance(x, GatheredFloat8):
        return _Scaled(x.data_float8, x.scale, is_by_row=False)
    if isinstance(x, DTensor) and isinstance(x._local_tensor, GatheredFloat8):
        return _divided(x, x._local_tensor)
    if how.each == "never":
        return x
    dtype = getattr(torch, how.dtype)
    scale = _scale_of(x, how, dim, dtype, recipe.powers_of_two)
    scaled = x.to(torch.float32) * scale
    return _Scaled(_saturated(scaled, dtype), scale, is_by_row=how.each == "row")


def _divided(weight: DTensor, local: GatheredFloat8) -> _Scaled:
    """A gathered weight of which tensor-parallel ranks hold a part each, and its scale all of them."""
    data = DTensor.from_local(
        local.data_float8,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    everywhere = [Replicate()] * weight.device_mesh.ndim
    scale = DTensor.from_local(local.scale, weight.device_mesh, everywhere, run_check=False)
    return _Scaled(data, scale, is_by_row=False)


def _scale_of(x: Tensor, how: Cast, dim: int, dtype: torch.dtype, powers_of_two: bool) -> Tensor:
    if how.each == "tensor":
        largest = torch.max(torch.abs(x))
    else:
        largest = torch.amax(torch.abs(x), dim=dim, keepdim=True)
    return _scale_for(largest, dtype, powers_of_two)


def _scale_for(largest: Tensor, dtype: torch.dtype, powers_of_two: bool) -> Tensor:
    largest = largest.to(torch.float64)
    scale = torch.finfo(dtype).max / torch.clamp(largest, min=_LEAST)
    scale = scale.to(torch.float32)
    if powers_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    x = x.clamp(min=-most, max=most)
    return x.to(dtype)


def _rows(x: _Scaled | Tensor) -> _Scaled | Tensor:
    """As one matrix, a view."""
    if isinstance(x, Tensor):
        return x.reshape(-1, x.shape[-1])
    scale = x.scale.reshape(-1, 1) if x.is_by_row else x.scale
    return _Scaled(x.data.reshape(-1, x.data.shape[-1]), scale, x.is_by_row)


def _multiply(a: _Scaled | Tensor, b: _Scaled | Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Multiply two matrices; ``dtype`` is the result's. Both are cast or neither.

    The product takes the first by rows and the second by columns, and copies a matrix with another layout.
    Scales of rows without fast accumulation are multiplied into the result afterwards.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.mm(a, b)  # type: ignore[arg-type]
    left, right = a.data, b.data
    if not _is_by_rows(left):
        left = left.contiguous()
    if _is_by_rows(right):
        right = right.t().contiguous().t()
    left_scale, right_scale = a.scale, b.scale
    if b.is_by_row and not a.is_by_row:
        left_scale = left_scale.repeat(left.shape[0]).reshape(-1, 1)
    elif a.is_by_row and not b.is_by_row:
        right_scale = right_scale.repeat(right.shape[1]).reshape(1, -1)
    by_row = left_scale.shape == (left.shape[0], 1) and right_scale.shape == (1, right.shape[1])
    left_inverse, right_inverse = left_scale.reciprocal(), right_scale.reciprocal()
    after = None
    if by_row and not fast:
        after = left_inverse * right_inverse
        left_inverse = left_inverse.new_ones(())
        right_inverse = left_inverse.new_ones(())
    made = torch.bfloat16 if by_row and dtype in (torch.float16, torch.float32) else dtype
    out = torch._scaled_mm(
        left, right, scale_a=left_inverse, scale_b=right_inverse, out_dtype=made, use_fast_accum=fast
    )
    if after is not None:
        out *= after
    return out if made is dtype else out.to(dtype)


def _is_by_rows(matrix: Tensor) -> bool:
    return matrix.stride(0) > matrix.stride(1) == 1
