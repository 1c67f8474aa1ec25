"""Matrix products in float64, by the recorded types of operators and by the names of kernels."""

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
    ("types", "expected"), [('["double","double"]', 600), ('["float","float"]', 0), (None, 0)]
)
def test_of_a_host_by_the_recorded_types(types: str | None, expected: int) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    for start in (100, 400):
        shapes: dict[str, Any] = {} if types is None else {"dims": "[[8,8],[8,8]]", "types": types}
        trace.host("aten::mm", start, start + 300, **shapes)
    trace.host("aten::add", 800, 900, dims="[[8],[8]]", types='["double","double"]')
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
