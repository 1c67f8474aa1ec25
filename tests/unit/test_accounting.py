"""The step breakdown: exact, disjoint, and the same as a raster of single nanoseconds says."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import WORKER, TraceBuilder

from fsdp2prof.analyzers.trace import by_layer
from fsdp2prof.analyzers.trace.accounting import breakdown
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.results.communication import GroupRow

NCCL = "ncclDevKernel_AllGather_RING_LL"


def parts(tables: RankTables) -> list[dict[str, int]]:
    steps = breakdown(tables.parts, tables.windows, tables.collectives, tables.exposure)
    found = [{k: v for k, v in asdict(step.breakdown_ns).items() if v} for step in steps]
    assert [sum(step.values()) for step in found] == [step.duration_ns for step in steps]
    return found


def groups(tables: RankTables) -> list[GroupRow]:
    return by_layer.group_rows(0, tables.windows, tables.collectives, tables.exposure, tables.waits)


def test_precedence_is_compute_then_fsdp_copy_then_comm_then_memcpy_then_idle() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 500)
    trace.label("FSDP::all_gather (a)", 10, 20)
    trace.device("gemm", 100, 110, launch=5)
    trace.device("copy_kernel", 105, 120, launch=12, stream=20)
    trace.device(NCCL, 108, 130, launch=14, stream=24)
    trace.device("Memcpy HtoD (Pinned -> Device)", 100, 140, 6, 30, "gpu_memcpy")
    trace.device("gemm", 150, 160, launch=30)
    assert parts(rank_tables(trace.build())) == [
        {"compute": 20, "fsdp_copy": 10, "exposed_all_gather": 10, "exposed_memcpy": 10, "idle": 10}
    ]


def test_device_copies_inside_labels_are_fsdps_and_memory_sets_are_no_compute() -> None:
    trace = TraceBuilder()
    trace.label("FSDP::all_gather (a)", 10, 20)
    trace.device("Memcpy DtoD (Device -> Device)", 100, 110, 11, 20, "gpu_memcpy")
    trace.device("Memcpy HtoD (Pinned -> Device)", 110, 130, 12, 20, "gpu_memcpy")
    trace.device("Memcpy DtoD (Device -> Device)", 130, 160, 30, 20, "gpu_memcpy")
    trace.device("Memset (Device)", 160, 161, 31, 20, "gpu_memset")
    assert parts(rank_tables(trace.build())) == [{"fsdp_copy": 10, "exposed_memcpy": 51}]


def test_gpu_windows_run_from_first_launched_activity_to_first_launched_activity() -> None:
    trace = TraceBuilder()
    trace.device("queued", 50, 130, launch=None, stream=8)
    trace.label("ProfilerStep#1", 100, 200)
    trace.label("ProfilerStep#2", 205, 300)
    trace.device("gemm", 120, 180, launch=110)
    trace.device("gemm", 190, 260, launch=150)
    trace.device("gemm", 260, 290, launch=210)
    trace.device("gemm", 290, 330, launch=299)
    trace.device("after", 400, 410, launch=350)
    built = trace.build()
    tables = rank_tables(built)
    rows = tables.windows
    assert list(zip(rows.step.tolist(), rows.start_ns.tolist(), rows.end_ns.tolist(), strict=True)) == [
        (1, 120, 260),
        (2, 260, 330),
    ]
    assert parts(tables) == [{"compute": 130 + 0, "idle": 10}, {"compute": 70}]
    whole = rank_tables(built, window="trace")
    assert (whole.windows.start_ns.tolist(), whole.windows.end_ns.tolist()) == ([50], [410])
    assert whole.warnings == []


def test_without_steps_the_whole_trace_is_one_and_says_so() -> None:
    trace = TraceBuilder()
    trace.device("gemm", 120, 180, launch=110)
    tables = rank_tables(trace.build())
    assert tables.windows.step.tolist() == [0]
    assert tables.warnings == ["hand.json: no ProfilerStep#N ranges; the whole trace is taken as one step"]


def test_an_empty_trace_has_no_window() -> None:
    tables = rank_tables(TraceBuilder().build())
    assert len(tables.windows) == 0
    assert tables.warnings == ["hand.json: nothing ran in this trace"]
    assert by_layer.communication(tables.run, tables.windows, tables.exposure).overlap_frac is None


def test_on_cpu_the_operators_of_issuing_threads_compute_that_do_the_work_themselves() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.label("FSDP::pre_forward (a)", 0, 30)
    trace.host("fsdp::all_gather_copy_in", 2, 10)
    trace.host("aten::split_with_sizes_copy", 4, 8)
    trace.host("c10d::_allgather_base_", 10, 12)
    trace.host("gloo:all_gather", 14, 28, "user_annotation", WORKER)
    trace.host("aten::copy_", 15, 20, thread=WORKER)
    trace.host("aten::linear", 40, 60)
    trace.host("aten::addmm", 42, 57)
    trace.host("aten::resolve_conj", 43, 44)
    trace.host("aten::view_as_real", 43, 44)
    trace.host("aten::mul", 61, 69)  # of a DTensor: its arguments are gathered first
    trace.host("c10d::_allgather_base_", 62, 64)
    trace.host("aten::mul", 66, 67)
    trace.host("autograd::engine::evaluate_function: MmBackward0", 70, 80)
    trace.host("aten::mm", 72, 79)
    trace.host("aten::gelu", 95, 105)
    assert parts(rank_tables(trace.build())) == [
        {"compute": 15 + 1 + 7 + 5, "fsdp_copy": 4 + 0, "exposed_all_gather": 14, "idle": 54}
    ]


def test_a_thread_that_sends_and_receives_by_gloo_still_computes() -> None:
    """A pipeline stage: the ranges of its sends lie on the thread that asks, until they are over."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#1", 0, 100)
    trace.label("FSDP::pre_forward (a)", 0, 4)
    trace.host("aten::addmm", 10, 30)
    trace.host("c10d::send", 30, 31)
    trace.host("gloo:send", 31, 60, "user_annotation")
    trace.host("c10d::recv_", 32, 33)
    trace.host("gloo:recv", 33, 50, "user_annotation")
    trace.host("aten::mm", 52, 58)
    trace.host("c10d::_allgather_base_", 70, 71)
    trace.host("gloo:all_gather", 72, 80, "user_annotation", WORKER)
    trace.host("aten::copy_", 74, 79, thread=WORKER)
    (found,) = parts(rank_tables(trace.build()))
    assert found["compute"] == 20 + 6
    assert found["exposed_other_comm"] == 29 - 6
    assert found["exposed_all_gather"] == 8


