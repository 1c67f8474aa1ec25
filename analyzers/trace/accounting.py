"""Where each nanosecond of a step went: disjoint parts that sum to the window exactly.

What a host thread computes is its operators that do the work themselves. Floating-point operations come from
recorded shapes and count as ``torch.utils.flop_counter`` does: a multiply-add is two, attention is not halved
when causal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.launches import DeviceTable
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.collective_names import gloo_ranges
from fsdp2prof.analyzers.trace.collectives import Collectives
from fsdp2prof.results.step import BreakdownNs, StepBreakdown
from fsdp2prof.tables.columns import BoolArray, CompactArray, IntArray, Table
from fsdp2prof.tables.trace import EventTable, PhaseTable, StepTable, Trace

_NOT_WORK = ("autograd::", "c10d::", "c10d_functional", "_c10d_functional", "record_param_comms")
"""Wrappers of other operators, and operators that issue a collective or block until one ends."""

_DEEPEST = 64
"""Nesting depth beyond which only operators that call no other count: no torch operator nests this deep."""


def working_operators(trace: Trace) -> IntArray:
    """Return the event rows of the operators that do the work themselves, in order of their start.

    An operator is a ``namespace::name`` host event, autograd's own wrappers and collectives apart. One that
    calls no other works itself, and so does one of ATen whose working operators inside take less than half of
    it (``aten::mm`` looks at its arguments through an operator of its own): then they are part of it. Of
    other namespaces what is left may be Python. One that issues a collective does not work itself. No two of
    those returned overlap on a thread. Threads that carry out gloo's collectives do not count: what they run
    is communication. (Its sends and receives have their ranges on the thread that asks for them.)
    """
    events = trace.events
    operators = events.category.equals("cpu_op") & events.name.matches(lambda name: "::" in name)
    wrapping = events.name.matches(lambda name: name.startswith(_NOT_WORK))
    native = events.name.matches(lambda name: name.startswith("aten::"))
    whole = events.name.matches(lambda name: name in PRODUCTS or ATTENTION.fullmatch(name) is not None)
    asking = events.thread[events.name.matches(lambda name: name.startswith("c10d::"))]
    workers = np.setdiff1d(events.thread[gloo_ranges(trace)], asking)
    rows = np.flatnonzero(operators & ~np.isin(events.thread, workers))
    kept = []
    for thread in intervals.distinct(events.thread[rows]):
        mine = rows[events.thread[rows] == thread]
        mine = mine[np.lexsort((-events.end_ns[mine], events.start_ns[mine]))]
        start, end = events.start_ns[mine], events.end_ns[mine]
        kept.append(mine[_working(start, end, wrapping[mine], native[mine], whole[mine])])
    return np.sort(np.concatenate(kept)) if kept else rows


def outermost(events: EventTable, rows: IntArray) -> IntArray:
    """Return those of some events of one thread that no other of them holds, by their start."""
    ordered = rows[np.lexsort((-events.end_ns[rows], events.start_ns[rows]))]
    reach = np.maximum.accumulate(events.end_ns[ordered])
    return ordered[np.append(True, events.start_ns[ordered][1:] >= reach[:-1])] if len(rows) else rows


def _working(
    start: IntArray, end: IntArray, wrapping: BoolArray, native: BoolArray, whole: BoolArray
) -> BoolArray:
    """Decide which of a thread's nested operators do the work themselves, from the innermost outwards.

    They are sorted by ``start``, the enclosing one first; ``wrapping`` operators never do, only ``native``
    ones do together with the operators they call, and products and attention (``whole``) always do.
    """
    order = np.arange(len(start))
    after = np.searchsorted(start, end, side="left")  # first operator that is not inside
    after = np.maximum(after, order + 1)
    depth = order - np.searchsorted(np.sort(np.maximum(end, start + 1)), start, side="right")
    depth = np.minimum(depth, _DEEPEST)
    issues = _inside(wrapping.astype(np.int64), order, after) > 0
    works = np.zeros(len(start), dtype=np.bool_)
    for level in range(int(depth.max(initial=0)), -1, -1):
        covered = _inside(np.where(works, end - start, 0), order, after)
        itself = (native & (2 * covered < end - start)) | whole if level < _DEEPEST else np.zeros_like(works)
        chosen = (depth == level) & ~wrapping & ~issues & ((after == order + 1) | itself)
        swallowed = np.zeros(len(start) + 1, dtype=np.int64)
        np.add.at(swallowed, order[chosen] + 1, 1)
        np.add.at(swallowed, after[chosen], -1)
        works = (works & (np.cumsum(swallowed)[:-1] == 0)) | chosen
    return works


def _inside(values: IntArray, order: IntArray, after: IntArray) -> IntArray:
    """Sum the values of the operators inside each one."""
    sums = np.concatenate([[0], np.cumsum(values)])
    total: IntArray = sums[after] - sums[order + 1]
    return total


_EXPOSED_PARTS = {
    "all_gather": "exposed_all_gather",
    "reduce_scatter": "exposed_reduce_scatter",
    "all_reduce": "exposed_all_reduce",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTable(Table):
    """Everything that ran but collectives, sorted by ``start_ns``: device activities or working operators."""

    event: IntArray
    """Row in the trace's events."""
    start_ns: IntArray
    end_ns: IntArray
    stream: CompactArray
    """Stream; on a host-only trace the thread."""
    launch_ns: IntArray
    """Host time of its launch; -1 unknown. An operator launches itself."""
    thread: CompactArray
    """Thread that launched it; -1 unknown."""
    phase_row: IntArray
    """Row of the phase it was launched in; -1 none."""
    is_fsdp: BoolArray
    """Launched inside an FSDP label: a copy, cast or view of FSDP's own."""
    is_memcpy: BoolArray
    """A host transfer, a user's copy, or a memory set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Work by time, as sets of instants that may overlap."""

    compute: Intervals
    fsdp_copy: Intervals
    comm: Intervals
    memcpy: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The windows, split: disjoint sets of instants, each named for the first cause that applies."""

    compute: Intervals
    fsdp_copy: Intervals
    exposed: Intervals
    """A collective in flight and neither compute nor FSDP's copies."""
    memcpy: Intervals
    idle: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure(Table):
    """Each collective's time inside each window it touches: one row per (collective, window)."""

    collective: IntArray
    window: IntArray
    """Row of the window."""
    total_ns: IntArray
    exposed_ns: IntArray
    """Time charged to it: nothing else ran but memory copies, and its result was needed first."""


