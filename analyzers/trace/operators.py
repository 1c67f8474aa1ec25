"""Matrix products and attention by shape: their work, their bytes and their rates; kernels by name.

These are the points of a roofline. Operations are counted as in
:func:`fsdp2prof.analyzers.trace.accounting.operations`. Bytes are the minimum that a call can move: every
operand read once, every result written once. A call's time is that of the kernels launched inside it, or
its own on a host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.steps import mean
from fsdp2prof.analyzers.trace.accounting import ATTENTION, PRODUCTS, operations
from fsdp2prof.analyzers.trace.collective_names import dtype_name
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.backends import kernel_name
from fsdp2prof.results.trace import KernelRow, OperatorRow
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import Trace
from fsdp2prof.units import dtype_bytes

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class OperatorSum:
    """Calls of one operator with the same inputs on one rank."""

    name: str
    dims: str
    types: str
    count: int
    total_ns: int


def operator_sums(tables: RankTables) -> list[OperatorSum]:
    """Sum a rank's products and attention that begin in its steps, by operator and inputs.

    Calls whose kernels are not in the trace (a graph's, or launched before it) are left out.
    """
    trace = tables.trace
    rows = _calls(tables)
    events = trace.shapes.event[rows]
    names = trace.events.name.take(events)
    spent = _spent(tables, events)
    sums: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])
    codes = (names.codes, trace.shapes.dims.codes[rows], trace.shapes.types.codes[rows])
    for *key, time in zip(*(part.tolist() for part in codes), spent.tolist(), strict=True):
        if time > 0:
            entry = sums[key[0], key[1], key[2]]
            entry[0] += 1
            entry[1] += time
    dims, types = trace.shapes.dims.values, trace.shapes.types.values
    return [
        OperatorSum(names.values[name], dims[shape], types[kind] if kind >= 0 else "[]", count, total)
        for (name, shape, kind), (count, total) in sums.items()
    ]


def _calls(tables: RankTables) -> IntArray:
    """Return the rows of the shapes whose operations are known, of calls inside no other and in a step."""
    trace, steps = tables.trace, tables.analysed
    names, dims = trace.events.name.take(trace.shapes.event), trace.shapes.dims
    pairs = list(zip(names.codes.tolist(), dims.codes.tolist(), strict=True))
    flops = {pair: operations(names.values[pair[0]], dims.values[pair[1]]) for pair in set(pairs)}
    counted = np.array([flops[pair] > 0 for pair in pairs], dtype=np.bool_)
    start = trace.events.start_ns[trace.shapes.event]
    rows = np.flatnonzero(counted & (intervals.containing(steps.start_ns, steps.end_ns, start) >= 0))
    return rows[_outermost(trace, trace.shapes.event[rows])]


def _outermost(trace: Trace, events: IntArray) -> IntArray:
    """Return the positions of the calls that no other of these calls holds."""
    thread, start = trace.events.thread[events], trace.events.start_ns[events]
    end = trace.events.end_ns[events]
    kept: list[int] = []
    last_thread, last_end = -1, -1
    for at in np.lexsort((-end, start, thread)).tolist():
        if thread[at] != last_thread or start[at] >= last_end:
            kept.append(at)
            last_thread, last_end = int(thread[at]), int(end[at])
    return np.array(sorted(kept), dtype=np.int64)


def _spent(tables: RankTables, events: IntArray) -> IntArray:
    """Return the time of each call: of its kernels on the device, on a host its own."""
    table, work = tables.trace.events, tables.work
    if not len(tables.device):
        return table.end_ns[events] - table.start_ns[events]
    spent = np.zeros(len(events), dtype=np.int64)
    threads = table.thread[events]
    for thread in intervals.distinct(threads):
        mine = np.flatnonzero(threads == thread)
        mine = mine[np.argsort(table.start_ns[events[mine]], kind="stable")]
        kernels = np.flatnonzero((work.thread == thread) & ~work.is_memcpy & ~work.is_fsdp)
        row = intervals.containing(
            table.start_ns[events[mine]], table.end_ns[events[mine]], work.launch_ns[kernels]
        )
        inside = row >= 0
        took = (work.end_ns - work.start_ns)[kernels[inside]]
        np.add.at(spent, mine[row[inside]], took)
    return spent


def operator_rows(
    ranks: Iterable[list[OperatorSum]],
    windows: int,
    peak_flops_per_s: Mapping[str, float],
    peak_memory_bytes_per_s: float | None,
) -> list[OperatorRow]:
    """Put ranks together: means over ``windows``, longest first, at most 60."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for one in (one for rank in ranks for one in rank):
        entry = sums[one.name, one.dims, one.types]
        entry[0] += one.count
        entry[1] += one.total_ns
    longest = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:_SHOWN]
    return [
        _row(key, count, total, windows, peak_flops_per_s, peak_memory_bytes_per_s)
        for key, (count, total) in longest
    ]


