"""Kinds of compute by recorded types, shapes and kernel names: float64, one-hot, logits without a loss."""

from __future__ import annotations

from typing import Any

import pytest
from support.traces import TraceBuilder

from fsdp2prof.analyzers.trace.charges import rank_charges
from fsdp2prof.analyzers.trace.rank_tables import rank_tables


def double_ns(trace: TraceBuilder) -> int:
    charges = rank_charges(rank_tables(trace.build()), 0).own
    return sum(one.ns for one in charges if one.why == "float64")


@pytest.mark.parametrize(
    ("types", "expected"),
    [('["double","double"]', 700), ('["c10::complex<double>",""]', 700), ('["float","float"]', 0), (None, 0)],
)
def test_of_a_host_by_the_recorded_types(types: str | None, expected: int) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    for start in (100, 400):
        shapes: dict[str, Any] = {} if types is None else {"dims": "[[8,8],[8,8]]", "types": types}
        trace.host("aten::mm", start, start + 300, **shapes)
    if types is not None:
        trace.host("aten::add", 800, 900, dims="[[8],[]]", types=types)
    trace.host("aten::mul", 1_000, 1_100, dims="[[8],[]]", types='["float","double"]')  # stays float
    assert double_ns(trace) == expected


@pytest.mark.parametrize(
    ("kernel", "is_double"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x3_nn_align1>", True),
        ("ampere_dgemm_64x64_tn", True),
        ("sm80_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize64x64x16", True),
        ("ampere_sgemm_128x64_tn", False),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", False),
    ],
)
def test_of_a_device_by_the_names_of_kernels(kernel: str, is_double: bool) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.device(kernel, 100, 500, launch=50)
    trace.device("vectorized_elementwise_kernel", 500, 600, launch=60)
    assert double_ns(trace) == 400 * is_double


def test_gaps_of_a_trace_without_operators_are_no_pauses() -> None:
    """A trace of the device alone does not show what the host did."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 3_000)
    trace.device("gemm", 100, 500, launch=50)
    trace.device("gemm", 2_500, 2_900, launch=2_400)
    causes = {one.cause for one in rank_charges(rank_tables(trace.build()), 0).own}
    assert "host_pause" not in causes
    trace.host("aten::mm", 2_390, 2_410)
    causes = {one.cause for one in rank_charges(rank_tables(trace.build()), 0).own}
    assert "host_pause" in causes


@pytest.mark.parametrize(
    ("between", "factor", "expected"),
    [("aten::t", "[9,6]", 500), ("aten::sum", "[9,6]", 0), ("aten::t", "[6,64]", 0)],
)
def test_a_product_with_a_one_hot_matrix_counts_with_its_making(
    between: str, factor: str, expected: int
) -> None:
    """Six tokens of nine classes: nothing but a view may come between, and the product takes that matrix."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.host("aten::one_hot", 100, 300)
    trace.host("aten::scatter_", 250, 290, dims="[[6,9],[],[6,1],[]]", types='["long int"]')
    trace.host(between, 310, 320)
    trace.host("aten::matmul", 400, 700)
    trace.host("aten::mm", 405, 695, dims=f"[{factor},[6,64]]", types='["float","float"]')
    trace.host("aten::mm", 800, 900, dims="[[9,6],[6,64]]", types='["float","float"]')
    charges = rank_charges(rank_tables(trace.build()), 0).own
    found = sum(one.ns for one in charges if one.why == "one_hot")
    assert expected - 20 <= found <= expected


@pytest.mark.parametrize(
    ("loss", "product", "named"),
    [
        ("[[8,900],[8,900]]", "[[900,128],[128,16]]", True),
        ("[[64,900],[64,900]]", "[[900,128],[128,16]]", False),
        ("[[8,900],[8,900]]", "[[900,8],[8,16]]", False),
        ("[[8,90],[8,90]]", "[[900,128],[128,16]]", False),
        ("[[2,900,4],[2,900,4]]", "[[900,128],[128,16]]", False),
    ],
    ids=["a few of 128", "half of them", "the head's own", "other classes", "not flat"],
)
def test_logits_that_no_loss_takes(loss: str, product: str, named: bool) -> None:
    """The head's product in forward, the loss's gradient, and the product for the gradient of its weight."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.host("aten::mm", 100, 400, dims="[[128,16],[16,900]]", types='["float","float"]')
    trace.host("aten::_log_softmax_backward_data", 500, 600, dims=loss, types='["float","float"]')
    trace.host("aten::mm", 700, 900, dims=product, types='["float","float"]')
    charges = rank_charges(rank_tables(trace.build()), 0).own
    found = sum(one.ns for one in charges if one.why == "unused_logits")
    assert (480 <= found <= 500) is named
    assert found == 0 or named
