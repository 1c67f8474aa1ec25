"""HTA's analyses on our tables: small traces with known answers, and real ones against plain arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics, trace_diff
from fsdp2prof.errors import TraceError
from fsdp2prof.readers.chrome_trace import read_trace
from fsdp2prof.tables import Trace

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
    table = launch_statistics(trace_of(tmp_path, two_kernels(f"{prefix}LaunchKernel")))
    assert table["correlation"].tolist() == [1, 2]
    assert table["host_ns"].tolist() == [5000, 5000]
    assert table["device_ns"].tolist() == [200_000, 300_000]
    assert table["delay_ns"].tolist() == [5000, 210_500]


def test_idle_time_by_cause(tmp_path: Path) -> None:
    events = [
        *two_kernels(),
        launch(600, 605, 9),
        gpu("late_kernel", 610, 620, 7, 9),
        launch(606, 609, 10),
        gpu("waiting_kernel", 700, 710, 7, 10),
    ]
    table = idle_causes(trace_of(tmp_path, events)).set_index("cause")
    assert set(table["stream"]) == {7}
    assert table["idle_ns"].to_dict() == {"kernel_wait": 20_500, "host_wait": 74_500, "other": 80_000}
    assert table["idle_frac"].sum() == pytest.approx(1)
    assert idle_causes(trace_of(tmp_path, events), 10_000).set_index("cause")["idle_ns"]["other"] == 100_500


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_the_critical_path_of_a_gpu_bound_step(tmp_path: Path, prefix: str) -> None:
    events = two_kernels(f"{prefix}LaunchKernel", f"{prefix}DeviceSynchronize")
    path = critical_path(trace_of(tmp_path, events))
    assert path.step == 3
    assert path.warnings == ()
    kernels = path.segments[path.segments["bound_by"] == "compute"].set_index("name")["duration_ns"]
    assert kernels.to_dict() == {"first_kernel": 200_000, "second_kernel": 300_000}
    assert path.bound_by_ns["between_kernels"] == 20_500
    assert path.bound_by_ns["launch_delay"] == 10_000
    assert path.bound_by_ns["communication"] == 0
    assert sum(path.bound_by_ns.values()) == path.duration_ns == path.segments["duration_ns"].sum()
    assert path.duration_ns <= 1_000_000
    assert not set(path.segments["name"]) & {"cudaLaunchKernel"} or prefix == "cuda"


def test_the_critical_path_says_when_synchronisations_are_missing(tmp_path: Path) -> None:
    events = [event for event in two_kernels() if event["cat"] != "cuda_sync"]
    (warning,) = critical_path(trace_of(tmp_path, events)).warnings
    assert "no CUDA synchronisation events" in warning


def test_a_diff_counts_and_times_by_name(tmp_path: Path) -> None:
    control = trace_of(tmp_path, two_kernels())
    changed = [event for event in two_kernels() if event["name"] != "first_kernel"]
    test = trace_of(
        tmp_path,
        [*changed, host("aten::new", 910, 950), host("ProfilerStep#4", 1000, 1100, "user_annotation")],
    )
    table = trace_diff(control, test, test_step=3).set_index("name")
    assert table.loc["first_kernel"].to_dict() == {
        "control_count": 1,
        "test_count": 0,
        "control_ns": 200_000,
        "test_ns": 0,
        "diff_count": -1,
        "diff_ns": -200_000,
    }
    assert table.loc["aten::new", ["diff_count", "diff_ns"]].tolist() == [1, 40_000]
    assert table.loc["second_kernel", "diff_ns"] == 0
    assert table.index[0] == "first_kernel"
    only_gpu = trace_diff(control, test, test_step=3, device="gpu")
    assert set(only_gpu["name"]) <= {"first_kernel", "second_kernel", "Context Sync"}


def test_a_diff_works_without_a_gpu_and_without_steps(tmp_path: Path) -> None:
    control = trace_of(tmp_path, [host("aten::mm", 0, 10), host("aten::mm", 20, 25)])
    test = trace_of(tmp_path, [host("aten::mm", 0, 10)])
    (row,) = trace_diff(control, test).to_dict("records")
    assert (row["name"], row["diff_count"], row["diff_ns"]) == ("aten::mm", -1, -5000)


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
    table = launch_statistics(trace).sort_values("correlation").reset_index(drop=True)
    events = trace.events.to_pandas()
    calls = events[events["name"].isin(LAUNCHES)].set_index("correlation")
    work = events[events["device"] >= 0].set_index("correlation")
    work = work[work.index.isin(calls.index)].sort_index()
    calls = calls.loc[work.index]
    assert len(table) == 3774
    assert table["correlation"].tolist() == work.index.tolist()
    assert table["device_ns"].tolist() == (work["end_ns"] - work["start_ns"]).tolist()
    assert table["host_ns"].tolist() == (calls["end_ns"] - calls["start_ns"]).tolist()
    assert table["delay_ns"].tolist() == np.maximum(work["start_ns"] - calls["end_ns"], 0).tolist()


@pytest.mark.real_data
def test_launches_of_a_rocm_trace_are_found(real_data: Path) -> None:
    trace = read_trace(real_data / MI300)
    events = trace.events.to_pandas()
    calls = events[
        events["name"].isin(["hipLaunchKernel", "hipExtModuleLaunchKernel", "hipMemcpyWithStream"])
    ]
    work = events[(events["device"] >= 0) & events["correlation"].isin(calls["correlation"])]
    assert len(launch_statistics(trace)) >= len(work) > 2000


@pytest.mark.real_data
@pytest.mark.parametrize("name", [A100, MI300])
def test_idle_time_of_a_real_trace_is_all_the_time_between_its_kernels(real_data: Path, name: str) -> None:
    trace = read_trace(real_data / name)
    events = trace.events.to_pandas()
    work = events[events["category"].isin(["kernel", "gpu_memcpy", "gpu_memset"])]
    idle = idle_causes(trace).groupby("stream")["idle_ns"].sum()
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
    assert sum(path.bound_by_ns.values()) == path.duration_ns
    assert path.bound_by_ns["host"] > path.duration_ns // 2


def test_hta_and_pandas_are_imported_only_when_used() -> None:
    code = (
        "import sys, fsdp2prof.analyzers.hta.views; assert not {'hta', 'pandas', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
