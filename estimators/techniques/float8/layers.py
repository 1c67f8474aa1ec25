"""A model whose linear layers train in float8.

A linear layer that multiplies in MXFP8: the operators, and so the memory, of torchao's ``MXFP8Linear``.

32 elements of a row share a scale of one byte. One kernel casts a matrix along its rows, another along its
columns; before a product the scales are rearranged into the tiles that cuBLAS reads. Forward keeps its input
and weight as they came.

Source: torchao 0.18 ``prototype/moe_training/mxfp8_linear.py``, ``prototype/mx_formats`` (``to_blocked``,
``triton_to_mxfp8_dim0``, ``mxfp8_quantize``), as on a GPU: both casts by kernels of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import Float8
from fsdp2prof.estimators.models.low_precision import RECIPES, is_in_float8, multiple_of
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.float8.linear import Float8Linear

_BLOCK = 32
"""Elements that share a scale."""
_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""Scales of a tile."""
_DATA, _SCALES = torch.float8_e4m3fn, torch.float8_e8m0fnu


class MxLinear(nn.Linear):
    """A linear layer of which all three products run in MXFP8."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)  # its tensors are another's
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: (..., in) -> (..., out)."""
        out: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _rows_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a matrix cast along its rows: data, and a scale for every 32 elements of a row."""
    rows, columns = matrix.shape
    data = torch.empty((rows, columns), dtype=_DATA, device=matrix.device)
    return data, torch.empty((rows, columns // _BLOCK), dtype=_SCALES, device=matrix.device)


def _columns_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Room for one cast along its columns: data column by column, a scale for every 32 elements of one."""
    rows, columns = matrix.shape
    data = torch.empty_strided((rows, columns), (1, rows), dtype=_DATA, device=matrix.device)
    scales = torch.empty_strided((columns, rows // _BLOCK), (1, columns), dtype=_SCALES, device=matrix.device)
    return data, scales


_cast_rows = library.custom_op("fsdp2prof::mx_cast_rows", _rows_of, mutates_args=())
_cast_rows.register_fake(_rows_of)
_cast_columns = library.custom_op("fsdp2prof::mx_cast_columns", _columns_of, mutates_args=())
_cast_columns.register_fake(_columns_of)


def _transposed(cast: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A cast matrix as the other factor of a product takes it."""
    data, scales = cast
    return data.t(), scales


class _Product(torch.autograd.Function):
    """``x @ weight.t()``; its gradients alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` (..., in), ``weight`` (out, in) -> (..., out)."""
        ctx.save_for_backward(x, weight)
        left = _cast_rows(x.reshape(-1, x.shape[-1]))
        right = _transposed(_cast_rows(weight))
        out = _multiply(left, right)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Give the gradients of ``x`` and ``weight``."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        gradient = gradient.contiguous()
        shape = gradient.shape
        rows = gradient.reshape(-1, shape[-1])
        left = _cast_rows(rows)
        right = _cast_columns(weight)
        of_input = _multiply(left, right)
        of_input = of_input.reshape(*shape[:-1], of_input.shape[-1])
        by_column = _transposed(_cast_columns(rows))
        inputs = _cast_columns(x.reshape(-1, x.shape[-1]))
        return of_input, _multiply(by_column, inputs)


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    left, right = _tiled(a[1]), _tiled(b[1])
    return torch._scaled_mm(a[0], b[0], left, right, out_dtype=torch.bfloat16)


def _tiled(scales: Tensor) -> Tensor:
    """Scales in the order of cuBLAS: tiles of 128 x 4, padded with zeros, each of them interleaved."""
    rows, columns = scales.shape
    across, down = -(-columns // _TILE_COLUMNS), -(-rows // _TILE_ROWS)
    whole = (down * _TILE_ROWS, across * _TILE_COLUMNS)
    padded = scales
    if whole != (rows, columns):
        padded = torch.zeros(whole, dtype=scales.dtype, device=scales.device)
        padded[:rows, :columns] = scales
    tiles = padded.view(down, _TILE_ROWS, across, _TILE_COLUMNS).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


def convert_linear_layers(model: Model, recipe: Float8, *, gathered: bool) -> Model:
    """Put layers that train in float8 in the place of a model's linear layers, in place.

    With ``gathered`` their weights are gathered as float8. Raises ``ModelError`` for a model without any.
    """
    converted = 0
    for fqn, part in list(model.module.named_modules()):
        if type(part) is not nn.Linear or not is_in_float8(fqn, part.weight.shape, model.blocks, recipe):
            continue
        made = MxLinear(part) if recipe == "mxfp8" else Float8Linear(part, RECIPES[recipe], gathered)
        model.module.set_submodule(fqn, made)
        converted += 1
    if not converted:
        raise ModelError(
            f"float8: the blocks of {model.name} have no linear layer with sizes that are multiples of "
            f"{multiple_of(recipe)}"
        )
    return model
