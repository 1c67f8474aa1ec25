"""Compute by Python line: operators that looks found, those like them, views before them, their backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.results import trace_analysis
from support.traces import TraceBuilder

from fsdp2prof.analyzers.ledger.words import bound
from fsdp2prof.analyzers.trace.charges import rank_charges
from fsdp2prof.analyzers.trace.idle import host_syncs
from fsdp2prof.analyzers.trace.lines import line_rows, line_sums
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.manifest import HostSpan, HostStep, RankManifest
from fsdp2prof.results.trace import LineRow

MS = 1_000_000
MEAN, LINEAR = "model.py:26 (average)", "linear() in model.py:40 (forward)"


LOOKS = [(10.3, MEAN), (10.5, MEAN), (11.05, MEAN), (22.5, LINEAR), (23.0, LINEAR), (27.9, LINEAR)]


def trace_of_two_blocks() -> TraceBuilder:
    """In each block a view and a mean of 1 ms, and a product of 6 ms; backward of the view takes 20 ms."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 100 * MS)
    for block, at in enumerate((10, 20)):
        trace.label(f"FSDP::pre_forward (blocks.{block})", at * MS - 2000, at * MS - 1000)
        trace.host("aten::unfold", at * MS, at * MS + 1000)
        trace.host("aten::mean", at * MS + 2000, (at + 1) * MS + 2000)
        trace.host("aten::linear", (at + 2) * MS, (at + 8) * MS)
        trace.host("aten::addmm", (at + 2) * MS + 10, (at + 8) * MS - 10)
        trace.label(f"FSDP::post_forward (blocks.{block})", (at + 9) * MS, (at + 9) * MS + 1000)
    trace.label("FSDP::pre_backward (blocks.1)", 30 * MS, 30 * MS + 1000)
    for node, operator, start, end in (
        ("AddmmBackward0", "aten::mm", 31, 41),
        ("UnfoldBackward0", "aten::unfold_backward", 50, 70),
    ):
        trace.host(f"autograd::engine::evaluate_function: {node}", start * MS, end * MS)
        trace.host(operator, start * MS + 10, end * MS - 10)
    trace.label("FSDP::post_backward (blocks.1)", 80 * MS, 80 * MS + 1000)
    return trace


def rows_of(looks: list[tuple[float, str]], *, on_device: bool = False) -> list[LineRow]:
    built = replace(trace_of_two_blocks().build(), base_time_ns=1)
    lines = [HostSpan(start_ns=int(at * MS) + 1, line=line) for at, line in looks]
    tables = rank_tables(built, RankManifest(host_steps=[HostStep(step=3, lines=lines)]))
    return line_rows([line_sums(tables)], windows=1, step_ns=100 * MS, on_device=on_device)


def test_time_is_of_the_line_that_asked_for_it_with_its_backward() -> None:
    """The looks found the mean of one block and the product of the other, and never the view."""
    product, average = rows_of(LOOKS)[::-1]
    assert (average.line, product.line) == ("model.py:26 in average()", "model.py:40 in forward()")
    assert average.forward_ns == pytest.approx(2 * MS, rel=0.01)
    assert average.backward_ns == pytest.approx(20 * MS, rel=0.01), "of the view, which precedes the mean"
    assert product.forward_ns == pytest.approx(12 * MS, rel=0.01)
    assert product.backward_ns == pytest.approx(10 * MS, rel=0.01)
    assert average.step_frac == pytest.approx(0.22, rel=0.01)


def test_operators_of_one_name_are_divided_by_the_looks_at_them() -> None:
    found = rows_of([(13.0, LINEAR), (14.0, LINEAR), (15.0, LINEAR), (23.0, "model.py:41 (forward)")] * 3)
    assert {row.line: round(row.forward_ns / MS, 1) for row in found} == {
        "model.py:40 in forward()": 9.0,
        "model.py:41 in forward()": 3.0,
    }


def test_few_looks_name_no_line() -> None:
    assert rows_of([(13.0, LINEAR)]) == []
    assert rows_of([]) == []
    assert rows_of(LOOKS, on_device=True) == [], "a launch is short: it takes more of them"
    assert [row.line for row in rows_of(LOOKS * 3, on_device=True)] == [row.line for row in rows_of(LOOKS)]


def test_an_operator_that_takes_long_and_was_never_seen_is_of_no_line() -> None:
    (row,) = rows_of([(10.3, MEAN), (10.5, MEAN), (11.05, MEAN)])
    assert row.forward_ns == pytest.approx(2 * MS, rel=0.01)


@pytest.mark.parametrize(("frac", "named"), [(0.4, True), (0.05, False)])
def test_a_line_that_takes_much_is_named_where_compute_takes_most(frac: float, named: bool) -> None:
    row = LineRow(line="model.py:26 in average()", forward_ns=2 * MS, backward_ns=20 * MS, step_frac=frac)
    analysis = replace(trace_analysis(), lines=[row])
    assert analysis.ledger is not None
    entries = [
        replace(one, ns=one.ns * 10) if one.cause == "compute" else one for one in analysis.ledger.entries
    ]
    said = bound(replace(analysis.ledger, entries=entries), analysis)
    assert ("The costliest line is model.py:26 in average() (40.0%), backward included." in said) is named


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("aten::_cudnn_attention_forward", "aten::_cudnn_attention_forward"),
        ("mine::attention", "a.py:7 in f()"),
    ],
)
def test_a_pause_inside_an_operator_of_torch_is_that_operators(operator: str, expected: str) -> None:
    """The host launches nothing for 80 of 100 ms, in a call of line 7. In an operator of the script's own,
    its lines run; in torch's they do not."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 100 * MS)
    trace.host("aten::mm", MS, 2 * MS)
    trace.device("gemm", 2 * MS, 3 * MS, launch=MS + 1)
    trace.host(operator, 4 * MS, 86 * MS)
    trace.host("aten::mm", 86 * MS, 87 * MS)
    trace.device("gemm", 87 * MS, 88 * MS, launch=86 * MS + 1)
    looks = [HostSpan(start_ns=at * MS + 1, line="a.py:7 (f)") for at in range(5, 85, 5)]
    manifest = RankManifest(host_steps=[HostStep(step=3, lines=looks)])
    own = rank_charges(rank_tables(replace(trace.build(), base_time_ns=1), manifest), 0).own
    assert {one.site for one in own if one.cause == "host_pause"} == {expected}


def test_a_call_without_an_id_is_of_the_innermost_operator_around_it() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 1_000)
    trace.host("aten::index", 100, 500)
    trace.host("aten::copy_", 150, 400)
    trace.host("aten::add", 160, 180)
    trace.host("cudaStreamSynchronize", 200, 390, "cuda_runtime")
    trace.host("cudaStreamSynchronize", 600, 700, "cuda_runtime")
    trace.device("gemm", 700, 800, launch=690)
    tables = rank_tables(trace.build())
    rows = host_syncs(tables.trace, tables.phases, tables.analysed, 0, tables.sighted.lines)
    assert [(row.operator, row.blocked_ns) for row in rows] == [("aten::copy_", 190), (None, 100)]
