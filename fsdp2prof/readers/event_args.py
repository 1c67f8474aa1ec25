"""The arguments only some events carry: collective metadata and recorded input shapes.

NCCL's and RCCL's metadata is written out on ``record_param_comms`` and on the kernels. Gloo has none: its
element counts come from the recorded inputs of ``c10d::*`` and ``gloo:*``, whose meaning is known by name.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.readers.columns import int_column
from fsdp2prof.readers.kineto_schema import NO_TEXT, Args, Complete
from fsdp2prof.tables import CollectiveArgs, IntArray, ShapeTable, Strings

__all__ = ["SparseArgs"]

_SHAPED_PREFIXES = ("c10d::", "_c10d_functional::", "gloo:", "aten::_scaled_dot_product_", "flash_attn::")
_SHAPED_NAMES = frozenset(
    f"aten::{op}"
    for op in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "convolution",
        "convolution_backward",
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_efficient_attention_forward",
        "_efficient_attention_backward",
    )
)

_OUTPUT_FIRST = frozenset({"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"})
"""Take (output, input, ...)."""
_IN_PLACE = frozenset({"c10d::allreduce_", "c10d::broadcast_", "gloo:all_reduce", "gloo:broadcast"})
"""Take the tensors they overwrite."""
_INPUT_ONLY = frozenset({"gloo:all_gather", "gloo:all_to_all", "gloo:reduce", "gloo:gather"})
"""Name the input alone."""
_NO_DTYPE = frozenset({"", "TensorList", "GenericList"})
_SIZED = _OUTPUT_FIRST | _IN_PLACE | _INPUT_ONLY


def has_shapes(name: str) -> bool:
    """Whether an operator's recorded inputs are kept."""
    return name in _SHAPED_NAMES or name.startswith(_SHAPED_PREFIXES)


class SparseArgs:
    """Collects the sparse arguments piece by piece; rows are those of the unsorted events."""

    def __init__(self) -> None:
        self._has_shapes: dict[str, bool] = {}
        self._metadata: list[tuple[int, Args]] = []
        self._shapes: list[tuple[int, str, str, str]] = []

    def add(self, events: list[Complete], args: list[Args], first: int) -> None:
        """Keep what the events starting at row ``first`` carry."""
        self._metadata += [(first + i, a) for i, a in enumerate(args) if a.collective is not None]
        kept = self._has_shapes
        for i, a in enumerate(args):
            if a.input_dims is not NO_TEXT:
                name = events[i].name
                if name not in kept:
                    kept[name] = has_shapes(name)
                if kept[name]:
                    self._shapes.append((first + i, name, _compact(a.input_dims), _compact(a.input_types)))

    def shapes(self, position: IntArray) -> ShapeTable:
        """Build the shape table; ``position`` maps added rows to sorted ones."""
        rows = position[[row for row, *_ in self._shapes]] if self._shapes else np.empty(0, dtype=np.int64)
        table = ShapeTable(
            event=rows,
            dims=Strings.intern(dims for _, _, dims, _ in self._shapes),
            types=Strings.intern(types for *_, types in self._shapes),
        )
        return table.take(np.argsort(rows, kind="stable"))

    def collective_args(self, position: IntArray) -> CollectiveArgs:
        """Build the collective metadata table; ``position`` maps added rows to sorted ones."""
        rows = [row for row, _ in self._metadata]
        args = [a for _, a in self._metadata]
        sized = [
            (row, *sizes) for row, name, dims, types in self._shapes if (sizes := _sizes(name, dims, types))
        ]
        blank = [None] * len(sized)
        unknown = [-1] * len(sized)
        event = position[np.asarray(rows + [row for row, *_ in sized], dtype=np.int64)]
        table = CollectiveArgs(
            event=event,
            collective=_text([a.collective for a in args] + blank),
            dtype=_text([a.dtype for a in args] + [dtype for *_, dtype in sized]),
            in_nelems=int_column([a.in_nelems for a in args] + [n for _, n, _, _ in sized]),
            out_nelems=int_column([a.out_nelems for a in args] + [n for _, _, n, _ in sized]),
            group_size=int_column([a.group_size for a in args] + unknown),
            process_group=_text([a.process_group for a in args] + blank),
            process_group_desc=_text([a.process_group_desc for a in args] + blank),
            ranks=_text([a.ranks for a in args] + blank),
            seq=int_column([a.seq for a in args] + unknown),
            comms_id=int_column([a.comms_id for a in args] + unknown),
            is_async=int_column([a.is_async for a in args] + unknown),
        )
        return table.take(np.argsort(event, kind="stable"))


def _text(values: list[Any]) -> Strings:
    return Strings.intern(None if v is None else v if isinstance(v, str) else str(v) for v in values)


def _compact(raw: msgspec.Raw) -> str:
    return bytes(raw).decode(errors="replace").replace(" ", "")


def _sizes(name: str, dims: str, types: str) -> tuple[int, int, str | None] | None:
    """(input elements, output elements, dtype) of a collective from its recorded inputs; None if unknown."""
    if name not in _SIZED:
        return None
    shapes = msgspec.json.decode(dims)
    dtypes = msgspec.json.decode(types) if types else []
    if not shapes:
        return None
    first = _elements(shapes[0])
    dtype = dtypes[0] if dtypes and isinstance(dtypes[0], str) and dtypes[0] not in _NO_DTYPE else None
    if name in _OUTPUT_FIRST:
        return (_elements(shapes[1]) if len(shapes) > 1 else -1), first, dtype
    return first, first if name in _IN_PLACE else -1, dtype


def _elements(shape: Any) -> int:
    """Elements of a tensor, or of all tensors of a list; -1 if it is no shape."""
    if not isinstance(shape, list):
        return -1
    if shape and all(isinstance(item, list) for item in shape):
        return sum(_elements(item) for item in shape)
    return prod(shape) if all(isinstance(item, int) for item in shape) else -1
