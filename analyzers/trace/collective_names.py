"""Names of collectives and the bytes they move: element types, payload and wire.

Gloo's collectives take their time from ranges of worker threads, and their origin from the issuing
operators.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import transfer_rows
from fsdp2prof.tables.columns import IntArray, Strings
from fsdp2prof.tables.trace import Trace

_FUNCTIONS = {
    "NVSHMEM, rocSHMEM": r"nvshmem|rocshmem",
    "symmetric memory of torch": r"multimem_|(?:one|two)_shot_all_reduce|alltoallv|exchangesplitandoffset",
    "custom all-reduce of vLLM, SGLang, AITER": r"cross_device_reduce|allreduce_prototype",
    "TensorRT-LLM, FlashInfer": r"(?:lowprecision)?(?:one|two)shotallreduce|(?:\w+_)?allreduce_fusion_kernel"
    r"|moealltoall|moea2a(?!\w*prepare)",
    "userbuffers of TransformerEngine": r"k?userbuffers_|ubx_kernel_",
    "MORI": r"ep(?:dispatch|combine)(?!\w*(?:layout|prepare))",
}
"""Family -> prefixes of its kernels' own names; an accelerator's own prefixes are in its row of backends."""

_NAMESPACES = {
    "DeepEP and what grew from it": r"(?:deep_ep|mscclpp::ep|uccl|grpcoll)::(?!layout::)",
    "hybrid_ep of DeepEP": r"hybrid_ep::(?=dispatch|combine)",
    "expert parallelism of NCCL": r"nccl_ep::",
    "torchcomms": r"torchcomms?::",
    "MSCCL++": r"mscclpp::",
    "pplx": r"pplx::",
    "NVSHMEM, rocSHMEM": r"(?:nvshmem|rocshmem)\w*::",
}
"""Family -> a namespace of which every kernel communicates, whatever it is called (``dispatch``)."""

_FUNCTION = re.compile("|".join(_FUNCTIONS.values()), re.IGNORECASE)
_NAMESPACE = re.compile(rf"(?:\w+::)*?(?:{'|'.join(_NAMESPACES.values())})", re.IGNORECASE)

_OPS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("exchangesplitandoffset", "all_to_all"),
    ("dispatch", "all_to_all"),
    ("combine", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)

_SHORT_OPS = (
    (re.compile(r"userbuffers_\w+_ag(?![a-z0-9])"), "all_gather"),
    (re.compile(r"userbuffers_\w+_rs(?![a-z0-9])"), "reduce_scatter"),
    (re.compile(r"userbuffers_\w*sum_"), "all_reduce"),
    (re.compile(r"moeA2A"), "all_to_all"),
)
"""Abbreviations, each in the names of one family."""

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


@lru_cache(maxsize=1 << 13)
def is_collective_kernel(name: str) -> bool:
    """Whether a kernel's own name, or the namespace it is from, says that it communicates.

    The names are those of the libraries' public sources.
    """
    plain = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0].strip()
    qualified = plain.rpartition(" ")[2]
    function = qualified.rpartition("::")[2]
    return (
        backends.is_collective_kernel(function)
        or _FUNCTION.match(function) is not None
        or _NAMESPACE.match(qualified) is not None
    )


def op_of(name: str) -> str | None:
    """Return the kind of collective (one of :data:`fsdp2prof.vocabulary.OPS`) a name speaks of.

    Accepts metadata (``_allgather_base``), operators (``c10d::_reduce_scatter_base_``), ranges
    (``gloo:all_reduce``) and kernels (``ncclDevKernel_AllGather_RING_LL``). ``None`` if it names none.
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    named = next((op for word, op in _OPS if word in letters), None)
    return named or next((op for pattern, op in _SHORT_OPS if pattern.search(name)), None)


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
    """Return the bytes each rank sends: payload (n-1)/n, all-reduce 2(n-1)/n; -1 if unknown.

    nccl-tests' bus factors, whole bytes (floor). A send or receive sends its payload; a broadcast, like
    all other operations, has no single number for all ranks.
    """
    known = (payload >= 0) & (group_size > 0)
    n = np.where(known, group_size, 1)
    shares = op.matches(lambda name: name in ("all_gather", "reduce_scatter", "all_to_all"))
    wire = np.where(shares, payload * (n - 1) // n, -1)
    wire = np.where(op.equals("all_reduce"), 2 * payload * (n - 1) // n, wire)
    wire = np.where(op.equals("send_recv"), payload, wire)
    return np.where(known | (op.equals("send_recv") & (payload >= 0)), wire, -1)


_TITLES = {"reduce_scatter": "all_reduce"}
"""Gloo implements a reduce-scatter as an all-reduce of the whole input, and names its range so."""


def gloo_ranges(trace: Trace) -> IntArray:
    """Return the event rows of gloo's worker ranges, in order of their start.

    They are called ``gloo:all_gather``, or as FSDP wishes (``FSDP::all_gather (layers.0)``) in newer torch.
    """
    events = trace.events
    label = np.flatnonzero(events.category.equals("user_annotation") & (events.thread >= 0))
    named = label[transfer_rows(trace.labels)]
    workers = np.flatnonzero(events.name.matches(lambda name: name.startswith("gloo:")))
    return intervals.distinct(np.concatenate([workers, named]))


def match_issuers(trace: Trace, ranges: IntArray) -> IntArray:
    """Return the ``c10d::*`` event row that issued each worker range; -1 if it is not in the file.

    A worker executes its group's work first in, first out. Ranges and operators are therefore paired in
    order of time within one kind and input size (if both are recorded, otherwise within one kind); a range
    that begins when no work of its kind is pending was issued before recording began.
    """
    events = trace.events
    issuers = np.flatnonzero(events.name.matches(lambda name: name.startswith("c10d::")))
    matched = np.full(len(ranges), -1, dtype=np.int64)
    size = np.full(len(events), -1, dtype=np.int64)
    size[trace.collective_args.event] = trace.collective_args.in_nelems
    title, titles = _titles(trace, ranges)
    for sized in (True, False):
        left = np.flatnonzero(matched < 0)
        free = np.setdiff1d(issuers, matched)
        if sized:
            left = left[size[ranges[left]] >= 0]
            free = free[size[free] >= 0]
        for kind in range(len(titles)):
            of_kind, to_kind = left[title[ranges[left]] == kind], free[title[free] == kind]
            for nelems in intervals.distinct(size[ranges[of_kind]]) if sized else [None]:
                some = of_kind if nelems is None else of_kind[size[ranges[of_kind]] == nelems]
                from_ = to_kind if nelems is None else to_kind[size[to_kind] == nelems]
                matched[some] = _first_in_first_out(events.start_ns, from_, ranges[some])
    return matched


def _titles(trace: Trace, ranges: IntArray) -> tuple[IntArray, list[str]]:
    """Code of the range title under which each event's collective would show; -1 for other events."""
    names = trace.events.name
    by_fsdp = names.take(ranges).matches(lambda name: name.startswith("FSDP::")).any()
    titles: dict[str, int] = {}
    codes = []
    for name in names.values:
        prefix, _, verb = name.partition(":")
        if prefix not in ("gloo", "c10d", "FSDP"):
            codes.append(-1)
            continue
        kind = op_of(verb) or verb.strip(":_")
        if prefix == "c10d" and not by_fsdp:
            kind = _TITLES.get(kind, kind)
        codes.append(titles.setdefault(kind, len(titles)))
    return np.array([*codes, -1], dtype=np.int64)[trace.events.name.codes], list(titles)


def _first_in_first_out(start_ns: IntArray, issued: IntArray, served: IntArray) -> IntArray:
    """Pair served ranges with issued operators in order; both are event rows sorted by start."""
    time = np.concatenate([start_ns[issued], start_ns[served]])
    change = np.concatenate([np.ones(len(issued), np.int64), -np.ones(len(served), np.int64)])
    order = np.argsort(time, kind="stable")
    pending = np.cumsum(change[order])
    lowest = np.minimum.accumulate(np.minimum(pending, 0))
    # A range that brings the count to a new low found nothing pending.
    fresh_low = np.diff(lowest, prepend=0) < 0
    had_issuer = np.empty(len(order), dtype=np.bool_)
    had_issuer[order] = ~fresh_low
    had_issuer = had_issuer[len(issued) :]
    result = np.full(len(served), -1, dtype=np.int64)
    result[had_issuer] = issued[: int(had_issuer.sum())]
    return result
