"""Idle time explained, and operations counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import WORKER, TraceBuilder
from synthetic import Schedule, record, transformer, write

from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.analyzers.trace.accounting import breakdown, operations, step_flops
from fsdp2prof.analyzers.trace.analysis import References, analyze_rank, throughput
from fsdp2prof.analyzers.trace.charges import rank_charges
from fsdp2prof.analyzers.trace.idle import idle_causes
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.results.step import BreakdownNs, StepBreakdown


def causes(trace: TraceBuilder) -> list[dict[str, int]]:
    tables = rank_tables(trace.build())
    found = idle_causes(tables)
    steps = breakdown(tables.parts, tables.windows, tables.collectives, tables.exposure)
    assert [sum(step.values()) for step in found] == [step.breakdown_ns.idle for step in steps]
    return found


def test_an_empty_queue_is_the_hosts_and_a_full_one_is_not() -> None:
    trace = TraceBuilder()
    trace.device("gemm", 10, 20, launch=5)
    trace.device("gemm", 50, 60, launch=40)
    trace.device("gemm", 63, 70, launch=45)
    assert causes(trace) == [{"host_bound": 20, "queued": 10 + 3}]


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cudaStreamSynchronize", "device_sync"),
        ("hipDeviceSynchronize", "device_sync"),
        ("cudaMemcpy", "memcpy"),
        ("cudaLaunchKernel", "host_bound"),
    ],
)
def test_a_host_that_stood_waiting_when_the_device_ran_dry_says_for_what(call: str, cause: str) -> None:
    trace = TraceBuilder()
    trace.device("gemm", 10, 20, launch=5)
    trace.host(call, 8, 25, "cuda_runtime")
    trace.device("gemm", 50, 60, launch=40)
    assert causes(trace) == [{cause: 20, "queued": 10}]


def test_the_profilers_own_time_is_set_apart() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 30)
    trace.label("ProfilerStep#2", 36, 100)
    trace.device("gemm", 10, 20, launch=5)
    trace.host("Buffer Flush", 38, 40, "overhead")
    trace.device("gemm", 50, 60, launch=45)
    assert causes(trace) == [{"profiler": 6 + 2, "host_bound": 17, "queued": 5}, {}]


def test_a_missing_launch_is_unknown() -> None:
    trace = TraceBuilder()
    trace.device("gemm", 10, 20, launch=None)
    trace.device("gemm", 50, 60, launch=None)
    assert causes(trace) == [{"unknown": 30}]


def test_on_cpu_a_blocked_caller_waits_for_communication() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.host("aten::copy_", 5, 10)
    trace.host("c10d::allreduce_", 12, 14)
    trace.host("gloo:all_reduce", 20, 40, "user_annotation", WORKER)
    trace.host("aten::div_", 45, 50)
    assert causes(trace) == [{"communication": (20 - 12) + (45 - 40), "host_bound": 5 + 2 + 50}]


def test_a_batch_that_is_not_there_is_the_data_loaders() -> None:
    """Getting a batch took 25 to 45 on the thread that trains; another thread's loader is ahead of need."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 60)
    trace.host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 25, 45, "user_annotation")
    trace.host(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 60, "user_annotation", WORKER
    )
    trace.device("gemm", 10, 20, launch=5)
    trace.device("gemm", 50, 60, launch=48)
    assert causes(trace) == [{"host_bound": (25 - 20) + (48 - 45), "data_loader": 20, "queued": 2}]


def test_idle_time_of_a_capture_by_hand_is_capturings() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.device("gemm", 0, 10, launch=0)
    trace.host("cudaStreamBeginCapture", 10, 12, "cuda_runtime")
    trace.host("<eval_with_key>.50(4): forward", 12, 84, "python_function")
    trace.host("cudaStreamEndCapture", 84, 86, "cuda_runtime")
    trace.device("gemm", 92, 100, launch=90)
    charges = rank_charges(rank_tables(trace.build()), 0).own
    captured = [one for one in charges if one.cause == "compilation"]
    assert {one.why for one in captured} == {"graphs"}
    assert 70 <= sum(one.ns for one in captured) <= 86
    assert not {one.site for one in charges} & {"<eval_with_key>.50(4): forward"}


ACTIVITY = st.tuples(st.integers(0, 80), st.integers(0, 20), st.integers(0, 2), st.integers(-1, 100))
CALL = st.tuples(st.sampled_from(["cudaDeviceSynchronize", "cudaMemcpyAsync"]), st.integers(0, 90))


