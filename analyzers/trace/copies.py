"""Copies of a rank's device: which are between host and device, which others wait for, and their layers."""

from __future__ import annotations

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings

_AT_ONCE_NS = 20_000
"""Time within which a copy follows the one that it waited for."""


def between_host_and_device(tables: RankTables, mask: BoolArray) -> IntArray:
    """Whether each activity is a copy between host and device, not a copy on the device or a memory set."""
    names = tables.trace.events.name.take(tables.work.event[mask])
    copies = tables.trace.events.category.take(tables.work.event[mask]).matches(backends.is_copy)
    return (copies & ~names.matches(backends.stays_on_device)).astype(np.int64)


def in_front(tables: RankTables) -> BoolArray:
    """Whether each activity is a copy for which one of another stream waits: one engine does one at a time.

    The other was launched before this one ended, and follows it at once, or after more copies of its stream.
    """
    work = tables.work
    copies = np.flatnonzero(between_host_and_device(tables, np.ones(len(work), dtype=np.bool_)))
    first, then = copies[:-1], copies[1:]
    waits = (work.launch_ns[then] >= 0) & (work.launch_ns[then] < work.end_ns[first])
    waits &= np.abs(work.start_ns[then] - work.end_ns[first]) < _AT_ONCE_NS
    other = work.stream[first] != work.stream[then]
    found = np.zeros(len(work), dtype=np.bool_)
    for at in np.flatnonzero(waits)[::-1].tolist():
        found[first[at]] = other[at] or found[then[at]]
    return found


def layers_of_copies(
    tables: RankTables, mask: BoolArray, fqn: Strings, phase: Strings
) -> tuple[Strings, Strings]:
    """Give copies without a launch in the file the layer of the kernel that follows on their stream.

    A kernel that has no launch either says nothing: it may be of any layer before.
    """
    work = tables.work
    rows = np.flatnonzero(mask)
    unknown = np.flatnonzero(work.launch_ns[rows] < 0)
    if not len(unknown):
        return fqn, phase
    layer = tables.phases.fqn.lookup(work.phase_row)
    kernels = ~work.is_memcpy & (work.launch_ns < 0)
    known = np.flatnonzero((layer.codes >= 0) | kernels)
    codes, when = fqn.codes.copy(), phase.codes.copy()
    for stream in intervals.distinct(work.stream[rows[unknown]]):
        there = known[work.stream[known] == stream]
        mine = unknown[work.stream[rows[unknown]] == stream]
        if not len(there):
            continue
        following = np.minimum(
            np.searchsorted(work.start_ns[there], work.start_ns[rows[mine]]), len(there) - 1
        )
        codes[mine] = layer.codes[there[following]]
        when[mine] = tables.phases.phase.lookup(work.phase_row[there[following]]).codes
    return Strings(codes, layer.values), Strings(when, tables.phases.phase.values)