def device_work(trace: Trace, device: DeviceTable, phases: PhaseTable, collectives: Collectives) -> WorkTable:
    """Return the device activities other than collectives.

    FSDP's own are kernels and device-to-device copies launched inside its labels. A memory set is no
    compute: it counts with the copies.
    """
    other = np.ones(len(device), dtype=np.bool_)
    other[collectives.activity] = False
    device = device.take(other)
    row = find_rows(phases, device.thread, device.launch_ns)
    stays = device.is_copy & trace.events.name.take(device.event).matches(backends.stays_on_device)
    is_fsdp = _in_label(phases, row) & (stays | ~(device.is_copy | device.is_set))
    return WorkTable(
        event=device.event,
        start_ns=device.start_ns,
        end_ns=device.end_ns,
        stream=device.stream,
        launch_ns=device.launch_ns,
        thread=device.thread,
        phase_row=row,
        is_fsdp=is_fsdp,
        is_memcpy=(device.is_copy | device.is_set) & ~is_fsdp,
    )


def host_work(trace: Trace, phases: PhaseTable) -> WorkTable:
    """Return the operators of a host-only trace that do the work."""
    event = working_operators(trace)
    start, thread = trace.events.start_ns[event], trace.events.thread[event]
    row = find_rows(phases, thread, start)
    return WorkTable(
        event=event,
        start_ns=start,
        end_ns=trace.events.end_ns[event],
        stream=thread,
        launch_ns=start,
        thread=thread,
        phase_row=row,
        is_fsdp=_in_label(phases, row),
        is_memcpy=np.zeros(len(event), dtype=np.bool_),
    )


def timeline(work: WorkTable, device: DeviceTable, collectives: Collectives) -> Timeline:
    """Return the work by time."""
    if len(device):
        comm = intervals.union(device.start_ns[collectives.activity], device.end_ns[collectives.activity])
    else:
        comm = intervals.union(collectives.table.start_ns, collectives.table.end_ns)
    compute = ~work.is_fsdp & ~work.is_memcpy
    return Timeline(
        compute=intervals.union(work.start_ns[compute], work.end_ns[compute]),
        fsdp_copy=intervals.union(work.start_ns[work.is_fsdp], work.end_ns[work.is_fsdp]),
        comm=comm,
        memcpy=intervals.union(work.start_ns[work.is_memcpy], work.end_ns[work.is_memcpy]),
    )


def split(run: Timeline, windows: StepTable) -> Parts:
    """Split the windows; precedence at an instant: compute, FSDP copy, communication, memcpy, idle."""
    compute, fsdp_copy, exposed, memcpy, idle = intervals.classify(
        intervals.union(windows.start_ns, windows.end_ns),
        [run.compute, run.fsdp_copy, run.comm, run.memcpy],
    )
    return Parts(compute=compute, fsdp_copy=fsdp_copy, exposed=exposed, memcpy=memcpy, idle=idle)