def _row(
    key: tuple[str, str, str],
    count: int,
    total_ns: int,
    windows: int,
    peak_flops_per_s: Mapping[str, float],
    peak_memory_bytes_per_s: float | None,
) -> OperatorRow:
    name, dims, types = key
    tensors = _tensors(name, msgspec.json.decode(dims))
    dtype = _dtype(types, _first(name), len(tensors))
    flops, moved = operations(name, dims), _bytes(name, tensors, dtype)
    peak = None if dtype is None else peak_flops_per_s.get(dtype)
    flops_rate = flops * count * 1e9 / total_ns
    bytes_rate = None if moved is None else moved * count * 1e9 / total_ns
    flops_frac = flops_rate / peak if peak else None
    bytes_frac = bytes_rate / peak_memory_bytes_per_s if bytes_rate and peak_memory_bytes_per_s else None
    return OperatorRow(
        name=name,
        shapes=", ".join("x".join(map(str, shape)) for shape in tensors),
        dtype=dtype,
        count=mean(count, windows),
        total_ns=mean(total_ns, windows),
        mean_ns=mean(total_ns, count),
        flops=flops,
        bytes=moved,
        flops_per_s=flops_rate,
        bytes_per_s=bytes_rate,
        of_peak_flops_frac=flops_frac,
        of_peak_bytes_frac=bytes_frac,
        roof_frac=_roof_frac(flops, moved, flops_rate, peak, peak_memory_bytes_per_s),
    )


def _roof_frac(
    flops: int, moved: int | None, rate: float, peak: float | None, memory: float | None
) -> float | None:
    """Return the rate over the least of the device's peak and what its memory allows at this intensity."""
    if not peak or not memory or not moved:
        return None
    return rate / min(peak, memory * flops / moved)


def _first(name: str) -> int:
    """Position of the first factor, or of the query: behind the bias, or the gradient."""
    attention = ATTENTION.fullmatch(name)
    return PRODUCTS.get(name, 0) if attention is None else int(attention[1] is not None)


def _tensors(name: str, shapes: list[Any]) -> list[list[int]]:
    """Return the shapes of both factors, or of query, key and value."""
    first, count = _first(name), 2 if name in PRODUCTS else 3
    return shapes[first : first + count]


def _dtype(types: str, first: int, count: int) -> str | None:
    """Return the dtype of those tensors; None where they differ or are not known."""
    try:
        written = msgspec.json.decode(types, type=list[str])[first : first + count]
    except msgspec.MsgspecError:
        return None
    return dtype_name(written[0]) if len(written) == count and len(set(written)) == 1 else None


def _bytes(name: str, tensors: list[list[int]], dtype: str | None) -> int | None:
    """Return operands and results of a call, each once; None for those whose results have another dtype."""
    size = None if dtype is None else dtype_bytes(dtype)
    if size is None or "scaled" in name.removeprefix("aten::_scaled_dot") or "grouped" in name:
        return None
    if name in PRODUCTS:
        left, right = tensors
        return size * (prod(left) + prod(right) + prod(left[:-1]) * right[-1])
    query, key, value = tensors
    inputs, output = prod(query) + prod(key) + prod(value), prod(query[:3]) * value[3]
    return size * (2 * inputs + 2 * output if name.endswith("_backward") else inputs + output)


_Kind = Literal["compute", "fsdp_copy", "memcpy"]
_KINDS: tuple[_Kind, ...] = ("compute", "fsdp_copy", "memcpy")

_NAMED_OF_A_RANK = 300
_IN_MOST_STEPS = 0.5
"""Calls a step that a rank has more of, from which on it has them in most of its steps."""
_NAMED = 40


