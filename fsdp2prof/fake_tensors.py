"""Tensors that have sizes and no data: what an estimate computes on, and a rehearsal of a model too large.

Values of fake tensors that are made of constants: positions, grids, masks of tokens.

A fake tensor has a shape and no data, so that a model which looks at its input (where do the images of this
batch stand, how large are they) cannot run on one. What is computed of constants alone is known, though: it
is computed for real beside the fake tensors, which keep their sizes and lifetimes.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp2prof.worker_processes import no_garbage_collection

HAS_FUSED_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")
"""Whether the installed torch runs ``F.rms_norm`` as one kernel on CUDA."""

_MOST_ELEMENTS = 1 << 26
"""Of a value that is followed: larger ones (a mask of all pairs of a long sequence) are left unknown."""
_MOST_REALS = 1 << 24
"""The same for numbers that are not whole, as an image's; what weights make of them is not followed."""
_VALUE = "_fsdp2prof_value"
_NO_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_BY_MASK = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor})
_UNSET = ("empty", "new_empty")
_MASKED_SELECT = torch.ops.aten.masked_select.default
_MASKS = (torch.bool, torch.uint8)


_overwritten: WeakSet[UntypedStorage] = WeakSet()
"""Memory of values that something unknown was written into."""


def value_of(tensor: Tensor) -> Tensor | None:
    """The value of a fake tensor if it is followed; a real tensor is its own."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
    value: Tensor | None = getattr(tensor, _VALUE, None)
    return None if value is None or value.untyped_storage() in _overwritten else value


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values through operators while it is active, above a mode of fake tensors.

    ``item()`` of a known tensor gives its number, and what a known mask or count selects has its true shape.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return func(*args, **kwargs)  # on real tensors, which are left alone
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, FakeTensor) and type(tensor) is not Tensor for tensor in given):
            return func(*args, **kwargs)  # unfolds into operators on plain tensors
        values = {id(tensor): value_of(tensor) for tensor in given}
        if any(value is None for value in values.values()) or _has_no_value(func):
            _overwrite(func, args, values)
            return self._masked(func, args, kwargs)
        return self._followed(func, args, kwargs, values)

    def _masked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on data that is not known; by a known mask it selects as many as that says."""
        if func is _MASKED_SELECT and (value := value_of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, value.shape)  # type: ignore[no-untyped-call]
            data = args[0].expand(shape)
            with no_dispatch():
                value = value.expand(data.shape)
            return torch.ops.aten.index.Tensor(data, _places(value, data.device))
        if func not in _BY_MASK:
            return func(*args, **kwargs)
        indices: list[Tensor | None] = []
        for index in args[1]:
            value = None if index is None or index.dtype not in _MASKS else value_of(index)
            indices.extend([index] if value is None else _places(value, index.device))
        return func(args[0], indices, *args[2:], **kwargs)

    def _followed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[int, Tensor | None]
    ) -> Any:
        """Run an operator on fake tensors and on their values."""
        try:
            result = func(*args, **kwargs)
        except _NO_DATA:
            result = None
        else:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if not values and not all(map(_is_small, made)):
                return result
            if not all(map(_is_small, made)) and not getattr(func, "is_view", False):
                _overwrite(func, args, values)
                return result
        with no_dispatch():
            known_args, known_kwargs = tree_map_only(
                Tensor, lambda tensor: values[id(tensor)], (args, _on_host(kwargs))
            )
            known = func(*known_args, **known_kwargs)
        if result is None:
            result = tree_map_only(Tensor, _without_data, known)
        for mine, value in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if isinstance(mine, FakeTensor):
                setattr(mine, _VALUE, value)
        return known if not isinstance(known, (Tensor, list, tuple)) and known is not None else result


class TensorsAsNumbers(TorchFunctionMode):
    """Lets ``torch.tensor`` take fake tensors among its numbers, which it would read from memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(FakeTensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _places(mask: Tensor, device: torch.device) -> list[Tensor]:
    """An index without data for every dimension of a mask, as selecting by it makes them."""
    with no_dispatch():
        count = int(torch.count_nonzero(mask))
    return list(torch.empty((count, mask.ndim), dtype=torch.int64, device=device).unbind(1))


def _without_data(value: Tensor) -> Tensor:
    """A fake tensor in the shape of a value; a mode of fake tensors is active."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MOST_REALS if tensor.is_floating_point() else _MOST_ELEMENTS)


def _has_no_value(func: Any) -> bool:
    """Whether an operator's results follow from nothing: random numbers, memory as it was."""
    name = getattr(getattr(func, "_schema", None), "name", "").partition("::")[2]
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or name.startswith(_UNSET)


