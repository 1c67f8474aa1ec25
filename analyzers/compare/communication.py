"""Collectives of two sides against each other, by layer, phase and op; each side measured or predicted.

A new dtype or mesh then shows as a change of bytes, not as one row removed and one added. Values shown are
means per rank and step; whether counts and bytes are equal is decided on the underlying integer sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from fsdp2prof.analyzers.steps import mean, window_count
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.results.comparison import CommChange, CommFigures
from fsdp2prof.results.estimate import CommEstimate, CommRow
from fsdp2prof.results.trace import TraceAnalysis

CollectiveKey: TypeAlias = "tuple[str | None, str, str]"
"""Layer, phase, op."""

ALL_LAYERS = "all layers"
"""Stands for the layer where sums are over all of them."""


@dataclass(slots=True)
class CollectiveSums:
    """Collectives of one key, summed over ``windows`` rank-steps; null is unknown."""

    windows: int
    count: int = 0
    payload_bytes: int | None = 0
    wire_bytes: int | None = 0
    total_ns: int | None = 0
    exposed_ns: int | None = 0
    stall_ns: int | None = 0
    dtypes: set[str] = field(default_factory=set)
    group_sizes: set[int] = field(default_factory=set)


_MEASURES = tuple(field.name for field in fields(CommFigures))
_NO_COLLECTIVE = CommFigures(count=0, payload_bytes=0, wire_bytes=0, total_ns=0, exposed_ns=0, stall_ns=0)


def communication_changes(
    before: TraceAnalysis | CommEstimate | None, after: TraceAnalysis | CommEstimate | None
) -> list[CommChange] | None:
    """Compare the collectives of two sides, largest growth of exposed time first, then by change of bytes.

    None where a side does not know its collectives: neither an estimate, nor a trace with steps.
    """
    old, new = _sums(before), _sums(after)
    return changes_of_sums(old, new if old is None or new is None else _under_old_names(old, new))


def _under_old_names(
    before: dict[CollectiveKey, CollectiveSums], after: dict[CollectiveKey, CollectiveSums]
) -> dict[CollectiveKey, CollectiveSums]:
    """Return the sums of after under the names of before, if both sides have the same sequence of traffic
    under different names."""
    old, new = _of_one_side(before, after), _of_one_side(after, before)
    alike = len(old) == len(new) and all(
        one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
        for one, other in zip(old.values(), new.values(), strict=True)
    )
    names = dict(zip(new, old, strict=True)) if alike else {}
    return {(names.get(fqn or "", fqn), phase, op): sums for (fqn, phase, op), sums in after.items()}


def _of_one_side(
    side: dict[CollectiveKey, CollectiveSums], other: dict[CollectiveKey, CollectiveSums]
) -> dict[str, dict[tuple[str, str], CollectiveSums]]:
    """Sums by phase and op of each layer that the other side does not have, in order."""
    shared = {fqn for fqn, _, _ in other}
    found: dict[str, dict[tuple[str, str], CollectiveSums]] = defaultdict(dict)
    for (fqn, phase, op), sums in side.items():
        if fqn and fqn not in shared:
            found[fqn][phase, op] = sums
    return found


def changes_of_sums(
    before: dict[CollectiveKey, CollectiveSums] | None, after: dict[CollectiveKey, CollectiveSums] | None
) -> list[CommChange] | None:
    """Compare sums key by key, in the order of :func:`communication_changes`; None where a side has none."""
    if before is None or after is None:
        return None
    return largest_first(_change(key, before.get(key), after.get(key)) for key in {**before, **after})


def sums_of_all_layers(trace: TraceAnalysis) -> dict[CollectiveKey, CollectiveSums] | None:
    """Sum the collectives of a trace by phase and op; None without steps."""
    windows = window_count(trace.ranks)
    return _sum_rows(((ALL_LAYERS, row) for row in trace.groups), windows) if windows else None


def largest_first(rows: Iterable[CommChange]) -> list[CommChange]:
    """Sort by growth of exposed time, then by change of bytes."""
    return sorted(rows, key=lambda row: (-(row.delta.exposed_ns or 0), -abs(row.delta.wire_bytes or 0)))


def _sums(side: TraceAnalysis | CommEstimate | None) -> dict[CollectiveKey, CollectiveSums] | None:
    if isinstance(side, TraceAnalysis):
        windows = window_count(side.ranks)
        return _sum_rows(((row.fqn, row) for row in side.groups), windows) if windows else None
    if side is None:
        return None
    several = len({row.root for row in side.groups}) > 1
    return _sum_rows(
        (f"root{row.root}:{row.fqn}" if several and row.fqn is not None else row.fqn, row)
        for row in side.groups
    )


def _sum_rows(
    rows: Iterable[tuple[str | None, GroupRow | CommRow]], windows: int = 1
) -> dict[CollectiveKey, CollectiveSums]:
    sums: dict[CollectiveKey, CollectiveSums] = defaultdict(lambda: CollectiveSums(windows))
    for fqn, row in rows:
        entry = sums[fqn, row.phase, row.op]
        for measure in _MEASURES:
            so_far, more = getattr(entry, measure), getattr(row, measure, None)
            setattr(entry, measure, None if so_far is None or more is None else so_far + more)
        entry.dtypes |= {row.dtype} if row.dtype is not None else set()
        entry.group_sizes |= {row.group_size} if row.group_size is not None else set()
    return sums


def _change(key: CollectiveKey, before: CollectiveSums | None, after: CollectiveSums | None) -> CommChange:
    fqn, phase, op = key
    figures = [None if sums is None else _figures(sums) for sums in (before, after)]
    return CommChange(
        fqn=fqn,
        phase=phase,
        op=op,
        before=figures[0],
        after=figures[1],
        delta=_delta(figures[0] or _NO_COLLECTIVE, figures[1] or _NO_COLLECTIVE),
        equal=before is not None and after is not None and _is_equal(before, after),
        before_dtypes=sorted(before.dtypes) if before else [],
        after_dtypes=sorted(after.dtypes) if after else [],
        before_group_sizes=sorted(before.group_sizes) if before else [],
        after_group_sizes=sorted(after.group_sizes) if after else [],
    )


def _figures(sums: CollectiveSums) -> CommFigures:
    def known(total: int | None) -> float | None:
        return None if total is None else mean(total, sums.windows)

    return CommFigures(
        count=mean(sums.count, sums.windows),
        payload_bytes=known(sums.payload_bytes),
        wire_bytes=known(sums.wire_bytes),
        total_ns=known(sums.total_ns),
        exposed_ns=known(sums.exposed_ns),
        stall_ns=known(sums.stall_ns),
    )


def _delta(before: CommFigures, after: CommFigures) -> CommFigures:
    def difference(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else other - one

    return CommFigures(
        count=after.count - before.count,
        payload_bytes=difference(before.payload_bytes, after.payload_bytes),
        wire_bytes=difference(before.wire_bytes, after.wire_bytes),
        total_ns=difference(before.total_ns, after.total_ns),
        exposed_ns=difference(before.exposed_ns, after.exposed_ns),
        stall_ns=difference(before.stall_ns, after.stall_ns),
    )


def _is_equal(before: CollectiveSums, after: CollectiveSums) -> bool:
    """Compare the means exactly; wire bytes that an op does not define are unknown on both sides."""

    def same(one: int | None, other: int | None) -> bool:
        return one is not None and other is not None and one * after.windows == other * before.windows

    wire = before.wire_bytes, after.wire_bytes
    return (
        same(before.count, after.count)
        and same(before.payload_bytes, after.payload_bytes)
        and (wire == (None, None) or same(*wire))
    )
