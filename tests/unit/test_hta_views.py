"""HTA's analyses on our tables: small traces with known answers, and real ones against plain arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics, trace_diff
from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.results.hta import LaunchedWork, NameChange, StreamUse
from fsdp2prof.tables.trace import Trace

A100 = "traces/ddp2-a100-rank0/nccl_data.json.gz"
MI300 = "traces/ddp4-mi300/rank0.json.gz"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")


def host(name: str, start: float, end: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    times = {"ts": 5e9 + start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, **times, "args": args}


def gpu(
    name: str, start: float, end: float, stream: int, correlation: int, cat: str = "kernel"
) -> dict[str, Any]:
    return host(name, start, end, cat, stream=stream, device=0, correlation=correlation)


def launch(start: float, end: float, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return host(name, start, end, "cuda_runtime", correlation=correlation)


def trace_of(tmp_path: Path, events: list[dict[str, Any]]) -> Trace:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def two_kernels(
    launch_name: str = "cudaLaunchKernel", sync: str = "cudaDeviceSynchronize"
) -> list[dict[str, Any]]:
    """One op launches two kernels and waits: 10 us of host, a launch delay of 5, 200 + 20 + 300 of GPU."""
    return [
        host("ProfilerStep#3", 0, 1000, "user_annotation"),
        host("aten::op", 1, 900),
        launch(5, 10, 1, launch_name),
        launch(20, 25, 2, launch_name),
        host(sync, 30, 800, "cuda_runtime", correlation=3),
        gpu("first_kernel", 15, 215, 7, 1),
        gpu("second_kernel", 235.5, 535.5, 7, 2),
        host("Context Sync", 31, 536, "cuda_sync", stream=-1, device=0, correlation=3),
    ]


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_launches_are_exact_on_cuda_and_rocm(tmp_path: Path, prefix: str) -> None:
    found = launch_statistics(trace_of(tmp_path, two_kernels(f"{prefix}LaunchKernel")))
    assert [(row.correlation, row.name) for row in found.rows] == [(2, "second_kernel"), (1, "first_kernel")]
    assert [(row.host_ns, row.device_ns) for row in found.rows] == [(5000, 300_000), (5000, 200_000)]
    assert [row.delay_ns for row in found.rows] == [210_500, 5000]


def test_launches_are_summed_by_the_name_of_their_work(tmp_path: Path) -> None:
    """Two more launches of first_kernel: 1 us of work 3 us after its call, and 7 us of work 1 us after."""
    more = [
        launch(600, 605, 9),
        gpu("first_kernel", 608, 609, 7, 9),
        launch(620, 623, 10),
        gpu("first_kernel", 624, 631, 7, 10),
    ]
    found = launch_statistics(trace_of(tmp_path, [*two_kernels(), *more]))
    assert found.by_name == [
        LaunchedWork(
            name="second_kernel",
            count=1,
            host_ns=5000,
            device_ns=300_000,
            delay_ns=210_500,
            delay_max_ns=210_500,
        ),
        LaunchedWork(
            name="first_kernel",
            count=3,
            host_ns=13_000,
            device_ns=208_000,
            delay_ns=9000,
            delay_max_ns=5000,
        ),
    ]
    assert (found.host_median_ns, found.device_median_ns, found.delay_median_ns) == (5000, 103_500, 4000)
    assert found.short_count == 1
    assert "1 of 4 launches (25.0%)" in found.verdict[1]


def test_idle_time_by_cause(tmp_path: Path) -> None:
    events = [
        *two_kernels(),
        launch(600, 605, 9),
        gpu("late_kernel", 610, 620, 7, 9),
        launch(606, 609, 10),
        gpu("waiting_kernel", 700, 710, 7, 10),
    ]
    found = idle_causes(trace_of(tmp_path, events))
    by_cause = {row.cause: row.idle_ns for row in found.rows}
    assert {row.stream for row in found.rows} == {7}
    assert by_cause == {"kernel_wait": 20_500, "host_wait": 74_500, "other": 80_000}
    assert sum(row.idle_frac or 0 for row in found.rows) == pytest.approx(1)
    assert found.streams == [
        StreamUse(stream=7, busy_ns=520_000, idle_ns=175_000, idle_frac=175 / (520 + 175))
    ]
    assert found.verdict == [
        "Stream 7, the busiest, has work for 520.0 us and is idle for 175.0 us (25.2%).",
        "45.7% of its idle time: mostly waiting for another stream.",
    ]
    stricter = {row.cause: row.idle_ns for row in idle_causes(trace_of(tmp_path, events), 10_000).rows}
    assert stricter["other"] == 100_500


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_the_critical_path_of_a_gpu_bound_step(tmp_path: Path, prefix: str) -> None:
    events = two_kernels(f"{prefix}LaunchKernel", f"{prefix}DeviceSynchronize")
    path = critical_path(trace_of(tmp_path, events))
    assert (path.step, path.step_ns) == (3, 1_000_000)
    assert path.warnings == []
    kernels = {row.name: row.duration_ns for row in path.rows if row.bound_by == "compute"}
    assert kernels == {"first_kernel": 200_000, "second_kernel": 300_000}
    assert path.bound_by_ns.between_kernels == 20_500
    assert path.bound_by_ns.launch_delay == 10_000
    assert path.bound_by_ns.communication == 0
    assert sum(asdict(path.bound_by_ns).values()) == path.duration_ns == sum(r.duration_ns for r in path.rows)
    assert sum(row.duration_frac for row in path.rows) == pytest.approx(1)
    assert path.duration_ns <= 1_000_000
    assert "compute." in path.verdict[0]
    assert "`second_kernel` (compute): 300.0 us in 1 segment" in path.verdict[1]


def test_the_critical_path_says_when_synchronisations_are_missing(tmp_path: Path) -> None:
    events = [event for event in two_kernels() if event["cat"] != "cuda_sync"]
    (warning,) = critical_path(trace_of(tmp_path, events)).warnings
    assert "no CUDA synchronization events" in warning


def test_a_diff_counts_and_times_by_name(tmp_path: Path) -> None:
    control = trace_of(tmp_path, two_kernels())
    changed = [event for event in two_kernels() if event["name"] != "first_kernel"]
    test = trace_of(
        tmp_path,
        [*changed, host("aten::new", 910, 950), host("ProfilerStep#4", 1000, 1100, "user_annotation")],
    )
    found = trace_diff(control, test, test_step=3)
    rows = {row.name: row for row in found.rows}
    assert found.rows[0] == NameChange(
        name="first_kernel",
        where="device",
        control_count=1,
        test_count=0,
        control_ns=200_000,
        test_ns=0,
        diff_count=-1,
        diff_ns=-200_000,
    )
    assert (rows["aten::new"].diff_count, rows["aten::new"].diff_ns) == (1, 40_000)
    assert rows["aten::new"].where == "host"
    assert rows["second_kernel"].diff_ns == 0
    only_gpu = trace_diff(control, test, test_step=3, device="gpu")
    assert {row.name for row in only_gpu.rows} == {"first_kernel", "second_kernel"}


def test_a_diff_of_steps_says_how_the_step_changed_and_names_no_step_label(tmp_path: Path) -> None:
    """Step 3 takes 1,000 us before and 1,500 us as step 4 after; only aten::op differs, by 100 us."""
    control = trace_of(tmp_path, two_kernels())
    longer = {"ProfilerStep#3": ("ProfilerStep#4", 1500), "aten::op": ("aten::op", 999)}
    test = trace_of(
        tmp_path,
        [
            {**event, "name": longer[event["name"]][0], "dur": longer[event["name"]][1]}
            if event["name"] in longer
            else event
            for event in two_kernels()
        ],
    )
    found = trace_diff(control, test)
    assert (found.control_step, found.step) == (3, 4)
    assert (found.control_step_ns, found.step_ns) == (1_000_000, 1_500_000)
    assert [row.name for row in found.rows if row.diff_ns or row.diff_count] == ["aten::op"]
    assert found.verdict == [
        "The step takes 1.50 ms, 500.0 us longer than 1.00 ms.",
        "On the host `aten::op` changed most: 100.0 us more (calls: 1 before, 1 after).",
    ]


def test_a_diff_works_without_a_gpu_and_without_steps(tmp_path: Path) -> None:
    control = trace_of(tmp_path, [host("aten::mm", 0, 10), host("aten::mm", 20, 25)])
    test = trace_of(tmp_path, [host("aten::mm", 0, 10)])
    (row,) = trace_diff(control, test).rows
    assert (row.name, row.where, row.diff_count, row.diff_ns) == ("aten::mm", "host", -1, -5000)


@pytest.mark.parametrize("view", [critical_path, launch_statistics, idle_causes])
def test_cpu_traces_are_refused_in_one_line(tmp_path: Path, view: Any) -> None:
    trace = trace_of(
        tmp_path, [host("ProfilerStep#1", 0, 10, "user_annotation"), host("gloo:all_gather", 1, 2)]
    )
    with pytest.raises(TraceError, match="CPU trace") as caught:
        view(trace)
    assert "\n" not in str(caught.value)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no step 9 in it; it has 3"):
        critical_path(trace_of(tmp_path, two_kernels()), step=9)


def test_what_hta_cannot_compute_is_one_line(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event for event in two_kernels() if event["cat"] == "cuda_runtime"])
    with pytest.raises(TraceError, match="HTA cannot compute the idle causes") as caught:
        idle_causes(trace)
    assert "\n" not in str(caught.value)


@pytest.mark.real_data
def test_launches_of_a_real_trace_against_plain_arithmetic(real_data: Path) -> None:
    trace = read_trace(real_data / A100)
    rows = sorted(launch_statistics(trace).rows, key=lambda row: row.correlation)
    events = trace.events.to_pandas()
    calls = events[events["name"].isin(LAUNCHES)].set_index("correlation")
    work = events[events["device"] >= 0].set_index("correlation")
    work = work[work.index.isin(calls.index)].sort_index()
    calls = calls.loc[work.index]
    assert len(rows) == 3774
    assert [row.correlation for row in rows] == work.index.tolist()
    assert [row.name for row in rows] == work["name"].tolist()
    assert [row.device_ns for row in rows] == (work["end_ns"] - work["start_ns"]).tolist()
    assert [row.host_ns for row in rows] == (calls["end_ns"] - calls["start_ns"]).tolist()
    assert [row.delay_ns for row in rows] == np.maximum(work["start_ns"] - calls["end_ns"], 0).tolist()


@pytest.mark.real_data
def test_launches_of_a_rocm_trace_are_found(real_data: Path) -> None:
    trace = read_trace(real_data / MI300)
    events = trace.events.to_pandas()
    calls = events[
        events["name"].isin(["hipLaunchKernel", "hipExtModuleLaunchKernel", "hipMemcpyWithStream"])
    ]
    work = events[(events["device"] >= 0) & events["correlation"].isin(calls["correlation"])]
    assert len(launch_statistics(trace).rows) >= len(work) > 2000


@pytest.mark.real_data
@pytest.mark.parametrize("name", [A100, MI300])
def test_idle_time_of_a_real_trace_is_all_the_time_between_its_kernels(real_data: Path, name: str) -> None:
    trace = read_trace(real_data / name)
    events = trace.events.to_pandas()
    work = events[events["category"].isin(["kernel", "gpu_memcpy", "gpu_memset"])]
    found = idle_causes(trace)
    idle = {use.stream: use.idle_ns for use in found.streams}
    assert set(idle) == set(work["stream"])
    for use in found.streams:
        own = work[work["stream"] == use.stream]
        assert use.busy_ns + use.idle_ns == own["end_ns"].max() - own["start_ns"].min()
        assert use.idle_ns == sum(row.idle_ns for row in found.rows if row.stream == use.stream)
    for stream, rows in work.groupby("stream"):
        busy_until = rows["end_ns"].cummax().shift()
        gaps = (rows["start_ns"] - busy_until).clip(lower=0).sum()
        assert idle[stream] == gaps


@pytest.mark.real_data
def test_the_critical_path_of_a_real_step_fits_into_it(real_data: Path) -> None:
    trace = read_trace(real_data / A100)
    path = critical_path(trace, step=5)
    begin = trace.labels.start_ns[trace.labels.name.equals("ProfilerStep#5")][0]
    last = trace.events.end_ns.max()
    assert 0 < path.duration_ns <= last - begin
    assert sum(asdict(path.bound_by_ns).values()) == path.duration_ns
    assert path.bound_by_ns.host > path.duration_ns // 2


def test_hta_and_pandas_are_imported_only_when_used() -> None:
    code = (
        "import sys, fsdp2prof.analyzers.hta.views; assert not {'hta', 'pandas', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
