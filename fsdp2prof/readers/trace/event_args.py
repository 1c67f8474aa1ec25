"""The arguments only some events carry: collective metadata and recorded input shapes.

NCCL's and RCCL's metadata is written out on ``record_param_comms`` and on the kernels. Gloo has none: its
element counts come from the recorded inputs of ``c10d::*`` and ``gloo:*``, whose meaning is known by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fsdp2prof import backends
from fsdp2prof.readers.trace.json_values import int_column
from fsdp2prof.readers.trace.kineto_schema import NO_TEXT, Args, Complete
from fsdp2prof.tables import CollectiveArgs, IntArray, ShapeTable, Strings, SyncTable

Metadata: TypeAlias = tuple[Any, ...]
"""Event row, then the columns of :class:`CollectiveArgs` after ``event``, as in the JSON."""
Shape: TypeAlias = tuple[int, str, str, str]
"""Event row, operator, ``Input Dims`` and ``Input type`` as compact JSON text."""

Sync: TypeAlias = tuple[int, Any, Any]
"""Event row, then the columns of :class:`SyncTable` after ``event``, as in the JSON."""

_FIELDS = len(fields(CollectiveArgs))
_MOST_DIMS = 64
"""Dimensions of a torch tensor."""
_MOST_ELEMENTS = 1 << 48
"""More than any memory holds."""

_SHAPED_PREFIXES = (
    "c10d::",
    "_c10d_functional::",
    "gloo:",
    "fake:",
    "aten::_scaled_dot_product_",
    "flash_attn::",
)
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
        "embedding",
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_efficient_attention_forward",
        "_efficient_attention_backward",
    )
)

_OUTPUT_FIRST = frozenset(
    {
        "c10d::_allgather_base_",
        "c10d::_reduce_scatter_base_",
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::reduce_scatter_tensor_coalesced_",
        "c10d::alltoall_base_",
        "fake:all_gather",
    }
)
"""Take (output, input, ...)."""
_IN_PLACE = frozenset(
    f"{prefix}{op}"
    for prefix, ops in (
        ("c10d::", ("allreduce_", "broadcast_")),
        ("_c10d_functional::", ("all_reduce", "all_reduce_", "broadcast", "broadcast_")),
        ("gloo:", ("all_reduce", "broadcast")),
        ("fake:", ("all_reduce", "broadcast")),
    )
    for op in ops
)
"""Take the tensors they overwrite, or one as large as their result, as the ranges of a device's process group
do. ``fake`` is a rehearsal's backend."""
_INPUT_ONLY = frozenset(
    {
        "gloo:all_gather",
        "gloo:all_to_all",
        "gloo:reduce",
        "gloo:gather",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    }
)
"""Name the input alone."""
_NO_DTYPE = frozenset({"", "TensorList", "GenericList"})


@lru_cache(maxsize=4096)
def _has_shapes(name: str) -> bool:
    """Whether an operator's recorded inputs are kept."""
    return name in _SHAPED_NAMES or name.startswith(_SHAPED_PREFIXES) or backends.is_collective_range(name)


def _is_in_place(name: str) -> bool:
    _, _, operation = name.partition(":")
    return name in _IN_PLACE or (
        operation in ("all_reduce", "broadcast") and backends.is_collective_range(name)
    )


def recorded_shapes(events: list[Complete], args: list[Args]) -> list[Shape]:
    """Recorded inputs of the events whose operator is of interest, by row."""
    rows = _rows_with([a.input_dims for a in args], NO_TEXT)
    rows = [row for row in rows if _has_shapes(events[row].name)]
    return [
        (i, events[i].name, _shapes(_compact(args[i].input_dims)), _compact(args[i].input_types))
        for i in rows
    ]


def nvtx_shape(row: int, name: str, sizes: str) -> Shape | None:
    """Shapes that ``emit_nvtx`` wrote behind an operator's name; None where they are of no interest."""
    return (row, name, _shapes(sys.intern(sizes.replace(" ", ""))), "") if _has_shapes(name) else None


def _rows_with(values: list[Any], absent: Any) -> list[int]:
    """Positions of the values that are there; most pieces have none, and counting tells it fastest."""
    if values.count(absent) == len(values):
        return []
    return [row for row, value in enumerate(values) if value is not absent]


def collective_metadata(args: list[Args]) -> list[Metadata]:
    """Collective metadata by row, in the order of :data:`Metadata`."""
    return [_metadata(row, args[row]) for row in _rows_with([a.collective for a in args], None)]


def _metadata(row: int, args: Args) -> Metadata:
    return (
        row,
        args.collective,
        args.dtype,
        args.in_nelems,
        args.out_nelems,
        args.group_size,
        args.process_group,
        args.process_group_desc,
        args.ranks,
        args.seq,
        args.comms_id,
        args.is_async,
    )


