"""Intervals of a rank that the ledger charges separately: recomputed forwards, compilation, recording of
CUDA graphs."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.launches import graph_captures, runtime_calls
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.script import OF_FORWARD
from fsdp2prof.labels import AUTOGRAD_NODE, RECOMPUTED, parse_label

_RECORDS_A_GRAPH = "CUDAGraphNode.record (dynamo_timed)"
_RUNS_COMPILED = "## Call CompiledFxGraph"


def on_the_device(tables: RankTables, host: Intervals) -> Intervals:
    """Turn stretches of host time into the device's: from the first activity launched in them to the next."""
    if not len(tables.device) or not len(host.start):
        return host
    work = tables.work
    launched = np.flatnonzero(work.launch_ns >= 0)
    launched = launched[np.argsort(work.launch_ns[launched], kind="stable")]
    starts = np.append(work.start_ns[launched], np.iinfo(np.int64).max // 2)
    first = np.searchsorted(work.launch_ns[launched], host.start)
    after = np.searchsorted(work.launch_ns[launched], host.end)
    some = after > first
    end = np.where(after < len(launched), starts[after], work.end_ns.max(initial=0))
    return intervals.union(starts[first[some]], end[some])


def recomputed(tables: RankTables) -> Intervals:
    """When the host ran a forward again for activation checkpointing, as recorder or modules' labels say."""
    labels = tables.trace.labels
    own = labels.name.equals(RECOMPUTED)
    if own.any():
        return intervals.union(labels.start_ns[own], labels.end_ns[own])
    parsed = [parse_label(name) for name in labels.name.values]
    kinds = [None if label is None else label.kind for label in parsed]
    before = np.array([kind == "pre_forward" for kind in kinds] + [False])[labels.name.codes]
    rows = np.flatnonzero(before)
    phase = tables.phases.phase.lookup(
        find_rows(tables.phases, labels.thread[rows].astype(np.int64), labels.start_ns[rows])
    )
    rows = rows[phase.equals("backward")]
    spans = [_until_post_forward(tables, kinds, row) for row in rows.tolist()]
    found = [*(span for span in spans if span is not None), *_forwards_in_nodes(tables)]
    start = np.array([one[0] for one in found], dtype=np.int64)
    end = np.array([one[1] for one in found], dtype=np.int64)
    return intervals.union(start, end)


def _forwards_in_nodes(tables: RankTables) -> list[tuple[int, int]]:
    """Return the intervals in which autograd's nodes run forwards: from the first forward-only operator to
    the last.

    A checkpoint runs its whole forward again when the first of its nodes needs a tensor that was not
    saved. FSDP's hooks leave no label there.
    """
    events = tables.trace.events
    rows = np.flatnonzero(events.name.matches(OF_FORWARD.__contains__) & (events.thread >= 0))
    place = find_rows(tables.phases, events.thread[rows].astype(np.int64), events.start_ns[rows])
    rows = rows[tables.phases.phase.lookup(place).equals("backward")]
    if not len(rows):
        return []
    nodes = np.flatnonzero(
        events.name.matches(lambda name: name.startswith(AUTOGRAD_NODE)) & (events.thread >= 0)
    )
    found: list[tuple[int, int]] = []
    for thread in intervals.distinct(events.thread[rows]):
        its, mine = nodes[events.thread[nodes] == thread], rows[events.thread[rows] == thread]
        node = intervals.innermost(events.start_ns[its], events.end_ns[its], events.start_ns[mine])
        mine, node = mine[node >= 0], node[node >= 0]
        _, which = np.unique(node, return_inverse=True)
        start = np.full(which.max(initial=-1) + 1, np.iinfo(np.int64).max)
        end = np.zeros_like(start)
        np.minimum.at(start, which, events.start_ns[mine])
        np.maximum.at(end, which, events.end_ns[mine])
        found += zip(start.tolist(), end.tolist(), strict=True)
    return found


def _until_post_forward(tables: RankTables, kinds: list[str | None], row: int) -> tuple[int, int] | None:
    """Return a recomputed forward: up to the label of its thread that ends it, if no hook comes before."""
    labels = tables.trace.labels
    later = np.flatnonzero((labels.thread == labels.thread[row]) & (labels.start_ns > labels.start_ns[row]))
    for one in later[np.argsort(labels.start_ns[later], kind="stable")][:64].tolist():
        kind = kinds[int(labels.name.codes[one])]
        if kind == "post_forward":
            return int(labels.start_ns[row]), int(labels.end_ns[one])
        if kind is not None and "backward" in kind:
            return None
    return None


def compiling(tables: RankTables) -> Intervals:
    """When torch.compile was compiling, by the ranges that it puts around its own work."""
    events = tables.trace.events
    rows = np.flatnonzero(
        events.name.matches(lambda name: name.endswith("(dynamo_timed)")) & (events.thread >= 0)
    )
    return intervals.union(events.start_ns[rows], events.end_ns[rows])


def recording_graphs(tables: RankTables) -> Intervals:
    """Intervals in which CUDA graphs were captured; of torch.compile, every call of compiled code that
    records or prepares one.

    Before each it waits for the whole device, which compiled code does for no other reason.
    """
    events = tables.trace.events
    host = events.thread >= 0
    records = events.name.equals(_RECORDS_A_GRAPH) & host
    if not records.any():
        captures = graph_captures(events, runtime_calls(events))
        spans = [(begin, end) for _, begin, end in captures if np.isfinite(end - begin)]
        return intervals.union(*np.array(spans, dtype=np.int64).reshape(-1, 2).T)
    marks = np.flatnonzero(records | events.name.matches(_stops_for_the_device) & host)
    calls = np.flatnonzero(events.name.matches(lambda name: name.startswith(_RUNS_COMPILED)) & host)
    within = np.zeros(len(calls), dtype=np.bool_)
    for thread in intervals.distinct(events.thread[calls]):
        its = events.thread[calls] == thread
        at = np.sort(events.start_ns[marks[events.thread[marks] == thread]])
        first = np.searchsorted(at, events.start_ns[calls[its]])
        within[its] = first < np.searchsorted(at, events.end_ns[calls[its]])
    rows = np.concatenate([np.flatnonzero(records), calls[within]])
    return intervals.union(events.start_ns[rows], events.end_ns[rows])


def _stops_for_the_device(name: str) -> bool:
    return name.endswith("DeviceSynchronize")


def beginning_in(pieces: Intervals, those: Intervals) -> tuple[Intervals, Intervals]:
    """Divide intervals into those that begin within others, and the rest."""
    within = intervals.containing(those.start, those.end, pieces.start) >= 0
    return Intervals(pieces.start[within], pieces.end[within]), Intervals(
        pieces.start[~within], pieces.end[~within]
    )
