"""Who waits for a collective: the point on the compute stream where its result is needed.

FSDP2's waits are known by its labels: an all-gather is needed by its layer's ``all_gather_copy_out``; a
reduce-scatter by the next ``post_backward_rs_wait`` or else, like an all-reduce, by the root's last callback.
On a host-only trace a collective that blocks its caller is needed by the caller's next operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.accounting import WorkTable
from fsdp2prof.analyzers.trace.collectives import Collectives
from fsdp2prof.tables.columns import NEVER, IntArray, Table
from fsdp2prof.tables.trace import CollectiveTable, PhaseTable, Trace

_NOTHING_HELD = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitTable(Table):
    """One row per collective of one rank."""

    wait_ns: IntArray
    """Host time at which the compute stream was made to wait; -1 when no waiter is known."""
    needed_ns: IntArray
    """When the compute stream had nothing left to do but wait; -1 unknown."""
    resumed_ns: IntArray
    """When the compute stream's next work began; -1 when there is none."""
    stall_ns: IntArray
    """How long the compute stream waited for it; -1 unknown."""


def compute_stream(work: WorkTable) -> int:
    """Return the stream (host-only: thread) that computed longest; -1 if nothing ran.

    Without any compute, the one that FSDP's copies kept busy longest.
    """
    rows = ~work.is_fsdp & ~work.is_memcpy
    if not rows.any():
        rows = ~work.is_memcpy
    if not rows.any():
        return -1
    streams, index = np.unique(work.stream[rows], return_inverse=True)
    spent = np.bincount(index, weights=(work.end_ns[rows] - work.start_ns[rows]).astype(np.float64))
    return int(streams[spent.argmax()])


def find_waits(trace: Trace, phases: PhaseTable, work: WorkTable, collectives: Collectives) -> WaitTable:
    """Return who waits for each collective, from when, and for how long."""
    stream = compute_stream(work)
    queued = np.flatnonzero((work.stream == stream) & (work.launch_ns >= 0))
    queue = work.take(queued[np.argsort(work.launch_ns[queued], kind="stable")])
    on_device = len(collectives.activity) > 0
    if not on_device:
        return _measure(queue, collectives, _host_waits(phases, queue, collectives), _NOTHING_HELD, on_device)
    calls = _WaitCalls(trace, phases)
    held = _held(phases, work.take(work.is_fsdp & (work.stream != stream)), calls)
    return _measure(queue, collectives, _device_waits(phases, collectives, calls), held, on_device)


def charging_order(collectives: Collectives, waits: WaitTable) -> IntArray:
    """Rank collectives by whose result is needed first: lowest first.

    Those that somebody waits for come in the order of the waits (of one wait: as they end); the others
    follow, in the order they started.
    """
    table = collectives.table
    unknown = waits.wait_ns < 0
    order = np.lexsort(
        (
            np.where(unknown, table.start_ns, table.end_ns),
            np.where(unknown, 0, waits.wait_ns),
            unknown,
        )
    )
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _held(phases: PhaseTable, aside: WorkTable, calls: _WaitCalls) -> tuple[IntArray, IntArray]:
    """Return how long each final wait holds the compute stream for copies that follow the reductions.

    Host times of the waits, and the latest end so far of FSDP's casts and copies on its own streams
    (``aside``).
    """
    aside = aside.take(phases.activity.equals("reduce")[aside.phase_row])
    told = calls.final_after(aside.launch_ns)
    end, told = aside.end_ns[told >= 0], told[told >= 0]
    order = np.argsort(told, kind="stable")
    return told[order], np.maximum.accumulate(end[order])