def sync_waits(args: list[Args]) -> list[Sync]:
    """What synchronisation events wait for, by row."""
    rows = _rows_with([a.wait_on_stream for a in args], None)
    return [(row, args[row].wait_on_stream, args[row].record_correlation) for row in rows]


def sync_table(syncs: list[Sync], position: IntArray) -> SyncTable:
    """Build the synchronisation table; ``position`` maps rows as read to rows of the sorted events."""
    event = position[np.asarray([row for row, *_ in syncs], dtype=np.int64)]
    table = SyncTable(
        event=event,
        wait_on_stream=int_column([stream for _, stream, _ in syncs]),
        record_correlation=int_column([correlation for *_, correlation in syncs]),
    )
    return table.take(np.argsort(event, kind="stable"))


def shape_table(shapes: list[Shape], position: IntArray) -> ShapeTable:
    """Build the shape table; ``position`` maps rows as read to rows of the sorted events."""
    event = position[np.asarray([row for row, *_ in shapes], dtype=np.int64)]
    table = ShapeTable(
        event=event,
        dims=Strings.intern(dims for _, _, dims, _ in shapes),
        types=Strings.intern(types for *_, types in shapes),
    )
    return table.take(np.argsort(event, kind="stable"))


def collective_args(metadata: list[Metadata], shapes: list[Shape], position: IntArray) -> CollectiveArgs:
    """Build the collective metadata table; ``position`` maps rows as read to rows of the sorted events."""
    named = {row for row, *_ in metadata}
    sized = [
        (row, None, *sizes, -1, None, None, None, -1, -1, -1)
        for row, name, dims, types in shapes
        if row not in named and (sizes := _sizes(name, dims, types)) is not None
    ]
    rows: list[Metadata] = [*metadata, *sized]
    columns = list(zip(*rows, strict=True)) if rows else [()] * _FIELDS
    event = position[np.asarray(columns[0], dtype=np.int64)]
    table = CollectiveArgs(
        event=event,
        collective=_text(columns[1]),
        dtype=_text(columns[2]),
        in_nelems=int_column(columns[3]),
        out_nelems=int_column(columns[4]),
        group_size=int_column(columns[5]),
        process_group=_text(columns[6]),
        process_group_desc=_text(columns[7]),
        ranks=_text(columns[8]),
        seq=int_column(columns[9]),
        comms_id=int_column(columns[10]),
        is_async=int_column(columns[11]),
    )
    return table.take(np.argsort(event, kind="stable"))


def _text(values: Iterable[Any]) -> Strings:
    return Strings.intern(None if v is None else v if isinstance(v, str) else str(v) for v in values)


def _compact(raw: msgspec.Raw) -> str:
    return sys.intern(bytes(raw).decode(errors="replace").replace(" ", ""))


@lru_cache(maxsize=4096)
def _shapes(dims: str) -> str:
    """Recorded shapes with null for what is none: a shape lists sizes, that of a list of tensors theirs."""
    try:
        shapes = msgspec.json.decode(dims, type=list[Any])
    except (msgspec.DecodeError, RecursionError):
        return "[]"
    clean = [shape if _is_shape(shape) or _are_shapes(shape) else None for shape in shapes]
    return dims if clean == shapes else msgspec.json.encode(clean).decode()


def _are_shapes(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_shape, value))


def _is_shape(value: Any) -> bool:
    """Whether a value lists sizes of a tensor that can be."""
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return False
    return all(type(size) is int and size >= 0 for size in value) and prod(value) <= _MOST_ELEMENTS


def _sizes(name: str, dims: str, types: str) -> tuple[str | None, int, int] | None:
    """(dtype, input elements, output elements) of a collective from its recorded inputs; None if unknown."""
    in_place = _is_in_place(name)
    if not in_place and name not in _OUTPUT_FIRST and name not in _INPUT_ONLY:
        return None
    shapes = msgspec.json.decode(dims)
    dtypes = _dtypes(types)
    # Old traces write a list of tensors as an empty shape, which would read as one element.
    if not shapes or (shapes[0] == [] and dtypes[:1] == ["TensorList"]):
        return None
    first = _elements(shapes[0])
    tensors = dtypes[: 2 if name in _OUTPUT_FIRST else 1]
    dtype = next((kind for kind in tensors if isinstance(kind, str) and kind not in _NO_DTYPE), None)
    if name in _OUTPUT_FIRST:
        return dtype, _elements(shapes[1]) if len(shapes) > 1 else -1, first
    return dtype, first, first if in_place else -1


def _dtypes(types: str) -> list[Any]:
    try:
        return msgspec.json.decode(types, type=list[Any]) if types else []
    except (msgspec.DecodeError, RecursionError):
        return []


def _elements(shape: Any) -> int:
    """Elements of a tensor, or of all tensors of a list; -1 if it is not a shape."""
    if shape is None:
        return -1
    if shape and isinstance(shape[0], list):
        return sum(map(prod, shape))
    return prod(shape)
