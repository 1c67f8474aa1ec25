"""A weight that FSDP gathers as float8: what torchao's ``WeightWithDynamicFloat8CastTensor`` is to FSDP2.

The shard stays in its own dtype, for the optimizer. Before an all-gather it is cast, with a scale that was
computed after the last step for all weights at once; in the first step each weight reduces its own.

Source: torchao 0.18 ``fsdp_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp2prof.errors import ModelError

_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max
_LEAST = 1e-12
aten = torch.ops.aten
_STILL_SHARDS = frozenset(
    {
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.copy_.default,
        aten.view.default,
        aten.as_strided.default,
        aten._to_copy.default,
        aten._pin_memory.default,
        aten.split.Tensor,
        aten.clone.default,
    }
)
"""FSDP's handling of a parameter before it is sharded."""


class Float8Shard(Tensor):
    """A weight, or a shard of one, that is cast when it is gathered."""

    held: Tensor
    scale: Tensor | None
    """Of the whole weight, once it was computed."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Float8Shard:
        """Wrap a tensor."""
        made: Float8Shard = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        made.held, made.scale = inner, None
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Float8Shard({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Say that one tensor is inside."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Float8Shard:
        return Float8Shard(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return Float8Shard(args[0].held)
        plain = tree_map_only(Float8Shard, lambda shard: shard.held, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return tree_map_only(Tensor, Float8Shard, out) if func in _STILL_SHARDS else out

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Cast the shard."""
        scale = self.scale
        if scale is None:
            scale = _scale_of_whole(self.held, mesh)
        scaled = self.held.to(torch.float32) * scale
        return (_saturated(scaled),), (scale,)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[GatheredFloat8, tuple[Tensor]] | None:
        """Present the gathered data as a weight of ``param_dtype``."""
        (data,), (scale,) = all_gather_outputs, metadata
        if out is None:
            return GatheredFloat8(data, scale, param_dtype), (data,)
        local = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(local, GatheredFloat8)
        local.scale = scale
        return None


class GatheredFloat8(Tensor):
    """A weight in float8 that autograd takes for one of another dtype."""

    data_float8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredFloat8:
        """Wrap gathered elements."""
        made: GatheredFloat8 = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        made.data_float8, made.scale = data, scale
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"GatheredFloat8({tuple(self.shape)}, as {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Say which tensors are inside."""
        return ["data_float8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: Any, *_: object) -> GatheredFloat8:
        return GatheredFloat8(inner["data_float8"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _VIEWS:
            raise ModelError(
                f"fp8_all_gather: {func} of a weight that was gathered as float8 is not modelled"
            )
        weight = args[0]
        return GatheredFloat8(
            func(weight.data_float8, *args[1:], **(kwargs or {})), weight.scale, weight.dtype
        )


_VIEWS = frozenset(
    {aten.detach.default, aten.t.default, aten.as_strided.default, aten.view.default, aten.alias.default}
)


def with_memory(tensor: Tensor) -> Tensor:
    """This rank's tensor that holds the elements, of a DTensor or of a weight that is gathered as float8."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.held if isinstance(local, Float8Shard) else local


def compute_scales(weights: Iterable[nn.Parameter]) -> None:
    """Compute the scales of all sharded weights in one reduction over the ranks that share them."""
    sharded = [weight for weight in weights if isinstance(weight, DTensor)]
    shards = [one._local_tensor for one in sharded if isinstance(one._local_tensor, Float8Shard)]
    if not shards:
        return
    mesh = sharded[0].device_mesh
    largest = torch.stack(torch._foreach_norm([shard.held for shard in shards], ord=float("inf")))
    whole = collectives.all_reduce(largest, "max", (mesh, mesh.ndim - 1))
    wide = torch.clamp(whole, _LEAST).to(torch.float64)
    scales = (_MOST / wide).to(torch.float32)
    for index, shard in enumerate(shards):
        shard.scale = scales[index]


def _scale_of_whole(shard: Tensor, mesh: DeviceMesh) -> Tensor:
    largest = collectives.all_reduce(torch.max(torch.abs(shard)), "max", (mesh, mesh.ndim - 1))
    wide = largest.to(torch.float64)
    return (_MOST / torch.clamp(wide, min=_LEAST)).to(torch.float32)


def _saturated(x: Tensor) -> Tensor:
    x = x.clamp(min=-_MOST, max=_MOST)
    return x.to(_DTYPE)