@given(st.lists(ACTIVITY, min_size=1, max_size=8), st.lists(CALL, max_size=4))
def test_causes_always_sum_to_the_idle_time(
    activities: list[tuple[int, int, int, int]], calls: list[tuple[str, int]]
) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#0", 0, 50)
    trace.label("ProfilerStep#1", 55, 101)
    for start, length, stream, launch in activities:
        trace.device("gemm", start, start + length, None if launch < 0 else launch, stream)
    for name, start in calls:
        trace.host(name, start, start + 10, "cuda_runtime")
    causes(trace)


def test_an_item_in_the_forward_is_found_as_a_synchronisation(tmp_path: Path) -> None:
    (recording,) = record(Schedule(roots=(transformer(3, sync=True, host_ns=40_000),), steps=1))
    found = analyze_rank(read_trace(write(recording, tmp_path / "rank0.json"), workers=1))
    (plain,) = record(Schedule(roots=(transformer(3, host_ns=40_000),), steps=1))
    without = analyze_rank(read_trace(write(plain, tmp_path / "plain.json"), workers=1))
    assert found.rank.steps[0].idle_ns.get("device_sync", 0) > 0
    assert "device_sync" not in without.rank.steps[0].idle_ns


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("aten::mm", [[64, 32], [32, 16]], 2 * 64 * 32 * 16),
        ("aten::addmm", [[16], [64, 32], [32, 16], [], []], 2 * 64 * 32 * 16),
        ("aten::bmm", [[4, 64, 32], [4, 32, 16]], 2 * 4 * 64 * 32 * 16),
        ("aten::baddbmm", [[4, 64, 16], [4, 64, 32], [4, 32, 16]], 2 * 4 * 64 * 32 * 16),
        ("aten::_grouped_mm", [[100, 32], [8, 32, 16]], 2 * 100 * 32 * 16),
        ("aten::_scaled_dot_product_flash_attention", [[2, 8, 128, 64]] + [[2, 2, 96, 64]] * 2 + [[], []],
         4 * 2 * 8 * 128 * 96 * 64),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[2, 8, 128, 64]] * 4,
         10 * 2 * 8 * 128 * 128 * 64),
        ("aten::add", [[64, 32], [64, 32]], 0),
        ("aten::mm", [[], []], -1),
    ],
)  # fmt: skip
def test_operations_from_shapes(name: str, dims: list[object], expected: int) -> None:
    assert operations(name, json.dumps(dims)) == expected


def flops(trace: TraceBuilder) -> list[int]:
    built = trace.build()
    return step_flops(built, host_steps(built.labels)).tolist()


def test_operations_of_each_step() -> None:
    trace = TraceBuilder()
    for step, start in ((1, 0), (2, 100), (3, 200)):
        trace.label(f"ProfilerStep#{step}", start, start + 90)
        trace.host("aten::mm", start + 10, start + 20, dims="[[4,4],[4,4]]")
    trace.host("aten::mm", 30, 40, dims="[[4,4],[4,4]]")
    trace.host("aten::convolution", 130, 140, dims="[[1,3,8,8],[4,3,3,3]]")
    trace.host("aten::mm", 95, 97, dims="[[4,4],[4,4]]")
    assert flops(trace) == [256, -1, 128], "a convolution's output is not recorded"


def test_operations_without_recorded_shapes_are_unknown() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.host("aten::mm", 10, 20)
    assert flops(trace) == [-1]


def step(duration: int, count: int | None) -> StepBreakdown:
    parts = BreakdownNs(
        compute=duration, fsdp_copy=0, exposed_all_gather=0, exposed_reduce_scatter=0, exposed_all_reduce=0,
        exposed_other_comm=0, exposed_memcpy=0, idle=0,
    )  # fmt: skip
    return StepBreakdown(step=0, duration_ns=duration, breakdown_ns=parts, start_ns=0, flops=count)


def test_throughput() -> None:
    steps = [step(100, 1000), step(300, 3000), step(110, None)]
    found = throughput(
        steps, References(tokens_per_step=11, peak_flops_per_s={"bfloat16": 4e10}), dtype="bfloat16"
    )
    assert found is not None
    assert found.step_ns == 110
    assert found.tokens_per_s == pytest.approx(11 / 110e-9)
    assert found.flops_per_s == pytest.approx(4000 / 400e-9), "over the steps that are counted"
    assert found.mfu == pytest.approx(1e10 / 4e10)
    unknown = throughput([step(100, None)], References())
    assert unknown is not None
    assert (unknown.tokens_per_s, unknown.flops_per_s, unknown.mfu) == (None, None, None)
    assert throughput([], References()) is None