def expose(parts: Parts, windows: StepTable, collectives: Collectives, order: IntArray) -> Exposure:
    """Charge every exposed instant of every window to one collective.

    ``order`` says whose result is needed first (lowest wins). Per window, the charges sum to the
    communication that neither compute nor FSDP's copies cover.
    """
    table = collectives.table
    row, start, end = intervals.cut(
        table.start_ns, table.end_ns, np.concatenate([windows.start_ns, windows.end_ns])
    )
    window = intervals.containing(windows.start_ns, windows.end_ns, start)
    inside = (window >= 0) & (end > start)
    row, start, end, window = row[inside], start[inside], end[inside], window[inside]
    return Exposure(
        collective=row,
        window=window,
        total_ns=end - start,
        exposed_ns=intervals.charge(parts.exposed, start, end, order[row]),
    )


def breakdown(
    parts: Parts, windows: StepTable, collectives: Collectives, exposure: Exposure
) -> list[StepBreakdown]:
    """Return the parts of each window, exposed communication by kind."""
    compute, fsdp_copy, memcpy, idle = (
        intervals.covered(part, windows.start_ns, windows.end_ns)
        for part in (parts.compute, parts.fsdp_copy, parts.memcpy, parts.idle)
    )
    op = collectives.table.op
    kinds = [*_EXPOSED_PARTS.values(), "exposed_other_comm"]
    kind = np.array([kinds.index(_EXPOSED_PARTS.get(name, kinds[-1])) for name in op.values], dtype=np.int64)
    charged = np.zeros((len(windows), len(kinds)), dtype=np.int64)
    np.add.at(charged, (exposure.window, kind[op.codes[exposure.collective]]), exposure.exposed_ns)
    steps = []
    for i in range(len(windows)):
        comm = dict(zip(kinds, charged[i].tolist(), strict=True))
        steps.append(
            StepBreakdown(
                step=int(windows.step[i]),
                start_ns=int(windows.start_ns[i]),
                duration_ns=int(windows.end_ns[i] - windows.start_ns[i]),
                breakdown_ns=BreakdownNs(
                    compute=int(compute[i]),
                    fsdp_copy=int(fsdp_copy[i]),
                    exposed_memcpy=int(memcpy[i]),
                    idle=int(idle[i]),
                    **comm,
                ),
            )
        )
    return steps


def _in_label(phases: PhaseTable, row: IntArray) -> BoolArray:
    """Whether each phase row is an FSDP label's, not the user's own work."""
    in_label: BoolArray = np.append(~phases.activity.equals("compute"), False)
    return (row >= 0) & in_label[row]


PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::_scaled_grouped_mm": 0,
}
"""Matrix products -> position of their first factor."""
ATTENTION = re.compile(r"aten::_scaled_dot_product_\w+?_attention(?:_for_cpu)?(_backward)?")
"""Attention; its first group is there in a backward one."""
_MOST = 1 << 56
"""A minute of the fastest accelerator; and a step's sum fits 64 bits."""
_CONVOLUTION, _BACKWARD = "aten::convolution", "aten::convolution_backward"
"""Operators whose work cannot be calculated from their recorded inputs alone."""


def is_product(name: str) -> bool:
    """Whether an operator multiplies matrices, convolves or attends."""
    return name in PRODUCTS or name in (_CONVOLUTION, _BACKWARD) or ATTENTION.fullmatch(name) is not None


def step_flops(trace: Trace, steps: StepTable) -> IntArray:
    """Return the operations of each host-time step; -1 where they are not known.

    Unknown without recorded shapes, and where the recorded inputs do not say how much was computed.
    """
    return _summed(trace, steps, {})


def step_work(trace: Trace, steps: StepTable, phases: PhaseTable) -> IntArray:
    """Return as :func:`step_flops`, with convolutions and without the optimizer's: a measure of a batch.

    A convolution's output is as large as the gradient that its backward takes; where forward has none, it is
    unknown. Each backward counts as two products, although the first layer's may be one.
    """
    names, dims = trace.events.name.take(trace.shapes.event), trace.shapes.dims
    convolutions = _convolutions(set(zip(names.to_list(), dims.to_list(), strict=True)))
    event = trace.shapes.event
    row = find_rows(phases, trace.events.thread[event], trace.events.start_ns[event])
    return _summed(trace, steps, convolutions, ~phases.phase.lookup(row).equals("optimizer"))


