"""Interval arithmetic against a raster of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals

END = 60

pairs = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=12)
"""Any intervals: overlapping, touching, empty, inverted."""


def columns(items: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(items, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def raster(items: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in items for instant in range(start, end)}


def instants(found: Intervals) -> set[int]:
    return raster(list(zip(found.start.tolist(), found.end.tolist(), strict=True)))


def is_normal(found: Intervals) -> bool:
    return bool((found.start < found.end).all() and (found.start[1:] > found.end[:-1]).all())


@given(pairs)
def test_union(items: list[tuple[int, int]]) -> None:
    found = intervals.union(*columns(items))
    assert is_normal(found)
    assert instants(found) == raster(items)
    assert intervals.total(found) == len(raster(items))


@given(pairs, pairs)
def test_intersect_and_subtract(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = intervals.union(*columns(left)), intervals.union(*columns(right))
    both, only = intervals.intersect(a, b), intervals.subtract(a, b)
    assert is_normal(both)
    assert is_normal(only)
    assert instants(both) == raster(left) & raster(right)
    assert instants(only) == raster(left) - raster(right)


@given(pairs, st.lists(pairs, max_size=4))
def test_classify_gives_each_instant_to_the_first_layer_that_has_it(
    window: list[tuple[int, int]], layers: list[list[tuple[int, int]]]
) -> None:
    left = raster(window)
    parts = intervals.classify(
        intervals.union(*columns(window)), [intervals.union(*columns(layer)) for layer in layers]
    )
    for part, layer in zip(parts, layers, strict=False):
        assert instants(part) == left & raster(layer)
        left -= raster(layer)
    assert instants(parts[-1]) == left
    assert sum(intervals.total(part) for part in parts) == len(raster(window))


@given(pairs, pairs)
def test_covered(items: list[tuple[int, int]], queries: list[tuple[int, int]]) -> None:
    found = intervals.covered(intervals.union(*columns(items)), *columns(queries))
    assert found.tolist() == [len(raster(items) & raster([query])) for query in queries]


@given(pairs, st.lists(st.integers(-3, END + 3), max_size=20))
def test_containing(items: list[tuple[int, int]], times: list[int]) -> None:
    disjoint = intervals.union(*columns(items))
    found = intervals.containing(disjoint.start, disjoint.end, np.array(times, dtype=np.int64))
    for time, row in zip(times, found.tolist(), strict=True):
        expected = np.flatnonzero((disjoint.start <= time) & (time < disjoint.end))
        assert row == (expected[0] if len(expected) else -1)


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges as a call stack leaves them."""
    items: list[tuple[int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(low, high), max_size=4)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            if start < end:
                items.append((start, end))
                if depth < 3:
                    fill(start, end, depth + 1)

    fill(0, END, 0)
    return sorted(set(items), key=lambda item: (item[0], -item[1]))


@given(nested(), st.lists(st.integers(-3, END + 3), max_size=20))
def test_innermost(items: list[tuple[int, int]], times: list[int]) -> None:
    found = intervals.innermost(*columns(items), np.array(times, dtype=np.int64))
    for time, row in zip(times, found.tolist(), strict=True):
        around = [item for item in items if item[0] <= time < item[1]]
        assert (items[row] if row >= 0 else None) == min(around, key=lambda i: i[1] - i[0], default=None)


@given(pairs, st.lists(st.integers(0, END), max_size=8))
def test_cut(items: list[tuple[int, int]], points: list[int]) -> None:
    items = [item for item in items if item[0] <= item[1]]
    row, start, end = intervals.cut(*columns(items), np.array(points, dtype=np.int64))
    for i, item in enumerate(items):
        edges = [item[0], *sorted({p for p in points if item[0] < p < item[1]}), item[1]]
        assert start[row == i].tolist() == edges[:-1]
        assert end[row == i].tolist() == edges[1:]


@given(pairs, pairs, st.data())
def test_charge_gives_each_instant_to_the_lowest_in_order(
    exposed: list[tuple[int, int]], items: list[tuple[int, int]], data: st.DataObject
) -> None:
    order = data.draw(st.lists(st.integers(0, 3), min_size=len(items), max_size=len(items)))
    given = intervals.union(*columns(exposed)), *columns(items), np.array(order, dtype=np.int64)
    charged = intervals.charge(*given)
    row, start, end = intervals.charged_pieces(*given)
    assert bool((start[1:] >= end[:-1]).all()), "in order of time, disjoint"
    expected = [0] * len(items)
    for instant in raster(exposed):
        running = [i for i, item in enumerate(items) if item[0] <= instant < item[1]]
        if running:
            expected[min(running, key=lambda i: (order[i], i))] += 1
    assert charged.tolist() == expected
    assert [int((end - start)[row == i].sum()) for i in range(len(items))] == expected


def test_nanoseconds_beyond_float_precision_stay_exact() -> None:
    epoch = 1_790_857_026_123_456_789
    found = intervals.union(
        np.array([epoch, epoch + 10], dtype=np.int64), np.array([epoch + 3, epoch + 11], dtype=np.int64)
    )
    assert intervals.total(found) == 4
    assert intervals.total(intervals.union(np.array([epoch]), np.array([epoch + 1]))) == 1


@given(st.lists(st.integers(-9, 9)), st.lists(st.integers(-9, 9)))
def test_among_is_membership(values: list[int], those: list[int]) -> None:
    found = intervals.among(np.array(values, dtype=np.int64), np.array(those, dtype=np.int64))
    assert found.tolist() == [value in those for value in values]