def _device_waits(phases: PhaseTable, collectives: Collectives, calls: _WaitCalls) -> IntArray:
    """Host time at which the wait for each collective was enqueued; -1 if none is known."""
    table, issue = collectives.table, collectives.table.issue_ns
    wait = np.full(len(table), -1, dtype=np.int64)
    known = issue >= 0
    copy_outs = np.flatnonzero(phases.activity.equals("copy_out"))
    copied, known_gathers = phases.fqn.take(copy_outs), np.flatnonzero(known & table.op.equals("all_gather"))
    for code, fqn in enumerate(table.fqn.values):
        gathers = known_gathers[table.fqn.codes[known_gathers] == code]
        if len(gathers):
            wait[gathers] = calls.first_in(copy_outs[copied.equals(fqn)], issue[gathers])
    reductions = np.flatnonzero(
        known & (table.fqn.codes >= 0) & table.op.matches(lambda op: op in ("reduce_scatter", "all_reduce"))
    )
    last = calls.final_after(issue[reductions])
    scatter = table.op.equals("reduce_scatter")[reductions]
    roots = np.array([_root(fqn) for fqn in table.fqn.values] + [""])[table.fqn.codes[reductions]]
    label_roots = np.array([_root(fqn) for fqn in phases.fqn.values] + [""])[phases.fqn.codes]
    early = np.full(len(reductions), -1, dtype=np.int64)
    for root in sorted(set(roots.tolist())):
        mine = scatter & (roots == root)
        labels = np.flatnonzero(phases.activity.equals("reduce_wait") & (label_roots == root))
        early[mine] = calls.first_in(labels, issue[reductions[mine]])
    sooner = (early >= 0) & ((last < 0) | (early < last))
    wait[reductions] = np.where(sooner, early, last)
    _strays(table, calls, wait, last[~sooner])
    return wait


def _strays(table: CollectiveTable, calls: _WaitCalls, wait: IntArray, reduced: IntArray) -> None:
    """Correct the waits for unused all-gathers: the final callback waits for them, one call each.

    It goes through the modules in their order, which is that of their first all-gathers. ``reduced`` are the
    final calls that wait for reductions: they come first in their callback.
    """
    gathers = np.flatnonzero((table.issue_ns >= 0) & table.op.equals("all_gather") & (table.fqn.codes >= 0))
    final = calls.final_after(table.issue_ns[gathers])
    stray = (final >= 0) & ((wait[gathers] < 0) | (final < wait[gathers]))
    gathers, final = gathers[stray], final[stray]
    first_use = np.full(len(table.fqn.values), NEVER, dtype=np.int64)
    issued = (table.issue_ns >= 0) & (table.fqn.codes >= 0)
    np.minimum.at(first_use, table.fqn.codes[issued], table.issue_ns[issued])
    order = np.lexsort((first_use[table.fqn.codes[gathers]], final))
    gathers, final = gathers[order], final[order]
    nth = np.arange(len(final)) - np.searchsorted(final, final)
    wait[gathers] = calls.final_following(final, nth + np.isin(final, reduced))


class _WaitCalls:
    """The runtime calls that make a stream wait for an event, found by the label they are made in."""

    def __init__(self, trace: Trace, phases: PhaseTable) -> None:
        events = trace.events
        self._phases = phases
        calls = np.flatnonzero(
            events.name.matches(lambda name: "StreamWaitEvent" in name) & (events.thread >= 0)
        )
        self._end = events.end_ns[calls]
        phase_row = find_rows(phases, events.thread[calls], events.start_ns[calls])
        self._called = np.full(len(phases) + 1, NEVER, dtype=np.int64)
        np.minimum.at(self._called, phase_row, self._end)
        if len(calls):
            self._final = np.sort(self._end[phases.activity.lookup(phase_row).equals("final_wait")])
        else:
            self._final = np.sort(phases.end_ns[phases.activity.equals("final_wait")])

    def first_in(self, labels: IntArray, after: IntArray) -> IntArray:
        """Return the first call in the first label (phase row) that begins after each time; -1 if none does.

        A label without calls is represented by its start.
        """
        if not len(labels):
            return np.full(len(after), -1, dtype=np.int64)
        start = self._phases.start_ns[labels]
        order = np.argsort(start, kind="stable")
        labels, start = labels[order], start[order]
        called = self._called[labels]
        at = np.append(np.where(called < NEVER, called, start), -1)
        found: IntArray = at[np.searchsorted(start, after, side="left")]
        return found

    def final_after(self, after: IntArray) -> IntArray:
        """Return the first call of a root's final callback after each time; -1 if there is none."""
        final: IntArray = np.append(self._final, -1)
        found: IntArray = final[np.searchsorted(self._final, after, side="right")]
        return found

    def final_following(self, first: IntArray, nth: IntArray) -> IntArray:
        """Return the ``nth`` final call after each ``first`` one (or the last there is)."""
        found: IntArray = self._final[
            np.minimum(np.searchsorted(self._final, first) + nth, len(self._final) - 1)
        ]
        return found


