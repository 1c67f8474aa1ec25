"""Frozen linear layers whose weights are held in 4 bits, as QLoRA's base; dequantized for every product.

A weight of n elements takes n/2 bytes of indices, one byte for each block of 64, and one number for each 256
of these (double quantization). ``nf4`` is torchao's ``NF4Tensor``, whose parts FSDP2 shards and gathers
together, as bytes. ``bnb-nf4`` is bitsandbytes' ``Linear4bit`` with its storage in the compute dtype: indices
are sharded like any parameter, scales are held replicated on every rank.

Source: torchao 0.18 ``nf4_tensor.py`` (``get_original_weight``, ``fsdp_pre_all_gather``); bitsandbytes
``MatMul4Bit`` and ``dequantize_4bit``. Weights here are packed bytes without meaning: sizes are right, values
are not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.model import ADAPTERS, Model

_BLOCK = 64
"""Elements of a block that shares a scale."""
_SCALES = 256
"""Scales that share a scale."""


class PackedLinear(nn.Module):
    """A frozen linear layer of 4-bit weights."""

    def __init__(self, base: nn.Linear, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = base.in_features, base.out_features, kind
        self.bias = base.bias
        elements = base.in_features * base.out_features
        blocks, groups = elements // _BLOCK, elements // (_BLOCK * _SCALES)
        if kind == "nf4":
            packed = torch.empty(elements // 2 + blocks + groups * dtype.itemsize, dtype=torch.uint8)
        else:
            packed = torch.empty(elements // 2 // dtype.itemsize, 1, dtype=dtype)
            self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8))
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // _SCALES), dtype=torch.float32))
        self.weight = nn.Parameter(packed, requires_grad=False)

    @property
    def unpacked_more(self) -> int:
        """Elements of the weight minus the elements of its packed form."""
        return self.in_features * self.out_features - self.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        scales = None if self.kind == "nf4" else self.scales
        out: Tensor = _PackedProduct.apply(x, self.weight, scales, self.out_features)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _PackedProduct(torch.autograd.Function):
    """A product with a weight that is dequantized before it, and again in backward; only bytes are
    modelled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor | None, rows: int) -> Tensor:
        """``x`` (..., in) -> (..., rows)."""
        ctx.save_for_backward(packed)
        ctx.scales, ctx.shape, ctx.dtype = scales, (rows, x.shape[-1]), x.dtype
        return F.linear(x, dequantized(packed, scales, ctx.shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Give the gradient of the input; the weight has none."""
        (packed,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ dequantized(packed, ctx.scales, ctx.shape, ctx.dtype), None, None, None


def dequantized(packed: Tensor, scales: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A weight of ``shape`` in ``dtype``, with the temporaries that making it takes."""
    elements = shape[0] * shape[1]
    if scales is None:
        return _by_operators(packed[: elements // 2], packed[elements // 2 :], shape, dtype)
    wide = scales.float()  # one kernel for these, one for the weight
    wide.add_(0)
    per_item = elements // packed.numel()
    return packed.expand(-1, per_item).to(dtype, copy=True).reshape(shape)


def _by_operators(indices: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """As torchao does it outside of the compiler: two halves, each of int64 indices into a table of 16."""
    blocks = indices.numel() * 2 // _BLOCK
    table = indices.new_empty(16, dtype=dtype)
    high = (indices >> 4).long()
    low = (indices & 15).long()
    high_values, low_values = table[high], table[low]
    scale = scales[:blocks].to(dtype) + table[0]
    spread = scale.unsqueeze(1).expand(-1, _BLOCK // 2)
    high_scaled = high_values * spread.flatten()
    low_scaled = low_values * spread.flatten()
    return torch.stack([high_scaled, low_scaled], dim=-1).view(shape)


def quantize_blocks(model: Model, kind: str, dtype: str, shards: int) -> Model:
    """Hold the linear layers of a model's blocks in 4 bits, in place; adapters are not changed.

    ``dtype`` is the dtype in which parameters are gathered. Raises ``ModelError`` for a weight whose
    scales do not divide into ``shards``, and for a model without linear layers in blocks.
    """
    packed = 0
    for fqn, part in list(model.module.named_modules()):
        inside = any(fqn.startswith(f"{block}.") for block in model.blocks)
        if not inside or not isinstance(part, nn.Linear) or any(name in f".{fqn}." for name in ADAPTERS):
            continue
        groups, rest = divmod(part.weight.numel(), _BLOCK * _SCALES)
        if kind == "nf4" and (rest or groups % shards or part.out_features % shards):
            raise ModelError(
                f"lora: base=nf4: torchao divides {fqn} evenly only, and {shards} ranks do not divide its "
                f"{part.out_features} rows and {part.weight.numel() / _BLOCK / _SCALES:g} groups of scales"
            )
        with torch.device("meta"):
            model.module.set_submodule(fqn, PackedLinear(part, kind, getattr(torch, dtype)))
        packed += 1
    if not packed:
        raise ModelError(f"lora: base={kind}: the blocks of {model.name} have no linear layer to quantize")
    return model
