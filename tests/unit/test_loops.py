"""Loops of small operators: found by what repeats, whatever it is called, and told from layers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.sharded_groups import sharded_group
from support.traces import TraceBuilder

from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.trace.script import WHY, Script, find_loops
from fsdp2prof.manifest import HostSpan, HostStep, RankManifest, RootInfo

US = 1_000


def trace_of(names: list[str], each_ns: int = 10 * US) -> tuple[TraceBuilder, int]:
    """Operators one after another in one step's forward of ``blocks.0``; returns the end of the last."""
    trace, at = TraceBuilder(), 100 * US
    for name in names:
        trace.host(name, at, at + each_ns - US)
        at += each_ns
    trace.label("FSDP::pre_forward (blocks.0)", 90 * US, 95 * US)
    trace.label("FSDP::post_forward (blocks.0)", at + US, at + 2 * US)
    trace.label("ProfilerStep#3", 0, at + 100 * US)
    return trace, at


def unit(modules: int) -> RankManifest:
    group = sharded_group("blocks.0", [16, 64], ranks=2, rows=8)
    parameters = [
        msgspec.structs.replace(group.parameters[0], fqn=f"blocks.0.linear{i}.weight") for i in range(modules)
    ]
    return RankManifest(param_groups=[msgspec.structs.replace(group, parameters=parameters)])


def loops(names: list[str], manifest: RankManifest | None = None, **options: Any) -> list[int]:
    trace, _ = trace_of(names, **options)
    return find_loops(rank_tables(trace.build(), manifest)).operators.tolist()


BODY = ["aten::select", "aten::mul", "aten::add"]


def test_a_repeated_sequence_is_one_loop_with_all_its_operators() -> None:
    assert loops(["aten::linear", *BODY * 40, "aten::stack"], unit(4)) == [120]


def test_fewer_passes_are_none() -> None:
    assert loops(BODY * 15, unit(4)) == []


def test_without_labels_the_optimizer_cannot_be_told_from_a_loop() -> None:
    trace = TraceBuilder()
    for i in range(120):
        trace.host(BODY[i % 3], (100 + 10 * i) * US, (109 + 10 * i) * US)
    trace.label("ProfilerStep#3", 0, 2000 * US)
    assert find_loops(rank_tables(trace.build())).operators.tolist() == []


def test_large_operators_are_work_and_not_a_loop() -> None:
    assert loops(BODY * 40, unit(4), each_ns=300 * US) == []


def test_layers_of_a_unit_are_no_loop() -> None:
    """Forty layers in one unit repeat as a loop does; forty passes over four modules do not."""
    layer = ["aten::linear", "aten::relu"]
    assert loops(layer * 40, unit(40)) == []
    assert loops(layer * 40, unit(4)) == [80]
    assert loops(layer * 40) == [], "without a manifest"
    assert loops(BODY * 40) == [120]


def test_what_fsdp_issues_for_its_parameters_is_no_loop() -> None:
    trace, _ = trace_of([])
    for i in range(40):
        trace.host("aten::as_strided", 91 * US + 50 * i, 91 * US + 50 * i + 40)
    assert find_loops(rank_tables(trace.build(), unit(4))).operators.tolist() == []


@pytest.mark.parametrize("seen", [True, False])
def test_the_line_is_that_seen_most(seen: bool) -> None:
    trace, _ = trace_of(BODY * 40)
    built = trace.build()
    built = built.__class__(**{name: getattr(built, name) for name in built.__slots__} | {"base_time_ns": 1})
    line = HostSpan(start_ns=150 * US, duration_ns=US, line="model.py:7 (forward)")
    manifest = RankManifest(host_steps=[HostStep(step=3, lines=[line] if seen else [])])
    (site,) = find_loops(rank_tables(built, manifest)).site.to_list()
    assert site == ("model.py:7 in forward()" if seen else None)


