"""Rows per layer: means over ranks and steps, siblings folded into one row, and a layer's sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import MIB, MS, group, trace_analysis

from fsdp2prof.analyzers.layers import fold_alike, fold_names, natural_key
from fsdp2prof.analyzers.trace.by_layer import fold, layer_rows, layer_rows_by_kind, layer_totals
from fsdp2prof.results.communication import LayerRow
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import layer_name

SUMMED = ("count", "payload_bytes", "wire_bytes", "total_ns", "exposed_ns", "stall_ns")


def rows_of(analysis: TraceAnalysis) -> list[LayerRow]:
    return layer_rows(analysis.groups, sum(len(rank.steps) for rank in analysis.ranks))


def test_rows_are_means_over_ranks_and_steps() -> None:
    """2 ranks x 2 steps; block 0 is exposed 1, 2, 3 and 6 ms: 3 ms on average, of 4 ms in all."""
    analysis = trace_analysis(blocks=1)
    exposed = iter((1, 2, 3, 6))
    groups = [
        replace(row, exposed_ns=next(exposed) * MS) if row.op == "all_gather" else row
        for row in analysis.groups
    ]
    row = next(row for row in rows_of(replace(analysis, groups=groups)) if row.op == "all_gather")
    assert (row.fqn, row.count, row.payload_bytes, row.wire_bytes) == ("layers.0", 1, 8 * MIB, 4 * MIB)
    assert (row.exposed_ns, row.total_ns) == (3 * MS, 4 * MS)
    assert row.overlap_frac == 0.25
    assert row.busbw_bytes_per_s == pytest.approx(4 * MIB / 0.004)


def test_rows_sum_to_the_groups() -> None:
    analysis = trace_analysis(blocks=7)
    for name in SUMMED:
        measured = sum(getattr(row, name) for row in analysis.groups)
        assert sum(getattr(row, name) for row in analysis.by_layer) * analysis.totals.windows == measured
    assert sum(one.exposed_ns for one in analysis.layers) == sum(row.exposed_ns for row in analysis.by_layer)


def test_bandwidths_of_folded_rows_add_up_by_time_not_by_mean() -> None:
    """4 MiB at 1 GB/s and 4 MiB at 3 GB/s take 4/3 of 4 MiB's time: 1.5 GB/s, not 2."""
    slow = replace(group("a", "all_gather", 0, 3, exposed_ms=0), busbw_bytes_per_s=1e9)
    fast = replace(slow, busbw_bytes_per_s=3e9)
    assert layer_rows([slow, fast], 4)[0].busbw_bytes_per_s == pytest.approx(1.5e9)


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
    rows = layer_rows([unknown, group("a", "all_gather", 0, 4, exposed_ms=0)], 4)
    assert rows[0].payload_bytes is None
    assert rows[0].wire_bytes == 2 * MIB


def test_alike_siblings_fold_and_the_bad_one_stands_out() -> None:
    """Block 0 is exposed 4 ms, blocks 1-9 1 ms each: one row for the nine, one for block 0."""
    analysis = trace_analysis(blocks=10)
    assert [(row.fqn, row.layers, row.exposed_ns / MS) for row in analysis.by_layer_folded] == [
        ("layers.1-9", 9, 9.0),
        ("layers.0", 1, 4.0),
        ("", 1, 3.0),
    ]
    assert len(analysis.by_layer) == 11


def test_different_sizes_do_not_fold() -> None:
    rows = rows_of(trace_analysis(blocks=4))
    uneven = [replace(row, payload_bytes=1 + i) for i, row in enumerate(rows)]
    assert len(fold(uneven)) == len(rows)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_folding_loses_nothing(exposed: list[int]) -> None:
    """Counts, bytes and times are sums over the rows that were folded."""
    first = layer_rows([group("a", "all_gather", 0, 3, exposed_ms=0)], 1)[0]
    rows = [replace(first, fqn=f"h.{i}.mlp", exposed_ns=ms * MS) for i, ms in enumerate(exposed)]
    folded = fold(rows)
    assert sum(row.layers for row in folded) == len(rows)
    for name in SUMMED:
        assert sum(getattr(r, name) for r in folded) == sum(getattr(r, name) for r in rows)
    assert [row.exposed_ns for row in folded] == sorted((row.exposed_ns for row in folded), reverse=True)


def test_a_layer_is_the_sum_of_its_operations_in_the_order_of_names() -> None:
    names = ["layers.10", "layers.9", "layers.10", None, ""]
    groups = [group(name, "all_gather", 0, 3, exposed_ms=i) for i, name in enumerate(names)]
    groups[2] = replace(groups[2], phase="backward")
    totals = layer_totals(layer_rows(groups, 2))
    assert [one.fqn for one in totals] == [None, "", "layers.9", "layers.10"]
    assert [one.exposed_ns / MS for one in totals] == [1.5, 2, 0.5, 1]
    assert totals[-1].total_ns == 4 * MS


def test_names_fold_in_order_of_appearance() -> None:
    items = [("", 1), ("h.0", 2), ("h.1", 2), ("h.2", 2), ("h.3", 9), ("h.7", 2), ("head", 1)]
    assert fold_names(items) == [("(root)", [0]), ("h.0-2,7", [1, 2, 3, 5]), ("h.3", [4]), ("head", [6])]


def test_what_costs_twice_its_siblings_stays_alone() -> None:
    items = [(f"h.{i}", 0) for i in range(5)]
    assert fold_alike(items, [1, 1, 9, 1, 1]) == [[2], [0, 1, 3, 4]]
    assert fold_alike(items[:3], [1, 9, 1]) == [[0], [1], [2]]


def test_names_with_numbers_of_any_length_are_sorted_and_folded() -> None:
    long = "layers." + "9" * 5000
    names = ["layers.10", long, "layers.9"]
    assert sorted(names, key=natural_key) == ["layers.9", "layers.10", long]
    assert [rows for _, rows in fold_names([(name, 0) for name in names])] == [[0], [1], [2]]


def test_steps_of_models_updated_in_turns_have_rows_of_their_own() -> None:
    """Of three steps, two reduce ``a`` and one ``b``: each once a step of its kind."""
    analysis = trace_analysis()
    (first, *_), ranks = analysis.ranks[0].steps, analysis.ranks[:1]
    ranks = [replace(ranks[0], steps=[replace(first, step=step) for step in (3, 4, 5)])]
    turns = [(3, "a"), (4, "b"), (5, "a")]
    groups = [group(layer, "reduce_scatter", 0, step, exposed_ms=2) for step, layer in turns]
    rows = layer_rows_by_kind(groups, ranks)
    assert [(row.fqn, row.steps, row.count, row.exposed_ns) for row in rows] == [
        ("a", [3, 5], 1, 2 * MS),
        ("b", [4], 1, 2 * MS),
    ]
    assert layer_rows_by_kind([row for row in groups if row.fqn == "a"], ranks) != []
    assert layer_rows_by_kind([replace(row, fqn="a") for row in groups], ranks) == []
