"""Exact interval arithmetic on int64 nanoseconds.

An interval is half-open, ``[start, end)``; an empty or inverted one covers nothing. :class:`Intervals` is a
set of instants in its one normal form (sorted, disjoint, not touching, no empty members), so two equal sets
have equal arrays. Everything is vectorised; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fsdp2prof.tables.columns import BoolArray, IntArray

_Integer = TypeVar("_Integer", bound=np.integer)


class Intervals(NamedTuple):
    """A set of instants: sorted, disjoint, non-touching, non-empty ``[start, end)`` pairs."""

    start: IntArray
    end: IntArray


EMPTY = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
"""The empty set."""


def union(start: IntArray, end: IntArray) -> Intervals:
    """Return the union of any intervals, in any order."""
    real = end > start
    if not real.any():
        return EMPTY
    if not real.all():
        start, end = start[real], end[real]
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.ones(len(start), dtype=np.bool_)
    opens[1:] = start[1:] > reach[:-1]
    closes = np.append(np.flatnonzero(opens)[1:] - 1, len(start) - 1)
    return Intervals(start[opens], reach[closes])


def total(intervals: Intervals) -> int:
    """Return the total length in nanoseconds."""
    return int((intervals.end - intervals.start).sum())


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the instants in both sets."""
    if not len(left.start) or not len(right.start):
        return EMPTY
    points, state = _sweep(left, right)
    return _from_segments(points, state == 0b11)


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return the instants in ``left`` and not in ``right``."""
    if not len(right.start):
        return left
    points, state = _sweep(left, right)
    return _from_segments(points, state == 0b01)


def classify(window: Intervals, layers: Sequence[Intervals]) -> list[Intervals]:
    """Split ``window`` by precedence: each layer's instants that no earlier one claimed, then the rest.

    Takes at most six layers; returns ``len(layers) + 1`` disjoint sets whose union is ``window``.
    """
    points, state = _sweep(window, *layers)
    parts, earlier = [], 0b1
    for bit in (0b10 << layer for layer in range(len(layers))):
        parts.append(_from_segments(points, state & (earlier | bit) == 0b1 | bit))
        earlier |= bit
    return [*parts, _from_segments(points, state == 0b1)]


def covered(intervals: Intervals, start: IntArray, end: IntArray) -> IntArray:
    """Return how many nanoseconds of each ``[start, end)`` lie in the set."""
    if not len(intervals.start):
        return np.zeros(len(start), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(intervals.end - intervals.start)])

    def until(times: IntArray) -> IntArray:
        """Length of the set before each time."""
        row = np.searchsorted(intervals.start, times, side="right")
        overshoot = np.maximum(intervals.end[row - 1] - times, 0)
        return np.where(row > 0, before[row] - overshoot, 0)

    return until(np.maximum(start, end)) - until(start)


def containing(start: IntArray, end: IntArray, times: IntArray) -> IntArray:
    """Return the row of the disjoint intervals, sorted by start, that contains each time; -1 if none does."""
    if not len(start):
        return np.full(len(times), -1, dtype=np.int64)
    row = np.searchsorted(start, times, side="right") - 1
    return np.where((row >= 0) & (times < end[row]), row, -1)


def distinct(values: npt.NDArray[_Integer]) -> npt.NDArray[_Integer]:
    """Return the distinct values in order: merges sorted runs, which ``np.unique`` (a hash) does not."""
    values = np.sort(values, kind="stable")
    opens = np.ones(len(values), dtype=np.bool_)
    opens[1:] = values[1:] != values[:-1]
    return values[opens]


def among(values: npt.NDArray[_Integer], those: npt.NDArray[_Integer]) -> BoolArray:
    """Mask of the values that are among those: quick where those are nearly in order, unlike ``np.isin``."""
    if not len(those):
        return np.zeros(len(values), dtype=np.bool_)
    those = np.sort(those, kind="stable")
    return np.asarray(those[np.minimum(np.searchsorted(those, values), len(those) - 1)] == values)


def innermost(start: IntArray, end: IntArray, times: IntArray) -> IntArray:
    """Return the row of the innermost nested interval that contains each time; -1 if none does.

    Intervals nest properly and are sorted by start, outer before inner.
    """
    parent = np.full(len(start), -1, dtype=np.int64)
    stack: list[tuple[int, int]] = []
    for row, (begins, ends) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and (stack[-1][0] < ends or stack[-1][0] <= begins):
            stack.pop()
        parent[row] = stack[-1][1] if stack else -1
        stack.append((ends, row))
    found = np.searchsorted(start, times, side="right") - 1
    over = np.flatnonzero(found >= 0)
    while len(over := over[times[over] >= end[found[over]]]):
        found[over] = parent[found[over]]
        over = over[found[over] >= 0]
    return found


def cut(start: IntArray, end: IntArray, points: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Cut intervals at every point strictly inside them.

    Returns ``(row, start, end)`` of the parts, in the order of the intervals; ``row`` is the interval of
    each part.
    """
    points = distinct(points)
    first = np.searchsorted(points, start, side="right")
    pieces = np.maximum(np.searchsorted(points, end, side="left") - first, 0) + 1
    row = np.repeat(np.arange(len(start)), pieces)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    padded = np.append(points, 0)
    piece_start = np.where(nth == 0, start[row], padded[first[row] + nth - 1])
    piece_end = np.where(nth == pieces[row] - 1, end[row], padded[np.minimum(first[row] + nth, len(points))])
    return row, piece_start, piece_end