def _overwrite(func: Any, args: tuple[Any, ...], values: dict[int, Tensor | None]) -> None:
    """Forget what an operator writes into that is not followed."""
    for written in _written_by(func, args):
        value = values.get(id(written))
        if value is not None:
            _overwritten.add(value.untyped_storage())


def _written_by(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that an operator writes into, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = zip(schema.arguments, args, strict=False)
    return [
        leaf
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by which a value is made on the host, whatever the fake tensor's device."""
    return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs


_ADVISERS = (
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._redistribute",
    "transformers",
)
"""Loggers whose warnings are for people who train."""
_REPORTS_AGAIN = "torch._subclasses.fake_tensor"
"""Logs a traceback of every operator that fails; whoever catches the error tells of it."""


_TRANSFORMERS = "transformers.utils.import_utils"
_active: list[FakeTensorMode] = []


def appear_real(import_utils: Any) -> None:
    """Let transformers, whose module of this name is given, run fake tensors as it runs real ones.

    It takes them for an export otherwise: it makes a mask of all pairs of tokens where it would leave causal
    attention to the kernel, and repeats keys and values beside it.
    """
    says = getattr(import_utils, "is_fake_tensor", None)  # 5.0 and newer
    if says is None or getattr(says, "knows", None) is _active:
        return

    def is_fake_tensor(item: Any) -> bool:
        return not _active and bool(says(item))

    is_fake_tensor.knows = _active  # type: ignore[attr-defined]
    import_utils.is_fake_tensor = is_fake_tensor


@contextmanager
def fake_tensors(
    *, allow_real: bool = False, follow_values: bool = False, fused_rms_norm: bool = HAS_FUSED_RMS_NORM
) -> Iterator[FakeTensorMode]:
    """Make every tensor created inside a fake one: shapes and lifetimes are real, the data is not there.

    DTensor works out its results' shapes with fake tensors of the *global* shape, under the active modes;
    here it does so under none but a fake mode of its own, so that they count neither as this rank's memory
    nor as its work. Where a
    program reads a tensor's value it gets 1. The garbage collector rests meanwhile: what a cycle keeps alive
    does not depend on when it runs. Warnings are for people who train, and are not shown.

    With ``allow_real`` an operator may be given real tensors, which then stand for fake ones of their shape;
    without, that is an error. With ``follow_values`` what is computed of constants alone has its true value.
    With ``fused_rms_norm`` torch's RMSNorm runs as the one kernel that a GPU has for it. Attention is
    one kernel wherever a GPU has one.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_apart(propagator: ShardingPropagator, op_schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(propagator, op_schema)

    with ExitStack() as stack:
        stack.callback(setattr, ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_apart  # type: ignore[assignment, method-assign]
        stack.enter_context(no_garbage_collection())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in _ADVISERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        logger = logging.getLogger(_REPORTS_AGAIN)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=allow_real))
        _active.append(mode)
        stack.callback(_active.pop)
        if _TRANSFORMERS in sys.modules:
            appear_real(sys.modules[_TRANSFORMERS])
        stack.enter_context(_AsOnDevice())  # type: ignore[no-untyped-call]
        if fused_rms_norm:
            composed = F.rms_norm
            stack.callback(setattr, F, "rms_norm", composed)
            F.rms_norm = _as_one_kernel(composed)
        attend = F.scaled_dot_product_attention
        stack.callback(setattr, F, "scaled_dot_product_attention", attend)
        F.scaled_dot_product_attention = _as_fused_attention(attend)
        if follow_values:
            stack.callback(setattr, FakeTensor, "tolist", FakeTensor.tolist)
            FakeTensor.tolist = _listed  # type: ignore[method-assign, assignment]
            stack.enter_context(KnownValues())  # type: ignore[no-untyped-call]
            stack.enter_context(TensorsAsNumbers())
        yield mode


class FusedRMSNorm(torch.autograd.Function):
    """What a fused RMSNorm reads, writes and keeps: its input, its weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """Stand for the kernel: reads ``x`` (..., dim) once and writes as much."""
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return x * (1.0 if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stand for the kernels of both gradients."""
        x, weight, _ = ctx.saved_tensors
        (gradient,) = gradients
        rows = tuple(range(x.ndim - 1))
        return gradient * x, None if weight is None else gradient.sum(rows).to(weight.dtype)


class FusedSwiGLU(torch.autograd.Function):
    """What Liger's SiLU and product in one kernel reads, writes and keeps: its two factors.

    Source: ``LigerSiLUMulFunction``, whose backward computes SiLU again and writes both gradients over them.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Stand for the kernel: reads both factors once and writes as much as one."""
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Stand for the kernel of both gradients, which takes no memory."""
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        return gate.detach().mul_(gradient), up.detach().mul_(gradient)


def _as_one_kernel(composed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.rms_norm`` for fake tensors: a host has no kernel for it, and runs several operators."""

    def rms_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if isinstance(input, FakeTensor) and len(normalized_shape) == 1:
            normed: Tensor = FusedRMSNorm.apply(input, weight)  # type: ignore[no-untyped-call]
            return normed
        return composed(input, normalized_shape, weight, eps)

    return rms_norm


class _GroupedAttention(torch.autograd.Function):
    """Fused attention of queries (B, H, S, E) with keys of fewer heads, on a host whose own takes none.

    Keys and values are kept as they are. As FlashAttention-2's, backward makes gradients for every query head
    and sums them (``mha_bwd``).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """Stand for the kernel."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = kernel(query, key, value, 0.0, is_causal)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.is_causal = is_causal
        attended: Tensor = out
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Stand for the kernel and the sums."""
        saved = ctx.saved_tensors  # once: a checkpoint lets go of what it recomputed
        _, key, value, *_ = saved
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, *of_heads = kernel(gradients[0], *saved, 0.0, ctx.is_causal)
        of_groups = [
            made.unflatten(1, (like.shape[1], -1)).sum(2)
            for made, like in zip(of_heads, (key, value), strict=True)
        ]
        return of_query, *of_groups, None


def _host_takes_groups() -> bool:
    query, key = (torch.empty(1, heads, 8, 16, device="cpu") for heads in (2, 1))
    chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True)
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


_HOST_TAKES_GROUPS = _host_takes_groups()
"""Whether the host's fused attention takes keys of fewer heads than queries."""


def _as_fused_attention(host: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.scaled_dot_product_attention`` for fake tensors, by the kernel that a GPU chooses.

    The host's fused kernel refuses dropout, values narrower than keys and a mask that is trained; the scores
    of all pairs would then be counted, which a GPU's kernels do not keep.
    Source: ``use_flash_attention_cpp`` and ``can_use_mem_efficient_attention`` of torch's sdp_utils.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        flash = torch._C._get_flash_sdp_enabled()
        others = torch._C._get_mem_efficient_sdp_enabled() or torch._C._get_cudnn_sdp_enabled()
        # A functional tensor is one that a compiler traces.
        if isinstance(query, FakeTensor | FunctionalTensor) and (flash or others):
            dropout_p = 0.0
            same_heads = query.ndim == 4 and query.shape[1] == key.shape[1] == value.shape[1]
            trained = attn_mask is not None and attn_mask.requires_grad
            if same_heads and (not flash or trained or value.shape[-1] != key.shape[-1]):
                kernel = torch.ops.aten._scaled_dot_product_efficient_attention
                bias, keeps = _bias(attn_mask, query, key), torch.is_grad_enabled()
                out: Tensor = kernel(query, key, value, bias, keeps, 0.0, is_causal, scale=scale)[0]
                return out
            if enable_gqa and not same_heads and flash and attn_mask is None and not _HOST_TAKES_GROUPS:
                grouped: Tensor = _GroupedAttention.apply(query, key, value, is_causal)  # type: ignore[no-untyped-call]
                return grouped
        return host(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What is added to the scores (B, H, S, T) for a mask, as the kernel takes it."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])


def _listed(tensor: FakeTensor) -> Any:
    """The numbers of a tensor as lists, read at once as from a device: one wait, not one a number."""
    value = value_of(tensor)
    one = tensor.flatten()[0].item() if tensor.numel() else None
    with no_dispatch():
        return torch.full(tensor.shape, one or 0).tolist() if value is None else value.tolist()


class _AsOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does what tensors without data do otherwise than those of a device.

    ``tensor.item()`` is 1, in the tensor's type. Waiting for a collective gives back what it was given, for
    which a fake tensor has a second memory.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1


def copy_without(module: nn.Module, shared: Collection[nn.Module] = ()) -> nn.Module:
    """Copy a module on meta, whose tensors are still its own: :func:`materialize_fake` replaces them.

    What is in ``shared`` is not copied either, and not to be run.
    """
    kept: list[object] = [*shared, *module.parameters(), *module.buffers()]
    return deepcopy(module, {id(part): part for part in kept})


def materialize_fake(module: nn.Module, left_out: Collection[nn.Module] = ()) -> None:
    """Put a fake tensor of the same shape in the place of every one on meta; a fake mode is active."""
    skipped = {id(inner) for part in left_out for inner in part.modules()}
    for part in module.modules():
        if id(part) in skipped:
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(part, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
