"""``benchmarks.coverage``: margins by the procedure that its docstring states."""

from __future__ import annotations

import pytest

coverage = pytest.importorskip("benchmarks.coverage")


def outcome(source, score, **more):
    values = {
        "id": "x",
        "kind": "memory_with_software_stated",
        "error": 0.0,
        "unit": 1.0,
        "alternatives": 0.0,
    }
    return coverage.Outcome(source=source, score=score, **{**values, **more})


def test_each_source_weighs_the_same():
    """Nine rows of one source do not outweigh one row each of nine: the 85 % point is among theirs."""
    many = [outcome("many", 0.01) for _ in range(90)]
    few = [outcome(f"one {index}", index / 10) for index in range(1, 10)]
    assert coverage.margin_of([*many, *few]) == pytest.approx(0.8)
    assert coverage.margin_of(many) == 0.01


def test_a_source_is_judged_by_the_others():
    found = coverage.held_out([outcome("a", 0.01), outcome("a", 0.5), outcome("b", 0.02)])
    assert found == {"a": (0.02, [True, False]), "b": (0.5, [True])}
    assert coverage.held_out([outcome("alone", 0.1)]) == {}


def test_an_anchor_takes_away_what_rows_share():
    """Two rows, both bound by compute and both 10 % too fast, put each other right."""
    shared = {"elasticities": [1.0, 0.0, 0.0], "prior": [0.2, 0.2, 0.2]}
    own, other = (outcome("a", 0.0, error=-0.1, **shared) for _ in range(2))
    assert abs(coverage._left(own, [other])) < 0.005
    apart = outcome("a", 0.0, error=-0.1, elasticities=[0.0, 1.0, 0.0], prior=[0.2, 0.2, 0.2])
    assert coverage._left(own, [apart]) == pytest.approx(-0.1)
