"""What a host thread computes: its leaf operators."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.trace.gloo import gloo_ranges
from fsdp2prof.tables import IntArray, Trace

__all__ = ["leaf_operators"]

_NOT_WORK = ("autograd::", "c10d::", "c10d_functional", "_c10d_functional", "record_param_comms")
"""Wrappers of other operators, and operators that issue a collective or block until one ends."""


def leaf_operators(trace: Trace) -> IntArray:
    """Return the event rows of the operators that call no other operator, in order of their start.

    An operator is a ``namespace::name`` host event, autograd's own wrappers and collectives apart. Threads
    that carry out gloo's collectives do not count: what they run is communication.
    """
    events = trace.events
    is_operator = events.category.equals("cpu_op") & events.name.matches(
        lambda name: "::" in name and not name.startswith(_NOT_WORK)
    )
    workers = intervals.distinct(events.thread[gloo_ranges(trace)])
    rows = np.flatnonzero(is_operator & ~np.isin(events.thread, workers))
    rows = rows[np.argsort(events.thread[rows], kind="stable")]
    leaf = np.ones(len(rows), dtype=np.bool_)
    thread, start, end = events.thread[rows], events.start_ns[rows], events.end_ns[rows]
    leaf[:-1] = (thread[1:] != thread[:-1]) | (start[1:] >= end[:-1])
    return np.sort(rows[leaf])