def _convolutions(calls: set[tuple[str | None, str | None]]) -> dict[tuple[str, str], int]:
    """Return the operations of convolutions by operator and ``Input Dims``; -1 unknown."""
    forward: dict[str, set[int]] = {}
    found: dict[tuple[str, str], int] = {}
    for name, dims in calls:
        if name == _BACKWARD and dims is not None:
            shapes = msgspec.json.decode(dims)[:3]
            if len(shapes) < 3 or not all(_is_shape(shape, 3) for shape in shapes):
                found[name, dims] = -1
                continue
            made, given, weight = shapes
            transposed = weight[0] == given[1] and (weight[0] != made[1] or prod(made[2:]) > prod(given[2:]))
            product = 2 * prod(given if transposed else made) * prod(weight[1:])
            found[name, dims] = 2 * product if product <= _MOST else -1
            forward.setdefault(str([given, weight]), set()).add(product)
    for name, dims in calls:
        if name == _CONVOLUTION and dims is not None:
            products = forward.get(str(msgspec.json.decode(dims)[:2]), set())
            found[name, dims] = products.pop() if len(products) == 1 else -1
    return found


def _summed(
    trace: Trace,
    steps: StepTable,
    convolutions: dict[tuple[str, str], int],
    mask: BoolArray | None = None,
) -> IntArray:
    """Sum up the operations of each step; -1 where those of an operator are not known.

    ``mask`` says which of the operators with shapes count.
    """
    events, shapes = trace.events, trace.shapes
    names = events.name.take(shapes.event)
    pairs: dict[tuple[int, int], int] = {}
    for key in zip(names.codes.tolist(), shapes.dims.codes.tolist(), strict=True):
        if key not in pairs:
            name, dims = names.values[key[0]], shapes.dims.values[key[1]] if key[1] >= 0 else "[]"
            pairs[key] = convolutions.get((name, dims), operations(name, dims))
    keys = zip(names.codes.tolist(), shapes.dims.codes.tolist(), strict=True)
    known = np.array([pairs[key] for key in keys], dtype=np.int64)
    if mask is not None:
        known[~mask] = 0
    counted = events.name.matches(
        lambda name: (
            name in PRODUCTS or name in (_CONVOLUTION, _BACKWARD) or ATTENTION.fullmatch(name) is not None
        )
    )
    counted[shapes.event] = False
    unsized = np.zeros(0, dtype=np.int64)
    if not convolutions:
        unsized = np.flatnonzero(events.name.matches(lambda name: name in (_CONVOLUTION, _BACKWARD)))
    lost = np.concatenate([np.flatnonzero(counted), unsized, shapes.event[known < 0]])
    total = np.zeros(len(steps) + 1, dtype=np.int64)
    missing = np.zeros(len(steps) + 1, dtype=np.int64)
    np.add.at(total, _step(trace, steps, shapes.event), np.maximum(known, 0))
    np.add.at(missing, _step(trace, steps, lost), 1)
    found = np.where((missing == 0) & (total > 0), total, -1)
    return found[:-1]


def _step(trace: Trace, steps: StepTable, rows: IntArray) -> IntArray:
    return intervals.containing(steps.start_ns, steps.end_ns, trace.events.start_ns[rows])


def operations(name: str, dims: str) -> int:
    """Return the operations of a call from its ``Input Dims`` (JSON); 0 if it is not counted, -1 unknown."""
    attention = ATTENTION.fullmatch(name)
    if name not in PRODUCTS and attention is None:
        return 0
    shapes = msgspec.json.decode(dims)
    if attention:
        count = _attention(shapes, backward=attention[1] is not None)
    else:
        count = _product(shapes, PRODUCTS[name])
    return count if count <= _MOST else -1


def _product(shapes: list[Any], first: int) -> int:
    if len(shapes) < first + 2 or not all(_is_shape(shape, 2) for shape in shapes[first : first + 2]):
        return -1
    left, right = shapes[first], shapes[first + 1]
    return int(2 * prod(left) * right[-1])


def _attention(shapes: list[Any], *, backward: bool) -> int:
    """Two products forward (scores, values); five backward (scores again, and the four gradients)."""
    first = 1 if backward else 0
    if len(shapes) < first + 3 or not all(_is_shape(shape, 4) for shape in shapes[first : first + 3]):
        return -1
    query, key, value = shapes[first : first + 3]
    scores = 2 * prod(query[:3]) * key[2]
    return int(scores * (3 * query[3] + 2 * value[3] if backward else query[3] + value[3]))


def _is_shape(shape: Any, least: int) -> bool:
    return isinstance(shape, list) and len(shape) >= least and all(isinstance(size, int) for size in shape)
