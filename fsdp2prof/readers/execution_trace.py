"""PyTorch execution traces (``torch.profiler.ExecutionTraceObserver``), plain or gzip: operators with shapes.

Format: ``torch/csrc/profiler/standalone/execution_trace_observer.cpp``, schema 1.1 (``1.1.1-chakra.0.0.4`` in
torch 2.13). Values of tensors are not in it, only their shapes, strides and types.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip, isal_zlib

from fsdp2prof.errors import InputError
from fsdp2prof.tables.probes import ExecutionNode, ExecutionTrace, TensorValue, Value
from fsdp2prof.units import DTYPE_BYTES

_MALFORMED: Any = (  # the stub of isal declares an instance
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
    EOFError,
    isal_zlib.error,
)
_MOST_BYTES = 2 << 30
_MOST_DIMS = 64
_MOST_ELEMENTS = 1 << 48
_TENSOR = re.compile(r"Tensor\((?:c10::)?(\w[\w<> ]*)\)")
_OLD = re.compile(rb'"schema": ?"(0\.[\d.]{1,9}|1\.0\.[01])"')
"""Schemas that keep shapes and types elsewhere."""
_BEGINNING = 4096
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "complex<float>": "complex64",
    "complex<double>": "complex128",
}


class _Values(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[str] = []
    strides: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str = ""
    value: Any = None


class _Node(msgspec.Struct):
    id: int
    name: str
    ctrl_deps: int = -1
    inputs: _Values = msgspec.field(default_factory=_Values)
    outputs: _Values = msgspec.field(default_factory=_Values)
    attrs: list[_Attribute] = []


class _Document(msgspec.Struct):
    schema: str
    nodes: list[_Node]


def read_execution_trace(path: Path) -> ExecutionTrace:
    """Read one rank's trace. Raises ``InputError`` for a file that is not one, has another schema, or is
    truncated."""
    text = b""
    try:
        text = _text(path)
        document = msgspec.json.decode(text, type=_Document)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except _MALFORMED as error:
        if (old := _OLD.search(text[:_BEGINNING])) is not None:
            raise InputError(
                f"{path}: an execution trace of schema {old[1].decode()}, older than fully_shard: observe "
                "a step with torch 2.3 or newer"
            ) from None
        raise InputError(f"{path}: not a PyTorch execution trace, or one cut off: {error}") from None
    if not document.schema.startswith("1."):
        raise InputError(f"{path}: an execution trace of schema {document.schema}; only 1.1 is supported")
    nodes = [_typed(node) for node in sorted(document.nodes, key=lambda node: node.id)]
    if not nodes:
        raise InputError(f"{path}: an execution trace without operators: was the observer started?")
    return ExecutionTrace(source=str(path), version=document.schema, nodes=nodes)


def _text(path: Path) -> bytes:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with igzip.open(path, "rb") if packed else path.open("rb") as stream:  # type: ignore[no-untyped-call]
        text = stream.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise InputError(f"{path}: more than {_MOST_BYTES >> 30} GiB; observe one training step")
    return bytes(text)


def _typed(node: _Node) -> ExecutionNode:
    schema = next((one.value for one in node.attrs if one.name == "op_schema"), "")
    return ExecutionNode(
        id=node.id,
        parent=node.ctrl_deps,
        name=node.name,
        schema=schema if isinstance(schema, str) else "",
        inputs=_values(node.inputs),
        outputs=_values(node.outputs),
    )


def _values(told: _Values) -> tuple[Value, ...]:
    found = []
    for position, kind in enumerate(told.types):
        shape = told.shapes[position] if position < len(told.shapes) else None
        stride = told.strides[position] if position < len(told.strides) else None
        value = told.values[position] if position < len(told.values) else None
        found.append(_value(kind, shape, stride, value))
    return tuple(found)


def _value(kind: str, shape: Any, stride: Any, value: Any) -> Value:
    dtypes = _TENSOR.findall(kind)
    if kind.startswith("Tensor("):
        return _tensor(dtypes[0], shape, stride) if dtypes else None
    if kind.startswith("GenericList[Tensor(") and isinstance(shape, list):
        strides = stride if isinstance(stride, list) and len(stride) == len(shape) else [None] * len(shape)
        if len(dtypes) != len(shape):
            return None
        tensors = [_tensor(*one) for one in zip(dtypes, shape, strides, strict=True)]
        return tuple(one for one in tensors if one is not None)
    if kind == "Bool" and isinstance(value, bool):
        return value
    return None


def _tensor(written: str, shape: Any, stride: Any) -> TensorValue | None:
    dtype = _DTYPES.get(written.lower().strip(), written.lower().strip())
    sizes = _sizes(shape)
    if sizes is None or dtype not in DTYPE_BYTES or prod(sizes) > _MOST_ELEMENTS:
        return None
    steps = _sizes(stride)
    if steps is None or len(steps) != len(sizes) or max(steps, default=0) > _MOST_ELEMENTS:
        steps = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return TensorValue(sizes, steps, dtype)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return None
    return tuple(value) if all(type(size) is int and 0 <= size <= _MOST_ELEMENTS for size in value) else None
