"""Sums of products that are stored, Fourier transforms by Bluestein's algorithm, attention with a mask."""

from __future__ import annotations

import pytest
from support.traces import TraceBuilder

from fsdp2prof.analyzers.trace.charges import rank_charges
from fsdp2prof.analyzers.trace.rank_tables import rank_tables

FACTORS, PRODUCT = "[[16,1,64],[1,16,64]]", "[16,16,64]"
OVER_ONE, OVER_ALL = f"[{PRODUCT},[],[],[]]", f"[{PRODUCT},[]]"
KERNEL = "void at::native::vectorized_elementwise_kernel<4>()"
BACKWARD = "autograd::engine::evaluate_function: MulBackward0"


def spent_on(why: str, trace: TraceBuilder) -> int:
    return sum(one.ns for one in rank_charges(rank_tables(trace.build()), 0).own if one.why == why)


def sum_of_products(
    factors: str, second: str, summed: str, gradient: str = PRODUCT, between: str = "aten::view"
) -> TraceBuilder:
    """A product and the operator after it, 100 ns of kernels each, and 100 ns of the product's backward.

    ``between`` is an operator in between.
    """
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.host("aten::mul", 100, 120, dims=factors)
    trace.device(KERNEL, 110, 210, launch=105)
    trace.host(between, 122, 125)
    trace.host(second, 130, 150, dims=summed)
    trace.device(KERNEL, 210, 310, launch=135)
    trace.host(BACKWARD, 400, 490, thread=1)
    trace.host("aten::mul", 410, 430, thread=1, dims=f"[{gradient},[16,1,64]]")
    trace.device(KERNEL, 420, 520, launch=415, thread=1)
    return trace


@pytest.mark.parametrize(
    ("factors", "second", "summed", "gradient", "expected"),
    [
        (FACTORS, "aten::sum", OVER_ONE, PRODUCT, 300),
        (FACTORS, "aten::sum", OVER_ONE, "[8,64]", 200),  # the backward of another product
        (FACTORS, "aten::sum", OVER_ALL, PRODUCT, 0),  # a loss
        (FACTORS, "aten::sum", "[[16,64],[],[],[]]", PRODUCT, 0),  # of something else
        (FACTORS, "aten::exp", f"[{PRODUCT}]", PRODUCT, 0),  # the product itself is needed
        (
            "[[16,16,64],[16,16,1]]",
            "aten::sum",
            OVER_ONE,
            PRODUCT,
            0,
        ),  # weights: it is as large as its factor
    ],
)
def test_products_that_are_many_times_as_large_as_their_factors_are_a_matrix_product(
    factors: str, second: str, summed: str, gradient: str, expected: int
) -> None:
    assert spent_on("contraction", sum_of_products(factors, second, summed, gradient)) == expected


def test_a_function_of_the_products_is_no_matrix_product() -> None:
    trace = sum_of_products(FACTORS, "aten::sum", OVER_ONE, between="aten::tanh")
    assert spent_on("contraction", trace) == 0


def differences(factors: str, between: str | None, summed: str) -> TraceBuilder:
    """Differences, an operator on them and their sum, 100 ns of kernels each, and 100 ns of backward."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.host("aten::sub", 100, 120, dims=factors)
    trace.device(KERNEL, 110, 210, launch=105)
    if between is not None:
        trace.host(between, 122, 125)
        trace.device(KERNEL, 210, 310, launch=123)
    trace.host("aten::sum", 130, 150, dims=summed)
    trace.device(KERNEL, 310, 410, launch=135)
    trace.host(BACKWARD.replace("Mul", "Pow"), 420, 490, thread=1)
    trace.host("aten::mul", 430, 440, thread=1, dims=f"[{PRODUCT},[16,16,64]]")
    trace.device(KERNEL, 435, 535, launch=432, thread=1)
    return trace


@pytest.mark.parametrize(
    ("factors", "between", "summed", "expected"),
    [
        (FACTORS, "aten::pow", OVER_ONE, 400),
        (FACTORS, "aten::abs", OVER_ONE, 400),
        (FACTORS, None, OVER_ONE, 0),  # a sum of differences is the difference of sums, and rare
        (FACTORS, "aten::tanh", OVER_ONE, 0),
        (FACTORS, "aten::pow", OVER_ALL, 0),  # a loss
        ("[[16,16,64],[16,16,64]]", "aten::pow", OVER_ONE, 0),  # as large as what is compared
    ],
)
def test_pairwise_distances_that_store_all_differences_are_told(
    factors: str, between: str | None, summed: str, expected: int
) -> None:
    assert spent_on("distances", differences(factors, between, summed)) == expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("void multi_bluestein_fft<128u, EPT<16u>, 32u, 0u>", 100),
        ("bluestein_single_fwd_len8191_dim1_sp_op_CI_CI", 100),
        ("void regular_fft<4096u, EPT<8u>, 8u, 8u>", 0),
    ],
)
def test_fourier_transforms_of_slow_lengths_have_kernels_of_their_own(kernel: str, expected: int) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.device(kernel, 110, 210, launch=105)
    assert spent_on("bluestein", trace) == expected


QUERY, SHARED = "[8,12,256,64]", "[256,256]"


@pytest.mark.parametrize(
    ("mask", "kind", "expected"),
    [
        (SHARED, "bool", 200),
        ("[1,1,256,256]", "bool", 200),
        ("[8,1,256,256]", "bool", 0),  # padding, or documents: each sample has its own
        ("[12,256,256]", "bool", 0),  # each head has its own
        (SHARED, "c10::BFloat16", 0),  # a bias
        ("[]", "", 0),  # is_causal
    ],
)
def test_attention_with_one_mask_for_all_samples_counts_with_its_backward(
    mask: str, kind: str, expected: int
) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    inputs = f"[{QUERY},{QUERY},{QUERY},{mask},[],[]]"
    types = f'["c10::BFloat16","c10::BFloat16","c10::BFloat16","{kind}","",""]'
    trace.host("aten::scaled_dot_product_attention", 100, 190, dims=inputs, types=types)
    trace.device("flash_fprop", 120, 220, launch=150)
    backward = f"[{QUERY},{QUERY},{QUERY},{QUERY},{QUERY},[8,12,256,1],[],[],{mask}]"
    name = "aten::_scaled_dot_product_cudnn_attention_backward"
    trace.host(name, 300, 390, thread=1, dims=backward)
    trace.device("flash_bprop", 320, 420, launch=350, thread=1)
    assert spent_on("masked", trace) == expected
