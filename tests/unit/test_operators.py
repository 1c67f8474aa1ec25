"""Products and attention by shape: operations, bytes and rates by hand, and the roof over them."""

from __future__ import annotations

import pytest
from support.traces import TraceBuilder

from fsdp2prof.analyzers.trace.accounting import working_operators
from fsdp2prof.analyzers.trace.operators import OperatorSum, operator_rows, operator_sums
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.reporters.charts.trace import roofline_chart

MM = "[[64,32],[32,16]]"
BF16 = '["c10::BFloat16","c10::BFloat16"]'
FLASH = "aten::_scaled_dot_product_flash_attention"


def test_a_call_takes_what_its_kernels_take() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 1000)
    trace.host("aten::mm", 10, 30, dims=MM, types=BF16)
    trace.device("gemm", 100, 150, launch=12)
    trace.device("splitk_reduce", 150, 157, launch=20)
    trace.device("add", 200, 300, launch=40)
    trace.host("aten::mm", 50, 60, dims=MM, types=BF16)
    trace.device("gemm", 300, 343, launch=55)
    assert operator_sums(rank_tables(trace.build())) == [OperatorSum("aten::mm", MM, BF16, 2, 100)]


def test_a_host_only_call_takes_its_own_time_and_what_is_inside_another_counts_once() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 1000)
    trace.host("aten::baddbmm", 10, 40, dims="[[2,4,4],[2,4,4],[2,4,4]]", types="[]")
    trace.host("aten::bmm", 12, 30, dims="[[2,4,4],[2,4,4]]", types="[]")
    (found,) = operator_sums(rank_tables(trace.build()))
    assert (found.name, found.total_ns) == ("aten::baddbmm", 30)


def test_outside_a_step_and_without_shapes_nothing_counts() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.host("aten::mm", 10, 20)
    trace.host("aten::mm", 200, 210, dims=MM, types=BF16)
    assert operator_sums(rank_tables(trace.build())) == []


def test_rates_and_roofs_by_hand() -> None:
    """2 x 64 x 32 x 16 operations; 2048 + 512 + 1024 elements of two bytes; two ranks with one step each."""
    one = OperatorSum("aten::mm", MM, BF16, 4, 4096)
    (row,) = operator_rows([[one], [one]], 2, {"bfloat16": 1e11}, 1e10)
    assert (row.flops, row.bytes, row.dtype) == (65_536, 7_168, "bfloat16")
    assert (row.count, row.total_ns, row.mean_ns) == (4, 4096, 1024)
    assert row.shapes == "64x32, 32x16"
    assert row.flops_per_s == pytest.approx(6.4e10)
    assert row.bytes_per_s == pytest.approx(7e9)
    assert row.of_peak_flops_frac == pytest.approx(0.64)
    assert row.of_peak_bytes_frac == pytest.approx(0.7)
    assert row.roof_frac == pytest.approx(6.4e10 / (1e10 * 65_536 / 7_168)), (
        "memory allows less than the peak"
    )
    (unknown,) = operator_rows([[one]], 1, {}, None)
    assert (unknown.of_peak_flops_frac, unknown.of_peak_bytes_frac, unknown.roof_frac) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "dims", "types", "expected"),
    [
        ("aten::addmm", "[[16],[64,32],[32,16],[],[]]",
         '["float","float","float","Scalar","Scalar"]', 14_336),
        (FLASH, "[[1,2,8,4],[1,1,8,4],[1,1,8,4],[],[]]",
         '["c10::Half","c10::Half","c10::Half","Double","Bool"]', 2 * (64 + 32 + 32 + 64)),
        (f"{FLASH}_backward", "[[1,2,8,4],[1,2,8,4],[1,1,8,4],[1,1,8,4]]", '["c10::Half"]', None),
        (f"{FLASH}_backward", "[[1,2,8,4],[1,2,8,4],[1,1,8,4],[1,1,8,4]]",
         '["c10::Half","c10::Half","c10::Half","c10::Half"]', 2 * 2 * (64 + 32 + 32 + 64)),
        ("aten::_scaled_mm", MM, '["c10::Float8_e4m3fn","c10::Float8_e4m3fn"]', None),
        ("aten::mm", MM, '["float","c10::BFloat16"]', None),
        ("aten::mm", MM, "nonsense", None),
    ],
)  # fmt: skip
def test_bytes_are_operands_and_results_once(name: str, dims: str, types: str, expected: int | None) -> None:
    (row,) = operator_rows([[OperatorSum(name, dims, types, 1, 10)]], 1, {}, None)
    assert row.bytes == expected
    assert (row.bytes_per_s is None) == (expected is None)


def test_the_chart_holds_each_point_and_the_roof() -> None:
    rows = operator_rows([[OperatorSum("aten::mm", MM, BF16, 1, 1024)]], 1, {"bfloat16": 1e11}, 1e10)
    figure = roofline_chart(rows, {"bfloat16": 1e11}, 1e10)
    points, roof = figure["data"]
    assert points["x"] == [pytest.approx(65_536 / 7_168)]
    assert points["y"] == [pytest.approx(0.064)]
    assert max(roof["y"]) == pytest.approx(0.1)
    assert roof["y"][0] == pytest.approx(roof["x"][0] * 1e10 / 1e12)
    assert len(roofline_chart(rows, {}, None)["data"]) == 1


def test_a_nested_copy_does_not_take_its_operators_place() -> None:
    """Twelve addmm; the copy of the bias takes most of two of them: it is part of the product."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 2000)
    for call in range(12):
        begin = 100 * call
        trace.host("aten::addmm", begin, begin + 50, dims="[[16],[64,32],[32,16]]", types="[]")
        if call in (3, 7):
            trace.host("aten::copy_", begin + 5, begin + 45)
    built = trace.build()
    kept = [built.events.name.to_list()[row] for row in working_operators(built)]
    assert kept == ["aten::addmm"] * 12
    (found,) = operator_sums(rank_tables(built))
    assert (found.name, found.count, found.total_ns) == ("aten::addmm", 12, 600)
