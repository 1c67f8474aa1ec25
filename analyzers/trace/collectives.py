"""Every collective of one rank: its time, its issuer, its layer, and the data it moved.

Collectives of a rehearsal: the operators that issue them, since no transfer follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.launches import DeviceTable
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace import process_groups
from fsdp2prof.analyzers.trace.collective_names import (
    dtype_name,
    gloo_ranges,
    is_collective_kernel,
    match_issuers,
    op_of,
    payload_bytes,
    wire_bytes,
)
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_strings
from fsdp2prof.tables.trace import CollectiveTable, PhaseTable, StepTable, Trace


def rehearsed_issuers(trace: Trace) -> tuple[IntArray, IntArray]:
    """Return the event rows that issue collectives, and of each the row around it that says more; -1: none.

    Of operators in each other the outermost counts. What it takes as a list, without its type, the functional
    operator or the rehearsal's own range around it names. On tensors without data a functional operator
    stands alone.
    """
    names = trace.events.name
    issuers = _outermost(trace, np.flatnonzero(names.matches(issues_collective)))
    functional = _outermost(trace, np.flatnonzero(names.matches(_is_functional)))
    alone = np.setdiff1d(functional, _enclosing(trace, issuers, functional))
    ranges = np.flatnonzero(names.matches(lambda name: name.startswith("fake:")))
    issuers = np.concatenate([issuers, alone])
    return issuers, _enclosing(trace, issuers, np.union1d(functional, ranges))


def _outermost(trace: Trace, rows: IntArray) -> IntArray:
    """Those of some events that lie in no other of them."""
    events = trace.events
    ordered = rows[np.lexsort((-events.end_ns[rows], events.start_ns[rows], events.thread[rows]))]
    found = []
    thread, reach = -1, 0
    for row in ordered.tolist():
        if events.thread[row] != thread or events.start_ns[row] >= reach:
            thread, reach = events.thread[row], events.end_ns[row]
            found.append(row)
    return np.array(found, dtype=np.int64)


def _enclosing(trace: Trace, rows: IntArray, candidates: IntArray) -> IntArray:
    """Event row of the innermost candidate around each of ``rows``; -1 if there is none."""
    events = trace.events
    found = np.full(len(rows), -1, dtype=np.int64)
    for thread in intervals.distinct(events.thread[candidates]):
        of_thread = candidates[events.thread[candidates] == thread]
        mine = np.flatnonzero(events.thread[rows] == thread)
        inside = intervals.innermost(
            events.start_ns[of_thread], events.end_ns[of_thread], events.start_ns[rows[mine]]
        )
        found[mine] = np.where(inside >= 0, of_thread[inside], -1)
    return found


def issues_collective(name: str) -> bool:
    """Whether an operator of this name issues a collective."""
    return name.startswith("c10d::") and op_of(name) is not None


def _is_functional(name: str) -> bool:
    return name.startswith("_c10d_functional::") and op_of(name) is not None


_FROM_ACTIVITY = {"all_gather": "all_gather", "reduce": "reduce_scatter"}
"""The work of an FSDP label itself, for kernels with an unspecific name (``ncclDevKernel_Generic``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The collectives of one rank, with the data that the timeline needs; rows are the table's."""

    table: CollectiveTable
    reason: Strings
    """Reason a collective has no layer; null if it has one."""
    thread: IntArray
    """Thread that issued it; -1 unknown."""
    issue_end_ns: IntArray
    """When the issuing operator returned; -1 unknown."""
    operator: Strings
    """Operator that issued it (``c10d::allreduce_``); null where the file does not say."""
    activity: IntArray
    """Rows of the :class:`~fsdp2prof.analyzers.launches.DeviceTable` that carry collectives."""
    activity_owner: IntArray
    """Collective each of those rows belongs to."""
    unserved: int
    """Operators that issued a collective whose transfer is not in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sources:
    """Sources of each collective's facts: its span and event rows, -1 if there is none."""

    start: IntArray
    end: IntArray
    stream: IntArray
    named: IntArray
    """Event whose name and metadata are the collective's own: a kernel, a copy, a ``gloo:*`` range."""
    params: IntArray
    """Other descriptions of it: ``record_param_comms`` around the launch, gloo's range."""
    operator: IntArray
    """``c10d::*`` operator around the launch."""
    range: IntArray
    """Process group's range around the launch: old traces record the tensors of a list only there."""
    issue_ns: IntArray
    issue_end_ns: IntArray
    thread: IntArray
    worker: IntArray
    """Thread of gloo that carried it out; -1 where another backend did."""
    in_graph: BoolArray
    activity: IntArray
    owner: IntArray


def collect(
    trace: Trace,
    device: DeviceTable,
    phases: PhaseTable,
    steps: StepTable,
    windows: StepTable,
    manifest: RankManifest | None = None,
) -> Collectives:
    """Return every collective of the trace.

    A collective belongs to the step (``steps``, host time) that issued it, if that is analysed; one that no
    step issued belongs to the first window (``windows``, device time) it reaches into; -1 if none. Its layer
    and phase come from the phase at its issue. Its kind comes from metadata, else from the operator around
    its launch, else from the kernel's name, else from the FSDP label.
    """
    if manifest is not None and manifest.rehearsal is not None:
        sources = _rehearsed_sources(trace)
    else:
        sources = _device_sources(trace, device) if len(device) else _gloo_sources(trace)
    sources = _in_order(sources)
    row = find_rows(phases, sources.thread, sources.issue_ns)
    facts = _Facts(trace, sources)
    activity = phases.activity.lookup(row)
    op = facts.op(activity)
    fqn, phase = phases.fqn.lookup(row), phases.phase.lookup(row)
    size = facts.number("group_size")
    dtype = _translate(facts.text("dtype"), dtype_name)
    in_nelems, out_nelems = facts.number("in_nelems"), facts.number("out_nelems")
    groups = process_groups.resolve(
        trace.process_groups,
        manifest,
        name=facts.text("process_group"),
        desc=facts.text("process_group_desc"),
        size=np.where(size > 0, size, _size_from_shapes(op, in_nelems, out_nelems)),
        op=op,
        # The user's own collectives inside a module are not its parameter group's.
        fqn=Strings(np.where(activity.equals("compute"), np.int32(-1), fqn.codes), fqn.values),
        phase=phase,
        payload=payload_bytes(op, dtype, in_nelems, out_nelems, size),
        worker=sources.worker,
    )
    payload = payload_bytes(op, dtype, in_nelems, out_nelems, groups.size)
    dtype = _first_known(dtype, groups.dtype)
    payload = np.where(payload >= 0, payload, groups.payload)
    table = CollectiveTable(
        start_ns=sources.start,
        end_ns=sources.end,
        issue_ns=sources.issue_ns,
        step=_steps(sources, steps, windows),
        fqn=fqn,
        phase=Strings.intern("other" if name is None else name for name in phase.to_list()),
        op=op,
        process_group=groups.name,
        mesh_dim=groups.mesh_dim,
        dtype=dtype,
        group_size=groups.size,
        payload_bytes=payload,
        wire_bytes=wire_bytes(op, payload, groups.size),
        stream=sources.stream,
        seq=facts.number("seq"),
        comms_id=facts.number("comms_id"),
    )
    issuers = trace.events.name.matches(issues_collective)
    issued = intervals.distinct(sources.operator[sources.operator >= 0])
    return Collectives(
        table=table,
        reason=_reasons(table, sources, phases),
        thread=sources.thread,
        issue_end_ns=sources.issue_end_ns,
        operator=trace.events.name.lookup(sources.operator),
        activity=sources.activity,
        activity_owner=sources.owner,
        unserved=int(issuers.sum()) - int(issuers[issued].sum()),
    )


def _device_sources(trace: Trace, device: DeviceTable) -> _Sources:
    """Collective kernels, and device copies that a copy engine makes for a collective without kernels."""
    events = trace.events
    name = events.name.take(device.event)
    described = np.isin(device.event, trace.collective_args.event, kind="table")
    kernel = ~device.is_copy & ~device.is_set & (name.matches(is_collective_kernel) | described)
    params = _around(trace, device, events.name.equals("record_param_comms"))
    operator = _around(trace, device, events.name.matches(lambda text: text.startswith("c10d::")))
    ranges = _around(trace, device, events.name.matches(backends.is_collective_range))
    has_kernel = np.isin(params, params[kernel], kind="table")
    copy = device.is_copy & name.matches(backends.stays_on_device) & (params >= 0) & ~has_kernel
    activity = np.flatnonzero(kernel | copy)
    # Everything one operator launched is one collective; a launch outside every operator is one of its own.
    key = np.where(params[activity] >= 0, params[activity], -2 - activity)
    _, first, owner = np.unique(key, return_index=True, return_inverse=True)
    start = np.full(len(first), np.iinfo(np.int64).max)
    end = np.full(len(first), np.iinfo(np.int64).min)
    np.minimum.at(start, owner, device.start_ns[activity])
    np.maximum.at(end, owner, device.end_ns[activity])
    leader = activity[first]
    outer = np.where(operator[leader] >= 0, operator[leader], params[leader])
    return _Sources(
        start=start,
        end=end,
        stream=device.stream[leader].astype(np.int64),
        named=device.event[leader],
        params=params[leader],
        operator=operator[leader],
        range=ranges[leader],
        issue_ns=device.launch_ns[leader],
        issue_end_ns=np.where(outer >= 0, events.end_ns[outer], device.launch_ns[leader]),
        thread=device.thread[leader].astype(np.int64),
        worker=np.full(len(first), -1, dtype=np.int64),
        in_graph=device.in_graph[leader],
        activity=activity,
        owner=owner.astype(np.int64),
    )


def _gloo_sources(trace: Trace) -> _Sources:
    events = trace.events
    ranges = gloo_ranges(trace)
    issuer = match_issuers(trace, ranges)
    known = issuer >= 0
    none = np.full(len(ranges), -1, dtype=np.int64)
    return _Sources(
        start=events.start_ns[ranges],
        end=events.end_ns[ranges],
        stream=none,
        named=np.where(known, issuer, ranges),
        params=ranges,
        operator=issuer,
        range=none,
        issue_ns=np.where(known, events.start_ns[issuer], -1),
        issue_end_ns=np.where(known, events.end_ns[issuer], -1),
        thread=np.where(known, events.thread[issuer], -1).astype(np.int64),
        worker=events.thread[ranges].astype(np.int64),
        in_graph=np.zeros(len(ranges), dtype=np.bool_),
        activity=none[:0],
        owner=none[:0],
    )


def _rehearsed_sources(trace: Trace) -> _Sources:
    events = trace.events
    issuers, around = rehearsed_issuers(trace)
    none = np.full(len(issuers), -1, dtype=np.int64)
    return _Sources(
        start=events.start_ns[issuers],
        end=events.end_ns[issuers],
        stream=none,
        named=issuers,
        params=none,
        operator=issuers,
        range=around,
        issue_ns=events.start_ns[issuers],
        issue_end_ns=events.end_ns[issuers],
        thread=events.thread[issuers].astype(np.int64),
        worker=none,
        in_graph=np.zeros(len(issuers), dtype=np.bool_),
        activity=none[:0],
        owner=none[:0],
    )


def _in_order(sources: _Sources) -> _Sources:
    order = np.argsort(sources.start, kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    fields = {
        name: getattr(sources, name)[order]
        for name in _Sources.__dataclass_fields__
        if name not in ("activity", "owner")
    }
    return _Sources(**fields, activity=sources.activity, owner=position[sources.owner])


def _around(trace: Trace, device: DeviceTable, candidates: BoolArray) -> IntArray:
    """Event row of the innermost candidate range around each activity's launch; -1 if there is none."""
    events = trace.events
    found = np.full(len(device), -1, dtype=np.int64)
    rows = np.flatnonzero(candidates)
    for thread in intervals.distinct(events.thread[rows]):
        of_thread = rows[events.thread[rows] == thread]
        mine = np.flatnonzero((device.thread == thread) & (device.launch_ns >= 0))
        inside = intervals.innermost(
            events.start_ns[of_thread], events.end_ns[of_thread], device.launch_ns[mine]
        )
        found[mine] = np.where(inside >= 0, of_thread[inside], -1)
    return found


def _steps(sources: _Sources, steps: StepTable, windows: StepTable) -> IntArray:
    known = sources.issue_ns >= 0
    issued = np.where(known, intervals.containing(steps.start_ns, steps.end_ns, sources.issue_ns), -1)
    number = np.append(steps.step, -1)[issued]
    number = np.where(np.isin(number, windows.step), number, -1)
    reached = np.searchsorted(windows.end_ns, sources.start, side="right")
    starts = np.append(windows.start_ns, np.iinfo(np.int64).max)
    reaches = (issued < 0) & (starts[reached] < sources.end)
    return np.where(reaches, np.append(windows.step, -1)[reached], number)


def _size_from_shapes(op: Strings, in_nelems: IntArray, out_nelems: IntArray) -> IntArray:
    """Group size that a gather's or scatter's recorded shapes imply; -1 where they do not."""
    large = np.where(op.equals("all_gather"), out_nelems, in_nelems)
    small = np.where(op.equals("all_gather"), in_nelems, out_nelems)
    known = op.matches(lambda name: name in ("all_gather", "reduce_scatter")) & (small > 0) & (large > 0)
    ratio = large // np.maximum(small, 1)
    return np.where(known & (ratio * small == large), ratio, -1)


def _first_known(column: Strings, other: Strings) -> Strings:
    both = concat_strings([column, other])
    return Strings(
        np.where(column.codes >= 0, both.codes[: len(column)], both.codes[len(column) :]), both.values
    )


def _reasons(table: CollectiveTable, sources: _Sources, phases: PhaseTable) -> Strings:
    """Say why each collective without a layer has none: the first of these that holds."""
    labelled = bool((phases.fqn.codes >= 0).any())
    reasons = (
        ("launched by a CUDA graph, which records no labels", sources.in_graph),
        ("no FSDP labels in the trace", np.full(len(table), not labelled)),
        ("its launch is not in the file", sources.issue_ns < 0),
        ("issued by the optimizer", table.phase.equals("optimizer")),
        ("issued outside every FSDP module", np.ones(len(table), dtype=np.bool_)),
    )
    code = np.argmax([holds for _, holds in reasons], axis=0).astype(np.int32)
    code[table.fqn.codes >= 0] = -1
    return Strings(code, tuple(reason for reason, _ in reasons))


class _Facts:
    """Reads a fact of every collective from the first source that knows it."""

    def __init__(self, trace: Trace, sources: _Sources) -> None:
        self._events = trace.events
        self._args = trace.collective_args
        self._sources = sources
        described = (sources.named, sources.params, sources.operator, sources.range)
        self._rows = [self._described(source) for source in described]

    def _described(self, source: IntArray) -> IntArray:
        """Row of each event's metadata; -1 if it has none."""
        event = self._args.event
        if not len(event):
            return np.full(len(source), -1, dtype=np.int64)
        row = np.minimum(np.searchsorted(event, source), len(event) - 1)
        return np.where((source >= 0) & (event[row] == source), row, -1)

    def number(self, column: str) -> IntArray:
        """Return a numeric column of the metadata; -1 if no source knows it."""
        values = np.append(getattr(self._args, column), -1)
        result = values[self._rows[0]]
        for rows in self._rows[1:]:
            result = np.where(result >= 0, result, values[rows])
        return result

    def text(self, column: str) -> Strings:
        """Return a text column of the metadata; null if no source knows it."""
        strings: Strings = getattr(self._args, column)
        codes = np.append(strings.codes, np.int32(-1))
        result = codes[self._rows[0]]
        for rows in self._rows[1:]:
            result = np.where(result >= 0, result, codes[rows])
        return Strings(result, strings.values)

    def op(self, activity: Strings) -> Strings:
        """Return the kind of each collective; ``activity`` is the FSDP label around its issue."""
        names = self._events.name
        candidates = [
            _translate(self.text("collective"), op_of),
            _translate(names.lookup(self._sources.operator), op_of),
            _translate(names.lookup(self._sources.named), op_of),
            _translate(activity, _FROM_ACTIVITY.get),
        ]
        columns = [column.to_list() for column in candidates]
        return Strings.intern(
            next((op for op in known if op is not None), "other") for known in zip(*columns, strict=True)
        )


def _translate(names: Strings, rule: Callable[[str], str | None]) -> Strings:
    """Apply a rule to every name that occurs, once each."""
    lookup = np.full(len(names.values) + 1, -1, dtype=np.int32)
    results: dict[str, int] = {}
    for code in intervals.distinct(names.codes[names.codes >= 0]).tolist():
        result = rule(names.values[code])
        if result is not None:
            lookup[code] = results.setdefault(result, len(results))
    return Strings(lookup[names.codes], tuple(results))