def charge(exposed: Intervals, start: IntArray, end: IntArray, order: IntArray) -> IntArray:
    """Charge each instant of ``exposed`` to one of the intervals running then: the one lowest in ``order``.

    Equal ``order`` is broken by row. Returns the nanoseconds charged to each interval; they sum to the part
    of ``exposed`` that any interval covers. Cost grows with the number of simultaneous intervals.
    """
    charged = np.zeros(len(start), dtype=np.int64)
    rank = np.empty(len(start), dtype=np.int64)
    by_rank = np.argsort(order, kind="stable")
    rank[by_rank] = np.arange(len(start))
    row, piece_start, piece_end = cut(start, end, np.concatenate([start, end]))
    weight = covered(exposed, piece_start, piece_end)
    row, piece_start, weight = row[weight > 0], piece_start[weight > 0], weight[weight > 0]
    best = np.lexsort((rank[row], piece_start))
    row, piece_start, weight = row[best], piece_start[best], weight[best]
    winner = np.ones(len(row), dtype=np.bool_)
    winner[1:] = piece_start[1:] != piece_start[:-1]
    np.add.at(charged, row[winner], weight[winner])
    return charged


def charged_pieces(
    exposed: Intervals, start: IntArray, end: IntArray, order: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return ``(row, start, end)`` of the parts of ``exposed`` that :func:`charge` assigns to each
    interval.

    The parts are disjoint and in order of time.
    """
    edges = np.concatenate([start, end, exposed.start, exposed.end])
    row, piece_start, piece_end = cut(start, end, edges)
    inside = (containing(exposed.start, exposed.end, piece_start) >= 0) & (piece_end > piece_start)
    row, piece_start, piece_end = row[inside], piece_start[inside], piece_end[inside]
    best = np.lexsort((row, order[row], piece_start))
    row, piece_start, piece_end = row[best], piece_start[best], piece_end[best]
    winner = np.ones(len(row), dtype=np.bool_)
    winner[1:] = piece_start[1:] != piece_start[:-1]
    return row[winner], piece_start[winner], piece_end[winner]


def _sweep(*sets: Intervals) -> tuple[IntArray, npt.NDArray[np.int8]]:
    """Return the distinct ends of at most seven sets in order, and where the segment after each one lies.

    Bit ``i`` of a segment's state says whether it lies in set ``i``.
    """
    times = np.concatenate([edge for one in sets for edge in (one.start, one.end)])
    change = np.repeat(
        np.array([sign << i for i in range(len(sets)) for sign in (1, -1)], dtype=np.int8),
        [len(edge) for one in sets for edge in (one.start, one.end)],
    )
    order = np.argsort(times, kind="stable")
    times = times[order]
    last = np.flatnonzero(np.append(times[1:] != times[:-1], True)[: len(times)])
    return times[last], np.cumsum(change[order], dtype=np.int8)[last]


def _from_segments(points: IntArray, keep: BoolArray) -> Intervals:
    """Join the remaining segments between neighbouring points."""
    edges = np.diff(keep.astype(np.int8), prepend=np.int8(0))
    return Intervals(points[edges == 1], points[edges == -1])
