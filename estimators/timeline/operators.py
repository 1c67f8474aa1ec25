"""The work of an operator by its arguments: floating-point operations, bytes moved, collectives.

Bytes are those that must move once between device memory and the processor: every operand read, every result
written, of what the operator really touches (an embedding reads the rows it looks up, not its table).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from fsdp2prof.estimators.simulate.program import Work

_ON_HOST = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "_unsafe_view", "alias", "as_strided", "detach", "detach_", "diagonal",
        "empty", "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty",
        "new_empty_strided", "permute", "resize_", "select", "set_", "slice", "split", "split_with_sizes",
        "squeeze", "squeeze_", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex",
        "view_as_real", "_reshape_alias", "_to_copy_meta", "resize_as_", "unsafe_split", "view_dtype",
        "chunk", "narrow", "record_stream", "is_pinned", "_pin_memory", "_conj", "conj", "real", "imag",
        "movedim", "swapaxes", "sym_size",
    )
)  # fmt: skip
"""Operators that make views or memory and launch nothing."""

_MATMULS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
"""Matrix product -> positions of its factors."""

_GROUPED = frozenset({"aten::_grouped_mm", "aten::grouped_mm", "aten::_scaled_grouped_mm"})
"""Products of rows that lie group by group with a matrix a group, or the gradients of these matrices."""

_GATHERS = frozenset(
    f"aten::{name}" for name in ("embedding", "gather", "index", "index_select", "nll_loss_forward")
)
"""Operators that read only the part of their first argument that they return."""

_COPIES = frozenset(
    {
        "aten::clone", "aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::split_with_sizes_copy",
        "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::_chunk_cat",
        "aten::zero_", "aten::fill_", "aten::_foreach_zero_", "aten::zeros_like", "aten::ones_like",
    }
)  # fmt: skip

_REREADS = {"aten::_log_softmax": 2, "aten::_softmax": 2, "aten::_log_softmax_backward_data": 1}
"""Operators that read rows of their first argument again, and how often, where a row is longer than
:data:`_ROW_KEPT_BYTES`: ``ATen/native/cuda/SoftMax.cu`` takes a pass each for largest, sum and result."""
_ROW_KEPT_BYTES = 48 << 10
"""Longest row that fits the shared memory of a thread block."""
_SCATTERS = frozenset({"aten::nll_loss_backward", "aten::nll_loss2d_backward"})
"""Operators that fill their result, and write a few elements by an index."""

_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_C10D = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send_recv",
    "recv_": "send_recv",
}


@dataclass(frozen=True, slots=True)
class CollectiveSizes:
    """Operation and sizes of a collective."""

    op: str
    dtype: str
    nelems_in: int
    nelems_out: int
    payload_bytes: int


def is_on_host(name: str) -> bool:
    """Whether an operator launches nothing on the device."""
    return name in _ON_HOST


def group_of(name: str, args: tuple[Any, ...]) -> tuple[str, int] | None:
    """Return name and size of the process group of a collective; None for every other operator."""
    namespace, _, op = name.partition("::")
    if namespace == "_c10d_functional" and op in _FUNCTIONAL:
        name_of_group: Any = next(a for a in reversed(args) if isinstance(a, str))
        group: Any = torch._C._distributed_c10d._resolve_process_group(name_of_group)
    elif namespace == "c10d" and op in _C10D:
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
        group = torch.distributed.ProcessGroup.unbox(boxed)
    else:
        return None
    return str(group.group_name), int(group.size())


def collective_of(name: str, args: tuple[Any, ...], result: Any) -> CollectiveSizes | None:
    """Return the payload of a collective; None if it has no tensors."""
    namespace, _, word = name.partition("::")
    op = (_FUNCTIONAL if namespace == "_c10d_functional" else _C10D)[word]
    tensors = list(_tensors(args))
    if not tensors:
        return None
    if namespace == "_c10d_functional":
        inputs, outputs = tensors, list(_tensors(result))
    elif op in ("all_gather", "reduce_scatter", "all_to_all"):
        half = len(tensors) // 2
        outputs, inputs = tensors[:half], tensors[half:]
    else:
        inputs = outputs = tensors
    sent, got = sum(t.numel() for t in inputs), sum(t.numel() for t in outputs)
    size = inputs[0].element_size()
    payload = size * (got if op == "all_gather" else sent)
    return CollectiveSizes(op, _dtype(inputs[0]), sent, got, payload)


def work_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    needed: tuple[bool, ...] | None = None,
) -> Work | None:
    """Return the work of one operator; None if it touches no memory.

    ``needed``: which arguments need a gradient, where they do not say it themselves.
    """
    name = func._schema.name if hasattr(func, "_schema") else str(func)
    inputs = [*_tensors(args), *_tensors(kwargs)]
    outputs = list(_tensors(result))
    if not inputs and not outputs:
        return None
    if name in _MATMULS:
        return _matmul(name, args, inputs, outputs, needed)
    if name in _GROUPED:
        return _grouped(args, inputs, outputs, needed)
    if "attention" in name and "scaled_dot_product" in name:
        return _attention(name, args, inputs, outputs)
    if name == "fsdp::all_gather_copy_in":
        touched = 2 * sum(map(_bytes, _tensors(args[0])))
    elif name in _GATHERS:
        touched = 2 * sum(map(_bytes, outputs)) + sum(map(_bytes, inputs[1:]))
    elif name in _SCATTERS:
        touched = sum(map(_bytes, outputs))
    else:
        written = outputs or ([*_tensors(kwargs.get("out", ()))] or list(_mutated(func, args)))
        fills = name in (
            "aten::zero_",
            "aten::fill_",
            "aten::_foreach_zero_",
            "aten::zeros_like",
            "aten::ones_like",
        )
        touched = sum(map(_bytes, written)) + (0 if fills else sum(map(_bytes, _distinct(inputs))))
        touched += _reread_bytes(name, args)
    largest = max([*inputs, *outputs], key=lambda tensor: tensor.numel())
    kind = "copy" if name in _COPIES else "pointwise"
    return Work(kind, _dtype(largest), touched)  # type: ignore[arg-type]


def _reread_bytes(name: str, args: tuple[Any, ...]) -> int:
    times = _REREADS.get(name, 0)
    if not times:
        return 0
    first, dim = args[0], args[2] if "backward" in name else args[1]
    if not isinstance(dim, int):  # an execution trace holds tensors alone: over the last, as losses are
        dim = -1
    row = first.shape[dim] * first.element_size()
    return times * _bytes(first) if row > _ROW_KEPT_BYTES else 0


def _matmul(
    name: str,
    args: tuple[Any, ...],
    inputs: list[Tensor],
    outputs: list[Tensor],
    needed: tuple[bool, ...] | None,
) -> Work:
    left, right = (args[position] for position in _MATMULS[name])
    batch = left.shape[0] if left.dim() == 3 else 1
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    return Work(
        "matmul",
        _dtype(left),
        sum(map(_bytes, [*inputs, *outputs])),
        2 * batch * m * n * k,
        (batch, m, n, k),
        unaligned=any(map(_is_unaligned, [left, right, *outputs])),
        gradients=_gradients(args, _MATMULS[name], needed),
    )


def _gradients(args: tuple[Any, ...], factors: Iterable[int], needed: tuple[bool, ...] | None) -> int:
    """Operands that need a gradient; inside a function with its own backward, or a graph, both may."""
    if not torch.is_grad_enabled():
        return 2
    return sum(args[one].requires_grad if needed is None else needed[one] for one in factors)


def _is_unaligned(matrix: Tensor) -> bool:
    """Whether rows (of a transposed one: columns) begin at addresses that 16 bytes do not divide."""
    return max(matrix.stride()[-2:]) * matrix.element_size() % 16 != 0


def _grouped(
    args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor], needed: tuple[bool, ...] | None
) -> Work:
    """Groups count as equally large: where they end is in the values of a tensor."""
    left, right = args[0], args[1]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if right.dim() == 3 else outputs[0].shape[0]
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    flops = 2 * m * n * k
    if left.dim() == right.dim() == 3:
        flops *= groups
    elif right.dim() == 3:
        m = ceil(m / groups)
    elif left.dim() == 3:
        n = ceil(n / groups)
    else:
        k = ceil(k / groups)
    moved, gradients = sum(map(_bytes, [*inputs, *outputs])), _gradients(args, (0, 1), needed)
    return Work("matmul", _dtype(left), moved, flops, (groups, m, n, k), gradients=gradients)


def _attention(name: str, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> Work:
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, queries, depth = query.shape
    keys, value_depth = key.shape[-2], value.shape[-1]
    causal = any(argument is True for argument in args)
    deep = 3 * depth + 2 * value_depth if backward else depth + value_depth  # five products instead of two
    return Work(
        "attention",
        _dtype(query),
        sum(map(_bytes, [*inputs, *outputs])),
        2 * batch * heads * queries * keys * deep // (2 if causal else 1),
        (batch, heads, queries, keys, depth, key.shape[1], value_depth),
        backward,
    )


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))


def _mutated(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the arguments that an operator writes to."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements that are there: an expanded dimension is read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0]
    return prod(sizes) * tensor.element_size()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