def _host_waits(phases: PhaseTable, queue: WorkTable, collectives: Collectives) -> IntArray:
    """Start of the operator that needs each collective; -1 if none is known.

    The caller's next one if it began after the collective ended (the caller was blocked), otherwise the
    layer's copy-out.
    """
    table = collectives.table
    begins = np.append(queue.launch_ns, -1)
    after = np.maximum(collectives.issue_end_ns, table.issue_ns)
    following = np.where(after >= 0, begins[np.searchsorted(queue.launch_ns, after)], -1)
    blocked = following >= table.end_ns
    copy_out = phases.activity.equals("copy_out")
    wait = np.where(blocked, following, -1)
    for code, fqn in enumerate(table.fqn.values):
        gathers = np.flatnonzero(
            ~blocked & (after >= 0) & (table.fqn.codes == code) & table.op.equals("all_gather")
        )
        labels = np.sort(phases.start_ns[copy_out & phases.fqn.equals(fqn)])
        if len(gathers) and len(labels):
            need = np.append(labels, NEVER)[np.searchsorted(labels, table.issue_ns[gathers])]
            wait[gathers] = begins[np.searchsorted(queue.launch_ns, need)]
    return wait


def _measure(
    queue: WorkTable,
    collectives: Collectives,
    wait: IntArray,
    held: tuple[IntArray, IntArray],
    on_device: bool,
) -> WaitTable:
    """Turn waits into needs and stalls; the queue is the compute stream's work in launch order."""
    table = collectives.table
    known = np.flatnonzero(wait >= 0)
    known = known[np.lexsort((table.end_ns[known], wait[known]))]
    position = np.searchsorted(queue.launch_ns, wait[known])
    done = np.concatenate([[-1], np.maximum.accumulate(queue.end_ns)]) if len(queue) else np.array([-1])
    earlier = np.concatenate([[-1], np.maximum.accumulate(table.end_ns[known])[:-1]])[: len(known)]
    told = wait[known] if on_device else table.issue_ns[known]
    need = np.maximum(np.maximum(done[position], told), earlier if on_device else -1)
    until = np.concatenate([[-1], held[1]])[np.searchsorted(held[0], wait[known], side="left")]
    need = np.maximum(need, until)
    resumes = np.append(queue.start_ns, -1)[position]
    limit = np.where(resumes >= 0, np.minimum(resumes, table.end_ns[known]), table.end_ns[known])
    columns = {name: np.full(len(table), -1, dtype=np.int64) for name in ("needed", "resumed", "stall")}
    columns["needed"][known] = need
    columns["resumed"][known] = resumes
    columns["stall"][known] = np.maximum(limit - need, 0)
    return WaitTable(
        wait_ns=wait,
        needed_ns=columns["needed"],
        resumed_ns=columns["resumed"],
        stall_ns=columns["stall"],
    )


def _root(fqn: str) -> str:
    """Prefix that distinguishes the modules of several roots; empty if there is one."""
    prefix, colon, _ = fqn.partition(":")
    return prefix if colon else ""
