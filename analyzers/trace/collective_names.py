"""What collectives are called, and the bytes they move: names, element types, payload and wire."""

from __future__ import annotations

import re

import numpy as np

from fsdp2prof import backends
from fsdp2prof.tables import IntArray, Strings

__all__ = [
    "dtype_name",
    "is_collective_kernel",
    "itemsize",
    "op_of",
    "payload_bytes",
    "wire_bytes",
]

_OPS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)

_DTYPES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "long": "int64",
    "longint": "int64",
    "int": "int32",
    "short": "int16",
    "shortint": "int16",
    "byte": "uint8",
    "unsignedchar": "uint8",
    "char": "int8",
    "signedchar": "int8",
    "bool": "bool",
    "complexfloat": "complex64",
    "complex<float>": "complex64",
    "complexdouble": "complex128",
    "complex<double>": "complex128",
}

_BITS = re.compile(r"(?:b?float|u?int|complex)(\d+)(?:_\w+)?")


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel's name, return type and namespaces apart, says that it communicates."""
    plain = re.split(r"[<(]", name.replace("(anonymous namespace)", ""), maxsplit=1)[0]
    return backends.is_collective_kernel(re.split(r"::|\s", plain)[-1])


def op_of(name: str) -> str | None:
    """Return the kind of collective (one of :data:`fsdp2prof.vocabulary.OPS`) a name speaks of.

    Accepts metadata (``_allgather_base``), operators (``c10d::_reduce_scatter_base_``), ranges
    (``gloo:all_reduce``) and kernels (``ncclDevKernel_AllGather_RING_LL``). ``None`` if it names none.
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((op for word, op in _OPS if word in letters), None)


def dtype_name(written: str) -> str:
    """Return torch's name of an element type written in any of its spellings, without the module."""
    plain = written.removeprefix("c10::").removeprefix("torch.").lower().replace(" ", "")
    return _DTYPES.get(plain, plain)


def itemsize(dtype: str) -> int:
    """Return the bytes of one element; -1 for a type this package does not know."""
    if dtype == "bool":
        return 1
    match = _BITS.fullmatch(dtype)
    return int(match[1]) // 8 if match else -1


def payload_bytes(
    op: Strings, dtype: Strings, in_nelems: IntArray, out_nelems: IntArray, group_size: IntArray
) -> IntArray:
    """Return each collective's payload; -1 where its size or type is unknown.

    all-gather: whole output; reduce-scatter: whole input; all others: this rank's input. A missing side
    follows from the other and the group size.
    """
    size = np.array([itemsize(name) for name in dtype.values] + [-1], dtype=np.int64)[dtype.codes]
    from_input = np.where((in_nelems >= 0) & (group_size > 0), in_nelems * group_size, -1)
    from_output = np.where((out_nelems >= 0) & (group_size > 0), out_nelems * group_size, -1)
    gather, scatter = op.equals("all_gather"), op.equals("reduce_scatter")
    elements = np.where(in_nelems >= 0, in_nelems, out_nelems)
    elements = np.where(gather, np.where(out_nelems >= 0, out_nelems, from_input), elements)
    elements = np.where(scatter, np.where(in_nelems >= 0, in_nelems, from_output), elements)
    return np.where((elements >= 0) & (size > 0), elements * size, -1)


def wire_bytes(op: Strings, payload: IntArray, group_size: IntArray) -> IntArray:
    """Return the bytes each rank sends: payload (n-1)/n, all-reduce 2(n-1)/n; -1 where unknown.

    nccl-tests' bus factors, whole bytes (floor). A send or receive sends its payload; a broadcast, and
    everything else, has no one figure for all ranks.
    """
    known = (payload >= 0) & (group_size > 0)
    n = np.where(known, group_size, 1)
    shares = op.matches(lambda name: name in ("all_gather", "reduce_scatter", "all_to_all"))
    wire = np.where(shares, payload * (n - 1) // n, -1)
    wire = np.where(op.equals("all_reduce"), 2 * payload * (n - 1) // n, wire)
    wire = np.where(op.equals("send_recv"), payload, wire)
    return np.where(known | (op.equals("send_recv") & (payload >= 0)), wire, -1)
