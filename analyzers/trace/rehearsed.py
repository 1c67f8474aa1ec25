"""Collectives of a rehearsal: the operators that issue them, for no transfer follows."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.trace.collective_names import op_of
from fsdp2prof.tables import IntArray, Trace

__all__ = ["issues_collective", "rehearsed_issuers"]


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
    """Event row of the innermost candidate around each of ``rows``; -1 where there is none."""
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