@pytest.mark.parametrize(("reduced", "counted"), [("aten::_is_any_true", [(3, 12)]), ("aten::any", [])])
def test_checks_of_gradients_are_autograds_own_in_backward(
    reduced: str, counted: list[tuple[int, int]]
) -> None:
    """Anomaly detection, or a script's hook with torch.isnan(gradient).any()."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 1000 * US)
    trace.label("FSDP::pre_backward (blocks.0)", 500 * US, 510 * US)
    trace.label("FSDP::post_backward (blocks.0)", 900 * US, 910 * US)
    for start in (100, *range(520, 640, 10)):
        trace.host("aten::isnan", start * US, (start + 2) * US)
        trace.host(reduced, (start + 3) * US, (start + 5) * US)
    assert Script(rank_tables(trace.build())).gradient_checks() == counted


HEADS = ["aten::slice", "aten::matmul", "aten::softmax"]


@pytest.mark.parametrize(
    ("body", "passes", "found"),
    [
        (HEADS, 6, [18] * 3),
        (HEADS, 5, []),
        (["aten::linear", "aten::relu", "aten::linear"], 6, []),
        (["aten::slice"], 6, []),
    ],
    ids=["18 passes a step", "15 passes", "a stack of layers", "one operator"],
)
def test_a_short_loop_counts_where_it_comes_back(body: list[str], passes: int, found: list[int]) -> None:
    """Heads of attention one by one, in each of three layers."""
    names = [name for _ in range(3) for name in ["aten::linear", *body * passes, "aten::cat"]]
    assert loops(names, unit(12)) == found


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (["aten::mul_", "aten::add_", "aten::addcdiv_"] * 20, [(3, 60)]),
        (["aten::_foreach_mul_", "aten::_fused_adamw_", "aten::add_", "aten::view_as"] * 20, [(3, 20)]),
        (["aten::mul_", "aten::mm"] * 20, []),
    ],
    ids=["one by one", "many at once", "products"],
)
def test_operators_of_an_optimizer_that_take_one_tensor(
    names: list[str], counted: list[tuple[int, int]]
) -> None:
    trace, at = trace_of([])
    for i, name in enumerate(names):
        trace.host(name, at + (10 + i) * US, at + (10 + i) * US + 900)
    trace.label("Optimizer.step#Mine.step", at + 5 * US, at + 90 * US)
    assert Script(rank_tables(trace.build())).operators_of_optimizers() == counted


def test_operators_of_a_forward_are_counted_where_backward_runs_them_again() -> None:
    trace, at = trace_of(["aten::linear", "aten::mm"] * 10)
    trace.label("FSDP::pre_backward (blocks.0)", at + 10 * US, at + 12 * US)
    for i in range(30):
        name = "aten::linear" if i % 2 else "aten::mm"
        trace.host(name, at + (20 + i) * US, at + (20 + i) * US + 900)
    trace.label("FSDP::post_backward_reduce (blocks.0)", at + 60 * US, at + 62 * US)
    assert Script(rank_tables(trace.build())).forward_operators() == [(3, 10, 15)]


@pytest.mark.parametrize(("loads", "found"), [(True, [(3, 1, None)]), (False, [])])
def test_a_new_iterator_draws_a_seed_between_steps(loads: bool, found: list[tuple[int, int, None]]) -> None:
    trace, _ = trace_of(["aten::random_", *["aten::mm"] * 20])
    trace.host("aten::random_", 10 * US, 12 * US)
    if loads:
        trace.label("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20 * US, 30 * US)
    assert Script(rank_tables(trace.build())).new_iterators() == found


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_loss_is_part_of_training_also_where_another_forward_comes_first(forwards: int) -> None:
    """A line runs after a forward with a graph, then another forward, then backward."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 1000 * US)
    for begin in (100 * US, 300 * US):
        trace.label("FSDP::pre_forward ", begin, begin + 10 * US)
        trace.host("RegisterPostBackwardFunction", begin + 20 * US, begin + 21 * US)
        trace.label("FSDP::post_forward ", begin + 50 * US, begin + 60 * US)
    trace.label("FSDP::pre_backward ", 500 * US, 510 * US)
    trace.label("FSDP::post_backward_reduce ", 600 * US, 610 * US)
    built = trace.build()
    built = built.__class__(**{name: getattr(built, name) for name in built.__slots__} | {"base_time_ns": 1})
    line = HostSpan(start_ns=200 * US, duration_ns=US, line="train.py:7 (main)")
    manifest = RankManifest(
        param_groups=[
            msgspec.structs.replace(sharded_group("", [16, 64], ranks=2, rows=8), forwards=forwards)
        ],
        roots=[RootInfo(root=0, micro_batches=1)],
        host_steps=[HostStep(step=3, lines=[line])],
    )
    script = Script(rank_tables(built, manifest))
    reason, *_ = script.at(np.array([200 * US]), np.array([True]), looped=True)
    assert WHY[reason[0]] == ("outside" if forwards == 1 else None)
