"""Nodes of a compiled graph by their cost in memory: views none, loops perhaps, others their result.

The kinds are inductor's: a *loop* is a pointwise operator or a reduction, for which it writes its own
kernel; an *extern* operator is called unchanged, on real inputs; a *view* is a view of a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


class Kind(Enum):
    """The kind of a node."""

    GIVEN = "given"
    """An input or a constant."""
    VIEW = "view"
    LOOP = "loop"
    """A pointwise operator."""
    REDUCTION = "reduction"
    EXTERN = "extern"
    OUTPUT = "output"


aten, prims = torch.ops.aten, torch.ops.prims

_REDUCTIONS = frozenset(
    {
        aten.sum,
        aten.mean,
        aten.amax,
        aten.amin,
        aten.max,
        aten.min,
        aten.prod,
        aten.any,
        aten.all,
        aten.argmax,
    }
    | {aten.argmin, aten.var, aten.var_mean, aten.std, aten.linalg_vector_norm, prims.xor_sum}
)
_POINTWISE = frozenset(
    {aten.clone, aten.copy, aten._to_copy, aten.full, aten.full_like, aten.zeros, aten.ones, aten.zeros_like}
    | {aten.ones_like, aten.empty_like, aten.arange, aten.scalar_tensor, aten.where, aten.masked_fill}
    | {aten.constant_pad_nd, aten.cat, aten.gather, aten.index, aten.embedding, aten.slice_scatter}
    | {aten.select_scatter, aten.tril, aten.triu, aten.flip, aten.repeat, aten.cumsum, aten.bernoulli}
    | {aten._softmax_backward_data, aten._log_softmax_backward_data, aten.native_dropout_backward}
    | {prims.convert_element_type, prims.iota, aten.rand, aten.rand_like, aten.stack, aten.as_strided_scatter}
)
"""Loops that torch does not tag as pointwise."""
_VIEWS = frozenset({aten._unsafe_view, aten._reshape_alias, aten.reshape})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def kind_of(node: Node) -> Kind:
    """Return the kind of a node. Inductor writes no loops for complex numbers."""
    if node.op in ("placeholder", "get_attr"):
        return Kind.GIVEN
    if node.op == "output":
        return Kind.OUTPUT
    if is_item(node):
        return Kind.VIEW
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.EXTERN
    packet = target.overloadpacket
    if packet in _VIEWS or _returns_alias(target):
        return Kind.VIEW
    if target._schema.is_mutable or any(_is_complex(tensor) for tensor in _involved(node)):
        return Kind.EXTERN
    if packet in _REDUCTIONS:
        return Kind.REDUCTION
    if packet in _POINTWISE or torch.Tag.pointwise in target.tags:
        return Kind.LOOP
    return Kind.EXTERN


def is_item(node: Node) -> bool:
    """Whether a node picks one result of several."""
    return node.target is operator.getitem


def needs_memory(node: Node) -> bool:
    """Whether a view needs its tensor in memory: a view of complex numbers."""
    return kind_of(node) is Kind.VIEW and any(_is_complex(tensor) for tensor in _involved(node))


def base_of(node: Node) -> Node:
    """The node whose tensor a view, of a view, looks at; one result of several is itself."""
    while kind_of(node) is Kind.VIEW:
        source = node.all_input_nodes[0]
        while is_item(source):
            source = source.all_input_nodes[0]
        if is_item(node) and kind_of(source) is not Kind.VIEW:
            return node
        node = source if is_item(node) else node.all_input_nodes[0]
    return node


def value_of(node: Node) -> Any:
    """The fake tensor, or tensors, that a node stood for when the graph was traced."""
    return node.meta.get("val")


def numel(node: Node) -> int:
    """Elements of a node's tensor, of the first of several."""
    value = value_of(node)
    first = value[0] if isinstance(value, (list, tuple)) else value
    return prod(int(size) for size in first.shape)


def nbytes(node: Node) -> int:
    """Bytes of a node's tensor; 0 if it is not a tensor."""
    value = value_of(node)
    return int(value.numel()) * value.itemsize if isinstance(value, Tensor) else 0


def reduced(node: Node) -> tuple[int, bool]:
    """Elements of a reduction's input for each of its output, and whether those are next to each other."""
    source = value_of(node.all_input_nodes[0])
    count = max(1, source.numel() // max(1, numel(node)))
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else None
    if dims is None or not dims:
        return count, True
    at = sorted(int(dim) % source.dim() for dim in dims if isinstance(dim, int))
    return count, at == list(range(source.dim() - len(at), source.dim()))


def _returns_alias(target: torch._ops.OpOverload) -> bool:
    returned = [result.alias_info for result in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _involved(node: Node) -> Iterator[Tensor]:
    for other in (node, *node.all_input_nodes):
        value = value_of(other)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor


def _is_complex(tensor: Tensor) -> bool:
    return tensor.dtype in _COMPLEX