@dataclass(frozen=True, slots=True)
class KernelSum:
    """Kernels of one name on one rank."""

    name: str | None
    kind: _Kind
    count: int
    total_ns: int


def kernel_sums(tables: RankTables) -> list[KernelSum]:
    """Sum a rank's kernels that begin in its windows, by name and kind; the least are one row a kind."""
    work, windows = tables.work, tables.windows
    inside = intervals.containing(windows.start_ns, windows.end_ns, work.start_ns) >= 0
    work = work.take(inside)
    names = tables.trace.events.name.take(work.event)
    kind = np.where(work.is_fsdp, 1, np.where(work.is_memcpy, 2, 0))
    key = (names.codes.astype(np.int64) + 1) * len(_KINDS) + kind
    count = np.bincount(key)
    spent = np.zeros(len(count), dtype=np.int64)
    np.add.at(spent, key, work.end_ns - work.start_ns)
    sums = [
        KernelSum(
            kernel_name(names.values[one // len(_KINDS) - 1]) if one >= len(_KINDS) else None,
            _KINDS[one % len(_KINDS)],
            int(count[one]),
            int(spent[one]),
        )
        for one in np.flatnonzero(count).tolist()
    ]
    return _largest(sums, _NAMED_OF_A_RANK)


def additional_ns(ranks: Sequence[tuple[list[KernelSum], int]]) -> list[int]:
    """Return the time of each rank's kernels (CPU: operators) in excess of those of another rank per step.

    ``ranks`` are their sums and the number of steps in which they ran. The other ranks' own excess is
    subtracted: kernels that only have another name elsewhere cancel out. An excess in only a few steps
    does not count: whether a nested operator of a CPU is counted depends on its time.
    """
    known = [
        {
            one.name: one.count / max(1, steps)
            for one in sums
            if one.kind == "compute" and one.name is not None
        }
        for sums, steps in ranks
    ]
    found = []
    for at, (sums, _) in enumerate(ranks):
        others = known[:at] + known[at + 1 :]
        more = 0.0
        for one in sums:
            if one.kind != "compute" or one.name is None:
                continue
            mine = known[at][one.name]
            excess = mine - max((other.get(one.name, 0.0) for other in others), default=0.0)
            if excess >= _IN_MOST_STEPS:
                more += excess / mine * one.total_ns
        found.append(int(more))
    most = [max((ns for j, ns in enumerate(found) if j != i), default=found[i]) for i in range(len(found))]
    return [max(0, own - other) for own, other in zip(found, most, strict=True)]


def kernel_rows(ranks: Iterable[list[KernelSum]], windows: int, step_ns: float | None) -> list[KernelRow]:
    """Combine ranks: means over ``windows``, longest first, unnamed entries last."""
    sums = _largest([one for rank in ranks for one in rank], _NAMED)
    rows = [
        KernelRow(
            name=one.name,
            kind=one.kind,
            count=mean(one.count, windows),
            total_ns=mean(one.total_ns, windows),
            mean_ns=mean(one.total_ns, one.count),
            step_frac=one.total_ns / windows / step_ns if step_ns else None,
        )
        for one in sums
    ]
    return sorted(rows, key=lambda row: (row.name is None, -row.total_ns, row.name or ""))


def _largest(sums: Iterable[KernelSum], most: int) -> list[KernelSum]:
    """Add up equal names, keep the ``most`` longest, and make the others one without a name a kind."""
    total: Counter[tuple[str | None, _Kind]] = Counter()
    count: Counter[tuple[str | None, _Kind]] = Counter()
    for one in sums:
        total[one.name, one.kind] += one.total_ns
        count[one.name, one.kind] += one.count
    order = sorted(total, key=lambda key: (key[0] is None, -total[key], key[0] or "", key[1]))
    named = {key for key in order[:most] if key[0] is not None}
    kept: dict[tuple[str | None, _Kind], list[int]] = defaultdict(lambda: [0, 0])
    for name, kind in order:
        entry = kept[name if (name, kind) in named else None, kind]
        entry[0] += count[name, kind]
        entry[1] += total[name, kind]
    return [KernelSum(name, kind, number, spent) for (name, kind), (number, spent) in kept.items()]
