"""Communication by layer: exposed, stalled, overlapped, attributed."""

from __future__ import annotations

import pytest
from support.traces import WORKER, TraceBuilder

from fsdp2prof.analyzers.trace import by_layer
from fsdp2prof.analyzers.trace.accounting import breakdown
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.results.step import BreakdownNs

NCCL = "ncclDevKernel_AllGather_RING_LL"


def part(tables: RankTables) -> BreakdownNs:
    (step,) = breakdown(tables.parts, tables.windows, tables.collectives, tables.exposure)
    return step.breakdown_ns


def groups(tables: RankTables) -> list[GroupRow]:
    return by_layer.group_rows(0, tables.windows, tables.collectives, tables.exposure, tables.waits)


def two_gathers() -> TraceBuilder:
    """Two all-gathers in flight at once; b's result is needed before a's, though a started first."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 1000)
    trace.label("FSDP::all_gather (a)", 10, 20)
    trace.label("FSDP::all_gather (b)", 30, 40)
    trace.label("FSDP::all_gather_copy_out (b)", 50, 60)
    trace.label("FSDP::all_gather_copy_out (a)", 70, 80)
    trace.device("gemm", 90, 100, launch=5)
    trace.device(NCCL, 100, 160, launch=15, stream=24)
    trace.device(NCCL, 110, 140, launch=35, stream=25)
    trace.device("split_copy", 140, 145, launch=55)
    trace.device("split_copy", 160, 165, launch=75)
    return trace


def test_an_exposed_instant_is_charged_to_the_collective_needed_next() -> None:
    tables = rank_tables(two_gathers().build())
    a, b = groups(tables)
    assert (a.fqn, a.total_ns, a.exposed_ns, a.overlap_frac) == ("a", 60, 25, 1 - 25 / 60)
    assert (b.fqn, b.total_ns, b.exposed_ns, b.overlap_frac) == ("b", 30, 30, 0.0)
    parts = part(tables)
    assert (parts.compute, parts.fsdp_copy, parts.exposed_all_gather, parts.idle) == (10, 10, 55, 0)


def test_stall_is_the_gap_before_the_consumer() -> None:
    a, b = groups(rank_tables(two_gathers().build()))
    assert b.stall_ns == 40, "from the end of compute at 100 to its end at 140"
    assert a.stall_ns == 15, "from b's copy-out at 145 to its end at 160"


def test_unknown_consumers_are_charged_in_order_of_their_start() -> None:
    trace = TraceBuilder()
    trace.device("ncclDevKernel_AllReduce_Sum_f32", 100, 160, launch=15, stream=24)
    trace.device("ncclDevKernel_ReduceScatter_Sum_f32", 110, 180, launch=35, stream=25)
    tables = rank_tables(trace.build())
    assert (part(tables).exposed_all_reduce, part(tables).exposed_reduce_scatter) == (60, 20)
    assert [row.stall_ns for row in groups(tables)] == [None, None]


def test_a_collective_over_a_step_boundary_is_counted_once_and_timed_where_it_ran() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.label("ProfilerStep#2", 100, 200)
    trace.device("gemm", 10, 20, launch=5)
    trace.device(NCCL, 90, 140, launch=50, stream=24)
    trace.device("gemm", 120, 170, launch=110)
    tables = rank_tables(trace.build())
    first, second = groups(tables)
    assert (first.step, first.count, first.total_ns, first.exposed_ns) == (1, 1, 30, 30)
    assert (second.step, second.count, second.total_ns, second.exposed_ns) == (2, 0, 20, 0)


def test_attribution_counts_every_collective_once() -> None:
    trace = two_gathers()
    trace.device("ncclDevKernel_AllReduce_Sum_f32", 300, 320, launch=250)
    found = by_layer.attribution((tables := rank_tables(trace.build())).windows, tables.collectives)
    assert (found.collectives, found.attributed) == (3, 2)
    assert (found.comm_ns, found.attributed_ns) == (110, 90)
    assert found.unattributed_reasons == {"issued outside every FSDP module": 1}


@pytest.mark.parametrize(
    ("exposed", "total", "expected"), [(0, 0, None), (0, 5, 1.0), (5, 5, 0.0), (1, 4, 0.75)]
)
def test_overlap_frac(exposed: int, total: int, expected: float | None) -> None:
    assert by_layer.overlap_frac(exposed, total) == expected


def cpu(prefetched: bool) -> TraceBuilder:
    """An all-gather of a on CPU: it blocks its caller, or runs beside an operator of 20 ns."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 200)
    trace.label(
        "FSDP::forward_prefetch for a" if prefetched else "FSDP::pre_forward (a)", 4, 12 if prefetched else 60
    )
    trace.label("FSDP::all_gather (a)", 5, 12 if prefetched else 40)
    trace.host("aten::copy_", 6, 8)
    trace.host("c10d::_allgather_base_", 9, 11)
    trace.host("gloo:all_gather", 15, 38, "user_annotation", WORKER)
    if prefetched:
        trace.host("aten::mm", 14, 34)
        trace.label("FSDP::pre_forward (a)", 40, 60)
    trace.label("FSDP::all_gather_copy_out (a)", 42, 50)
    trace.host("aten::split", 44, 48)
    trace.label("FSDP::post_forward (a)", 150, 160)
    return trace


def test_on_cpu_a_blocked_caller_stalls_from_its_last_operator() -> None:
    (row,) = groups(rank_tables(cpu(prefetched=False).build()))
    assert (row.total_ns, row.exposed_ns) == (23, 23)
    assert row.stall_ns == 38 - 9, "from the call, the time to reach the worker included"


def test_on_cpu_an_asynchronous_all_gather_is_awaited_by_its_copy_out() -> None:
    (row,) = groups(rank_tables(cpu(prefetched=True).build()))
    assert (row.total_ns, row.exposed_ns) == (23, 4)
    assert row.stall_ns == 4, "from the end of the operator beside it"


def test_spellings_of_one_dtype_are_one_row() -> None:
    trace = TraceBuilder()
    for start, dtype in ((100, "Float"), (200, "float"), (300, "BFloat16"), (400, "c10::BFloat16")):
        trace.device("ncclDevKernel_AllReduce_Sum", start, start + 10, start - 50, dtype=dtype, in_nelems=4)
    rows = groups(rank_tables(trace.build()))
    assert [(row.dtype, row.count, row.payload_bytes) for row in rows] == [
        ("float32", 2, 32),
        ("bfloat16", 2, 16),
    ]


def test_blocking_in_wait_tensor_is_no_compute() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.host("aten::norm", 2, 6)
    trace.host("_c10d_functional::all_reduce", 8, 14)
    trace.host("c10d::allreduce_", 10, 12)
    trace.host("_c10d_functional::wait_tensor", 16, 50)
    trace.host("gloo:all_reduce", 20, 48, "user_annotation", WORKER)
    trace.host("aten::mul_", 55, 60)
    tables = rank_tables(trace.build())
    (row,) = groups(tables)
    assert (row.op, row.exposed_ns, row.stall_ns) == ("all_reduce", 28, 38)
    assert part(tables).compute == 4 + 5
