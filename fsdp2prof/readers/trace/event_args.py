"""JSON values to numpy, and the arguments only some events carry: collective metadata, recorded input shapes.

NCCL's and RCCL's metadata is written out on ``record_param_comms`` and on the kernels. Gloo has none: its
element counts come from the recorded inputs of ``c10d::*`` and ``gloo:*``, whose meaning is known by name.
Times become exact nanoseconds, integers are read however they are written, strings are interned.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import lru_cache
from itertools import compress
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsdp2prof import backends
from fsdp2prof.readers.trace.kineto_schema import NO_TEXT, Args, Complete
from fsdp2prof.tables.columns import CompactArray, IntArray, Strings
from fsdp2prof.tables.trace import CollectiveArgs, ShapeTable, SyncTable

LONGEST_US = float(1 << 43)
"""No event of a trace lasts a hundred days.

Below it half the spacing of float64 is under half a nanosecond: three decimals survive the rounding."""
_LATEST_US = 4.6e15
"""The year 2115 of Unix time: sums and differences of such times fit 64 bits of nanoseconds."""

_THREE_DECIMALS = re.compile(rb"(?:-?[0-4]?\d{1,15}\.\d{3}(?:,|\Z))+")
_NUMBER = re.compile(rb"-?\d{1,16}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,2})?")
_INT64 = np.iinfo(np.int64)
_NARROWER = tuple((dtype, np.iinfo(dtype)) for dtype in (np.int8, np.int16, np.int32))


class TextTimeNeededError(Exception):
    """Fractional timestamps too large for float64 to hold their nanoseconds: decode them as text."""


class NoTimeError(msgspec.ValidationError):
    """An invalid timestamp or duration, or one that no training has."""

    def __init__(self, most_us: float) -> None:
        super().__init__(f"a time that is not a number of microseconds up to {most_us:.0f}")


class Interner(dict[Any, int]):
    """Distinct values numbered in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def codes(self, values: Iterable[Any], count: int) -> npt.NDArray[np.int32]:
        """Numbers of ``count`` values."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=count)


def to_ns(microseconds: list[Any], most_us: float = _LATEST_US) -> IntArray:
    """Convert microseconds (int, float or JSON text) to exact integer nanoseconds.

    Whole and fractional microseconds are converted apart; raises :class:`TextTimeNeededError` where float64
    has already lost the fraction (from 2**43 us on, as in Unix time), and ``NoTimeError`` above ``most_us``.
    """
    if not microseconds:
        return np.empty(0, dtype=np.int64)
    if isinstance(microseconds[0], msgspec.Raw):
        return _text_to_ns(microseconds, most_us)
    try:
        values = np.fromiter(microseconds, dtype=np.float64, count=len(microseconds))
    except OverflowError:
        raise NoTimeError(most_us) from None
    largest = _largest(values)
    if largest > most_us:
        raise NoTimeError(most_us)
    if largest >= LONGEST_US:
        if any(type(time) is float for time in microseconds):
            raise TextTimeNeededError
        return np.array(microseconds, dtype=np.int64) * 1000
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + fraction_ns)


def _largest(values: npt.NDArray[Any]) -> float:
    return max(-float(values.min()), float(values.max()))


def _text_to_ns(microseconds: list[msgspec.Raw], most_us: float) -> IntArray:
    """Convert decimal text: dropping the point of a number with three decimals makes nanoseconds of it."""
    text = b",".join(microseconds)
    if text.count(b",") == len(microseconds) - 1 and _THREE_DECIMALS.fullmatch(text):
        times_ns = np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")
    else:
        times_ns = np.asarray([_decimal_ns(item, most_us) for item in microseconds], dtype=np.int64)
    if _largest(times_ns) > most_us * 1000:
        raise NoTimeError(most_us)
    return times_ns


def _decimal_ns(item: msgspec.Raw, most_us: float) -> int:
    time = Decimal(bytes(item).decode()) if _NUMBER.fullmatch(item) else None
    if time is None or abs(time) > most_us:
        raise NoTimeError(most_us)
    return round(time * 1000)


def int_column(values: Sequence[Any]) -> IntArray:
    """Convert JSON values to int64: text is parsed (``0x`` too), anything but a 64-bit integer becomes -1."""
    try:
        column = np.array(values, dtype=np.int64)
        if column.shape == (len(values),):  # else they were lists
            return column
    except (TypeError, ValueError, OverflowError):
        pass
    return np.asarray([_integer(value) for value in values], dtype=np.int64)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same integers in as few bytes as their range needs."""
    if not len(values):
        return values
    low, high = values.min(), values.max()
    for dtype, limits in _NARROWER:
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    return values


def compact(values: npt.NDArray[Any]) -> CompactArray:
    """Return the same integers in 32 bits each if all fit, otherwise in 64."""
    limits = np.iinfo(np.int32)
    fit = not len(values) or (limits.min <= values.min() and values.max() <= limits.max)
    return values.astype(np.int32 if fit else np.int64, copy=False)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return -1
    if not isinstance(value, int) or not _INT64.min <= value <= _INT64.max:
        return -1
    return value


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
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "convolution",
        "convolution_backward",
        "embedding",
        "scatter_",
        "topk",
        "mul",
        "sub",
        "sum",
        "mean",
        "scaled_dot_product_attention",
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
"""Only the name of the input."""
_NO_DTYPE = frozenset({"", "TensorList", "GenericList"})
_DOUBLE = b"double"
"""In ``Input type``: a tensor in float64, or a complex one of it; a number is a ``Scalar``."""


@lru_cache(maxsize=4096)
def has_shapes(name: str) -> bool:
    """Whether an operator's recorded inputs are stored."""
    return name in _SHAPED_NAMES or name.startswith(_SHAPED_PREFIXES) or backends.is_collective_range(name)


def _is_in_place(name: str) -> bool:
    _, _, operation = name.partition(":")
    return name in _IN_PLACE or (
        operation in ("all_reduce", "broadcast") and backends.is_collective_range(name)
    )


def recorded_shapes(events: list[Complete], args: list[Args], rows: list[int]) -> list[Shape]:
    """Recorded inputs of those rows that have any, and of every operator that takes a tensor in float64."""
    types = [one.input_types for one in args]
    double: Iterable[int] = ()
    if _DOUBLE in b",".join(types):
        double = (row for row, one in enumerate(types) if one is not NO_TEXT and _DOUBLE in bytes(one))
    return [
        (i, events[i].name, _shapes(_compact(args[i].input_dims)), _compact(args[i].input_types))
        for i in sorted({*rows, *double})
        if args[i].input_dims is not NO_TEXT
    ]


def nvtx_shape(row: int, name: str, sizes: str) -> Shape | None:
    """Shapes that ``emit_nvtx`` appended to an operator's name; None if they are not needed."""
    return (row, name, _shapes(sys.intern(sizes.replace(" ", ""))), "") if has_shapes(name) else None


def collective_metadata(args: list[Args]) -> list[Metadata]:
    """Collective metadata of the events that name a collective by row, in the order of :data:`Metadata`."""
    return [_metadata(row, args[row]) for row in compress(range(len(args)), [a.collective for a in args])]


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


def sync_waits(args: list[Args], rows: list[int]) -> list[Sync]:
    """Streams and events that the synchronisation events among those rows wait for."""
    return [
        (row, args[row].wait_on_stream, args[row].record_correlation)
        for row in rows
        if args[row].wait_on_stream is not None
    ]


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
    """Recorded shapes with null for anything else: a shape lists sizes, that of a list of tensors lists
    shapes."""
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