KINDS = st.sampled_from(["gemm", "fsdp", NCCL, "ncclDevKernel_AllReduce_Sum", "Memcpy HtoD", "Memset"])
ACTIVITY = st.tuples(KINDS, st.integers(0, 80), st.integers(0, 30), st.integers(0, 3), st.integers(-1, 99))
"""Kind, start, duration, stream, launch (-1: not in the file)."""
EXPOSED = {"all_gather": "exposed_all_gather", "all_reduce": "exposed_all_reduce"}


@settings(max_examples=200)
@given(st.lists(ACTIVITY, min_size=1, max_size=12), st.integers(1, 99))
def test_any_timeline_is_accounted_for_like_its_raster(
    activities: list[tuple[str, int, int, int, int]], boundary: int
) -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#0", 0, boundary)
    trace.label("ProfilerStep#1", boundary, 100)
    trace.label("FSDP::all_gather (x)", 100, 101)
    for kind, start, length, stream, launch in activities:
        category = {"Memcpy HtoD": "gpu_memcpy", "Memset": "gpu_memset"}.get(kind, "kernel")
        at = 100 if kind == "fsdp" else None if launch < 0 else launch
        trace.device(kind, start, start + length, at, stream, category)
    tables = rank_tables(trace.build())
    steps = breakdown(tables.parts, tables.windows, tables.collectives, tables.exposure)
    for step in steps:
        expected = dict.fromkeys(asdict(step.breakdown_ns), 0)
        comm = dict.fromkeys(EXPOSED, 0)
        for instant in range(step.start_ns, step.start_ns + step.duration_ns):
            running = [item for item in activities if item[1] <= instant < item[1] + item[2]]
            kinds = {item[0] for item in running}
            if "gemm" in kinds:
                expected["compute"] += 1
            elif "fsdp" in kinds:
                expected["fsdp_copy"] += 1
            elif kinds & {NCCL, "ncclDevKernel_AllReduce_Sum"}:
                comm["all_gather" if NCCL in kinds else "all_reduce"] += 1
            elif kinds & {"Memcpy HtoD", "Memset"}:
                expected["exposed_memcpy"] += 1
            else:
                expected["idle"] += 1
        found = asdict(step.breakdown_ns)
        assert sum(found.values()) == step.duration_ns
        exposed = found["exposed_all_gather"] + found["exposed_all_reduce"]
        assert exposed == sum(comm.values())
        for part in ("compute", "fsdp_copy", "exposed_memcpy", "idle"):
            assert found[part] == expected[part]
        rows = [row for row in groups(tables) if row.step == step.step]
        assert sum(row.exposed_ns for row in rows) == exposed
        assert all(0 <= row.exposed_ns <= row.total_ns for row in rows)
    whole = by_layer.communication(tables.run, tables.windows, tables.exposure)
    assert whole.exposed_ns == sum(row.exposed_ns for row in groups(tables)) <= whole.total_ns
