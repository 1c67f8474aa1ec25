"""``benchmarks.coverage``: margins by the procedure that its docstring states."""

from __future__ import annotations

import csv

import pytest

from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.builtin_plan import outline_of
from fsdp2prof.estimators.techniques.registry import check_parallelism
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal
from fsdp2prof.estimators.verdict.step_range import speed_class

coverage = pytest.importorskip("benchmarks.coverage")
later = pytest.importorskip("benchmarks.later")


def outcome(source, score, **more):
    values = {
        "id": "x",
        "kind": "memory_with_software_stated",
        "error": 0.0,
        "unit": 1.0,
        "alternatives": 0.0,
    }
    return coverage.Outcome(source=source, score=score, **{**values, **more})


def test_every_published_run_can_be_described():
    with later.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        if "ep=" in row["mesh"] and expert_mesh_refusal() is not None:
            continue
        model = outline_of(builtin_config(row["model"]))
        check_parallelism(model, MeshSpec.parse(row["mesh"]), later.policy_of(row))


def test_each_source_weighs_the_same():
    """Nine rows of one source do not outweigh one row each of nine: the 85 % point is among theirs."""
    many = [outcome("many", 0.01) for _ in range(90)]
    few = [outcome(f"one {index}", index / 10) for index in range(1, 10)]
    assert coverage.margin_of([*many, *few], 0.85) == pytest.approx(0.8)
    assert coverage.margin_of(many, 0.85) == 0.01


def test_the_lowest_percentile_that_holds_left_out_rows_is_taken():
    """At the 85th percentile each of two sources misses a row of ten that the other needs more for."""
    near = [outcome(name, 0.01) for name in "abcdefgh" for _ in range(4)]
    assert coverage.margins_of(near) == (0.01, 0.01)
    far = [outcome(name, 0.1) for name in "abcdefgh"]
    assert coverage.margins_of([*near, *far]) == (0.1, 0.1)
    lone = [outcome("i", 0.9), outcome("j", 0.9)]  # whatever is taken, some of so few stay outside
    assert coverage.margins_of([outcome("h", 0.1), *lone[:1]])[0] == 0.9


def test_a_source_is_judged_by_the_others():
    found = coverage.held_out([outcome("a", 0.01), outcome("a", 0.5), outcome("b", 0.02)])
    assert found == {"a": ((0.02, 0.02), [True, False]), "b": ((0.5, 0.5), [True])}
    assert coverage.held_out([outcome("alone", 0.1)]) == {}


def test_slower_and_faster_steps_have_margins_of_their_own():
    """Half of the rows are faster: the 95 % point of all is the 90 % point of the slower half."""
    slow = [
        outcome(f"s{at}", at / 10, kind="speed_of_sharded_models", error=-0.1, unit=0.2, fast_unit=0.1)
        for at in range(1, 11)
    ]
    fast = [outcome(f"s{at}", 0.3, kind="speed_of_sharded_models", error=0.1) for at in range(1, 11)]
    margins = coverage.margins_of([*slow, *fast])
    assert margins == (pytest.approx(0.9), pytest.approx(0.3))
    assert [one.fits(margins) for one in (slow[8], slow[9], fast[0])] == [True, False, True]
    # half of 0.9 of the way to 20 % slower and 0.3 of that to 10 % faster
    assert slow[0].half_width(margins) == pytest.approx((0.9 * 0.2 + 1 - 0.9**0.3) / 2, rel=0.03)


def test_an_anchor_takes_away_what_rows_share():
    """Two rows, both bound by compute and both 10 % too fast, put each other right."""
    shared = {"elasticities": [1.0, 0.0, 0.0], "prior": [0.2, 0.2, 0.2]}
    own, other = (outcome("a", 0.0, error=-0.1, **shared) for _ in range(2))
    assert abs(coverage._left(own, [other])) < 0.005
    apart = outcome("a", 0.0, error=-0.1, elasticities=[0.0, 1.0, 0.0], prior=[0.2, 0.2, 0.2])
    assert coverage._left(own, [apart]) == pytest.approx(-0.1)


def test_adapters_have_the_margin_of_software_that_is_open() -> None:
    mesh, part = MeshSpec(dp_shard=8), HardwareSpec.parse("h100-sxm")
    whole = {"torch": "2.11", "seq_len": 4096}
    adapted = {**whole, "lora": "r=8,targets=wq"}
    assert speed_class(mesh, PolicySpec.from_mapping(whole), part) == "speed_of_sharded_models"
    assert speed_class(mesh, PolicySpec.from_mapping(adapted), part) == "speed_with_software_open"
