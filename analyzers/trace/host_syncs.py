"""Where a rank's host stops to wait for its device (``.item()``, synchronize, ...), by layer and phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.means import mean
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.rank_tables import Lines
from fsdp2prof.results.trace import HostSyncPlace, HostSyncRow
from fsdp2prof.tables import IntArray, PhaseTable, StepTable, Trace

_INNER = {"aten::_local_scalar_dense": "aten::item"}
"""Operators that people know by the name of their caller."""


def host_syncs(
    trace: Trace, phases: PhaseTable, steps: StepTable, rank: int, lines: Lines
) -> list[HostSyncRow]:
    """Return the synchronising calls inside the steps (in host time), the longest blocked first."""
    events = trace.events
    calls = np.flatnonzero(events.name.matches(backends.always_blocks))
    calls = calls[events.thread[calls] >= 0]
    inside = intervals.containing(steps.start_ns, steps.end_ns, events.start_ns[calls]) >= 0
    calls = calls[inside]
    row = find_rows(phases, events.thread[calls], events.start_ns[calls])
    operator = events.name.lookup(_operators(trace, calls))
    fqn, phase = phases.fqn.lookup(row), phases.phase.lookup(row)
    found: dict[tuple[str | None, ...], list[int]] = defaultdict(lambda: [0, 0])
    blocked = events.end_ns[calls] - events.start_ns[calls]
    sites: dict[tuple[str | None, ...], Counter[str]] = defaultdict(Counter)
    seen = lines.seen(events.start_ns[calls], events.end_ns[calls])
    keys = zip(*(column.to_list() for column in (fqn, phase, events.name.take(calls), operator)), strict=True)
    for key, duration, line in zip(keys, blocked.tolist(), seen, strict=True):
        sites[key].update({line: duration} if line else {})
        total = found[key]
        total[0] += 1
        total[1] += duration
    rows = [
        HostSyncRow(
            rank=rank,
            fqn=layer,
            phase=when or "other",
            call=call or "",
            operator=_INNER.get(name or "", name),
            count=count,
            blocked_ns=duration,
            site=next((line for line, _ in sites[layer, when, call, name].most_common(1)), None),
        )
        for (layer, when, call, name), (count, duration) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.blocked_ns)


def host_sync_places(rows: Sequence[HostSyncRow], windows: int) -> list[HostSyncPlace]:
    """Sum up synchronising calls of all ranks over ``windows`` step windows; the longest blocked first."""
    places: dict[tuple[str | None, str, str, str | None], list[HostSyncRow]] = defaultdict(list)
    for row in rows:
        places[row.fqn, row.phase, row.call, row.operator].append(row)
    summed = [
        HostSyncPlace(
            fqn=fqn,
            phase=phase,
            call=call,
            operator=operator,
            count=mean(sum(row.count for row in same), windows),
            blocked_ns=mean(sum(row.blocked_ns for row in same), windows),
        )
        for (fqn, phase, call, operator), same in places.items()
    ]
    return sorted(summed, key=lambda place: -place.blocked_ns)


def _operators(trace: Trace, calls: IntArray) -> IntArray:
    """Return the event row of the operator whose id each call carries and that encloses it; -1 if none."""
    events = trace.events
    operators = np.flatnonzero(events.category.equals("cpu_op") & (events.external_id >= 0))
    if not len(operators):
        return np.full(len(calls), -1, dtype=np.int64)
    operators = operators[np.argsort(events.external_id[operators], kind="stable")]
    ids = events.external_id[operators]
    at = np.minimum(np.searchsorted(ids, events.external_id[calls]), len(ids) - 1)
    found = operators[at]
    encloses = (
        (ids[at] == events.external_id[calls])
        & (events.thread[found] == events.thread[calls])
        & (events.start_ns[found] <= events.start_ns[calls])
        & (events.end_ns[found] >= events.end_ns[calls])
    )
    return np.where(encloses, found, -1)
