"""What single operators compute and move, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from fsdp2prof.analyzers.phases import build_phases
from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.analyzers.trace.accounting import step_flops, step_work
from fsdp2prof.estimators.timeline.operators import work_of
from fsdp2prof.readers.trace.chrome_trace import read_trace

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OFFSETS = torch.empty(8, dtype=torch.int32, device="meta")


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize(
    ("left", "right", "out", "flops", "shape"),
    [
        ((800, 32), (8, 32, 16), (800, 16), 2 * 800 * 32 * 16, (8, 100, 16, 32)),
        ((32, 800), (800, 16), (8, 32, 16), 2 * 800 * 32 * 16, (8, 32, 16, 100)),
        ((8, 16, 32), (32, 800), (16, 800), 2 * 800 * 32 * 16, (8, 16, 100, 32)),
        ((8, 10, 32), (8, 32, 16), (8, 10, 16), 2 * 8 * 10 * 32 * 16, (8, 10, 16, 32)),
    ],
)
def test_a_grouped_product_computes_one_product_a_group(
    left: tuple[int, ...],
    right: tuple[int, ...],
    out: tuple[int, ...],
    flops: int,
    shape: tuple[int, ...],
) -> None:
    """Rows of activations, weights' gradients, columns, and batches; groups are equally large."""
    args = (empty(*left), empty(*right), OFFSETS)
    work = work_of(aten._grouped_mm.default, args, {}, empty(*out))
    assert work is not None
    assert (work.kind, work.flops, work.shape) == ("matmul", flops, shape)


def test_attention_with_smaller_values_than_keys() -> None:
    """Scores over 192, values of 128: two products forward, five backward; causal halves them."""
    query, key, value = empty(2, 16, 64, 192), empty(2, 16, 64, 192), empty(2, 16, 64, 128)
    forward = aten._scaled_dot_product_flash_attention.default
    out = empty(2, 16, 64, 128)
    work = work_of(forward, (query, key, value, 0.0, True), {}, out)
    assert work is not None
    scores = 2 * 16 * 64 * 64
    assert work.flops == 2 * scores * (192 + 128) // 2
    assert work.shape == (2, 16, 64, 64, 192, 16, 128)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    work = work_of(backward, (out, query, key, value, out, out, None, None, 64, 64, 0.0, True), {}, query)
    assert work is not None
    assert work.flops == 2 * scores * (3 * 192 + 2 * 128) // 2


@pytest.mark.parametrize(("columns", "passes"), [(1000, 1), (128_256, 3)])
def test_a_long_row_of_a_softmax_is_read_three_times(columns: int, passes: int) -> None:
    logits = empty(4, columns, dtype=torch.float32)
    work = work_of(aten._log_softmax.default, (logits, 1, False), {}, logits)
    assert work is not None
    assert work.bytes == 4 * 4 * columns * (passes + 1)


def test_the_gradient_of_a_class_is_written_alone() -> None:
    logits, target = empty(4, 1000, dtype=torch.float32), empty(4, dtype=torch.int64)
    one = empty(dtype=torch.float32)
    work = work_of(aten.nll_loss_backward.default, (one, logits, target, None, 1, -100, one), {}, logits)
    assert work is not None
    assert work.bytes == 4 * 4 * 1000


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), (2, 4, 9, 9)),
        (nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 12)),
        (nn.ConvTranspose2d(6, 6, 4, stride=2, padding=1), (2, 6, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, groups=2), (2, 6, 5, 5)),
        (nn.Sequential(nn.Conv3d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 8, 7)), (2, 3, 4, 4, 4)),
    ],
)
def test_the_work_of_convolutions_is_three_times_what_torch_counts_forward(
    model: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Backward is two products as large. (Torch counts those of the weights of groups too high.)"""
    given = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        model(given)
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        with record_function("ProfilerStep#1"):
            model(given).sum().backward()
        with record_function("ProfilerStep#2"), torch.no_grad():
            nn.Conv2d(1, 1, 2)(torch.zeros(1, 1, 3, 3))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    steps = host_steps(trace.labels)
    assert step_work(trace, steps, build_phases(trace.labels, steps)).tolist() == [
        3 * counted.get_total_flops(),
        -1,
    ]
    assert step_flops(trace, steps).tolist() == [-1, -1]
