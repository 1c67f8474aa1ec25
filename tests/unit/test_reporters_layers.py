"""Rows per layer: means over ranks and steps, and siblings folded into one row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import MIB, MS, group, trace_analysis

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.reporters.layers import fold, layer_rows
from fsdp2prof.vocabulary import layer_name


def test_rows_are_means_over_ranks_and_steps() -> None:
    """2 ranks x 2 steps; block 0 is exposed 1, 2, 3 and 6 ms: 3 ms on average, of 4 ms in all."""
    analysis = trace_analysis(blocks=1)
    exposed = iter((1, 2, 3, 6))
    groups = [
        replace(row, exposed_ns=next(exposed) * MS) if row.op == "all_gather" else row
        for row in analysis.groups
    ]
    row = next(row for row in layer_rows(replace(analysis, groups=groups)) if row.op == "all_gather")
    assert (row.fqn, row.count, row.payload_bytes, row.wire_bytes) == ("layers.0", 1, 8 * MIB, 4 * MIB)
    assert (row.exposed_ns, row.total_ns) == (3 * MS, 4 * MS)
    assert row.overlap_frac == 0.25
    assert row.busbw_bytes_per_s == pytest.approx(4 * MIB / 0.004)


def test_bandwidths_of_folded_rows_add_up_by_time_not_by_mean() -> None:
    """4 MiB at 1 GB/s and 4 MiB at 3 GB/s take 4/3 of 4 MiB's time: 1.5 GB/s, not 2."""
    slow = replace(group("a", "all_gather", 0, 3, exposed_ms=0), busbw_bytes_per_s=1e9)
    fast = replace(slow, busbw_bytes_per_s=3e9)
    analysis = replace(trace_analysis(), groups=[slow, fast])
    assert layer_rows(analysis)[0].busbw_bytes_per_s == pytest.approx(1.5e9)


@pytest.mark.parametrize(
    ("fqn", "name"),
    [
        ("", "(root)"),
        ("root1:", "root1:(root)"),
        ("root1:layers.0", "root1:layers.0"),
        ("root1", "root1"),
        (None, "(no layer)"),
    ],
)
def test_roots_have_a_name_for_people(fqn: str | None, name: str) -> None:
    assert layer_name(fqn) == name


def test_an_unknown_size_stays_unknown() -> None:
    unknown = replace(group("a", "all_gather", 0, 3, exposed_ms=0), payload_bytes=None)
    rows = layer_rows(
        replace(trace_analysis(), groups=[unknown, group("a", "all_gather", 0, 4, exposed_ms=0)])
    )
    assert rows[0].payload_bytes is None


def test_alike_siblings_fold_and_the_bad_one_stands_out() -> None:
    """Block 0 is exposed 4 ms, blocks 1-9 1 ms each: one row for the nine, one for block 0."""
    rows = fold(layer_rows(trace_analysis(blocks=10)))
    assert [(row.fqn, row.layers, row.exposed_ns / MS) for row in rows] == [
        ("layers.1-9", 9, 9.0),
        ("layers.0", 1, 4.0),
        ("", 1, 3.0),
    ]


def test_different_sizes_do_not_fold() -> None:
    rows = layer_rows(trace_analysis(blocks=4))
    uneven = [replace(row, payload_bytes=1 + i) for i, row in enumerate(rows)]
    assert len(fold(uneven)) == len(rows)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_folding_loses_nothing(exposed: list[int]) -> None:
    """Counts, bytes and times are sums over the rows that were folded."""
    rows = layer_rows(trace_analysis(blocks=1))
    rows = [replace(rows[0], fqn=f"h.{i}.mlp", exposed_ns=ms * MS) for i, ms in enumerate(exposed)]
    folded = fold(rows)
    assert sum(row.layers for row in folded) == len(rows)
    for name in ("count", "payload_bytes", "wire_bytes", "total_ns", "exposed_ns", "stall_ns"):
        assert sum(getattr(r, name) for r in folded) == pytest.approx(sum(getattr(r, name) for r in rows))
    assert [row.exposed_ns for row in folded] == sorted((row.exposed_ns for row in folded), reverse=True)


def test_names_fold_in_order_of_appearance() -> None:
    items = [("", 1), ("h.0", 2), ("h.1", 2), ("h.2", 2), ("h.3", 9), ("h.7", 2), ("head", 1)]
    assert fold_names(items) == [("(root)", [0]), ("h.0-2,7", [1, 2, 3, 5]), ("h.3", [4]), ("head", [6])]
    assert [name for name, _ in fold_names(items, every=True)][1:4] == ["h.0", "h.1", "h.2"]
