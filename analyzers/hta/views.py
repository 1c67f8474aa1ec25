"""Critical path, launch statistics, idle causes and trace diff, by HolisticTraceAnalysis on our tables.

HTA (MIT licence; pandas below 3) is imported when one of these is called. Its data comes from
:mod:`fsdp2prof.analyzers.hta.frames`; all times here are integer nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from fsdp2prof.analyzers.hta.frames import RANK, calling_hta, event_rows, hta_trace
from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.errors import TraceError
from fsdp2prof.tables import Trace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CriticalPath", "Device", "critical_path", "idle_causes", "launch_statistics", "trace_diff"]

Device: TypeAlias = Literal["all", "host", "gpu"]

CONSECUTIVE_KERNEL_DELAY_NS = 30_000
"""A shorter gap between kernels is the cost of launching them, not a wait: HTA's default of 30 us."""

_BOUNDS = {
    "cpu_bound": "host",
    "gpu_compute_bound": "compute",
    "gpu_communication_bound": "communication",
    "gpu_kernel_kernel_overhead": "between_kernels",
    "gpu_kernel_launch_overhead": "launch_delay",
}
"""HTA's names of what bounds a segment of the critical path, and ours."""


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The longest chain of dependent work in one step."""

    step: int | None
    """None: the whole trace."""
    duration_ns: int
    """Sum of its segments."""
    bound_by_ns: dict[str, int]
    """Time by what bounds it: host, compute, communication, between_kernels, launch_delay; sums to it."""
    segments: pd.DataFrame
    """name, bound_by, duration_ns, count, longest first; ``(launch)``: the way from a call to its kernel."""
    warnings: tuple[str, ...]


def critical_path(trace: Trace, step: int | None = None) -> CriticalPath:
    """Find the critical path of a step, by default the middle one (the first one often lacks events).

    Raises ``TraceError`` for a CPU trace, a step that is not there, or a trace HTA cannot order.
    """
    _need_gpu(trace, "critical path")
    number = _choose_step(trace, step)
    with calling_hta("critical path", trace):
        from hta.analyzers.critical_path_analysis import CriticalPathAnalysis

        annotation = "" if number is None else f"ProfilerStep#{number}"
        graph, complete = CriticalPathAnalysis.critical_path_analysis(hta_trace(trace), RANK, annotation, 0)
        if not complete:
            raise ValueError("its events depend on each other in a circle")
        edges = graph.get_critical_path_breakdown()
    edges = edges[edges["duration"] > 0]
    names = np.asarray([*trace.events.name.to_list(), "(launch)"])
    edges = edges.assign(bound_by=edges["bound_by"].map(_BOUNDS), name=names[event_rows(edges["event_idx"])])
    totals = edges.groupby("bound_by")["duration"].sum()
    segments = (
        edges.groupby(["name", "bound_by"])["duration"]
        .agg(["sum", "count"])
        .rename(columns={"sum": "duration_ns"})
        .sort_values("duration_ns", ascending=False, kind="stable")
        .reset_index()
    )
    return CriticalPath(
        step=number,
        duration_ns=int(edges["duration"].sum()),
        bound_by_ns={name: int(totals.get(name, 0)) for name in _BOUNDS.values()},
        segments=segments[["name", "bound_by", "duration_ns", "count"]],
        warnings=_sync_warnings(trace),
    )


def launch_statistics(trace: Trace) -> pd.DataFrame:
    """Return every launch with its kernel or copy: how long the call took, the work, and the delay between.

    Columns: correlation, host_ns, device_ns, delay_ns (from the end of the call to the start of the work, 0
    if it started earlier). Work without a launch in the file is not there. Raises ``TraceError`` for a CPU
    trace.
    """
    _need_gpu(trace, "launch statistics")
    with calling_hta("launch statistics", trace):
        from hta.analyzers.cuda_kernel_analysis import CudaKernelAnalysis

        built = hta_trace(trace)
        table = CudaKernelAnalysis.cuda_kernel_launch_stats(built, [RANK], visualize=False)[RANK]
    names = {"cpu_duration": "host_ns", "gpu_duration": "device_ns", "launch_delay": "delay_ns"}
    return table.rename(columns=names).reset_index(drop=True)


def idle_causes(trace: Trace, consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS) -> pd.DataFrame:
    """Return the idle time of every stream by its cause.

    Columns: stream, cause, idle_ns, idle_frac (of the stream's idle time). ``host_wait``: the host had not
    launched the next kernel yet; ``kernel_wait``: a gap below ``consecutive_kernel_delay_ns``; ``other``:
    mostly waiting for another stream. Raises ``TraceError`` for a CPU trace.
    """
    _need_gpu(trace, "idle causes")
    with calling_hta("idle causes", trace):
        from hta.analyzers.breakdown_analysis import BreakdownAnalysis

        table, _ = BreakdownAnalysis.get_idle_time_breakdown(
            hta_trace(trace), consecutive_kernel_delay_ns, RANK, None, visualize=False, visualize_pctg=False
        )
    total = table.groupby("stream")["idle_time"].transform("sum")
    return table.assign(
        cause=table["idle_category"],
        idle_ns=table["idle_time"].astype(np.int64),
        idle_frac=(table["idle_time"] / total.where(total > 0)).astype(float),
    )[["stream", "cause", "idle_ns", "idle_frac"]].reset_index(drop=True)


def trace_diff(
    control: Trace,
    test: Trace,
    *,
    control_step: int | None = None,
    test_step: int | None = None,
    device: Device = "all",
) -> pd.DataFrame:
    """Compare operators and kernels by name between a step of two traces, by default the middle ones.

    Columns: name, control_count, test_count, control_ns, test_ns, diff_count, diff_ns (test - control),
    largest difference first. Raises ``TraceError`` for a step that is not there.
    """
    steps = (_choose_step(control, control_step), _choose_step(test, test_step))
    with calling_hta("trace diff", test):
        from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

        kind = {"all": DeviceType.ALL, "host": DeviceType.CPU, "gpu": DeviceType.GPU}[device]
        table = TraceDiff.compare_traces(
            LabeledTrace(label="control", t=hta_trace(control, cuda_names=False)),
            LabeledTrace(label="test", t=hta_trace(test, cuda_names=False)),
            control_iteration=steps[0] or 0,
            test_iteration=steps[1] or 0,
            device_type=kind,
        )
    table = table.rename_axis("name").reset_index()
    columns = {
        "control_counts": "control_count",
        "test_counts": "test_count",
        "control_total_duration": "control_ns",
        "test_total_duration": "test_ns",
        "diff_counts": "diff_count",
        "diff_duration": "diff_ns",
    }
    table = table.astype(dict.fromkeys(columns, np.int64)).rename(columns=columns)
    order = table["diff_ns"].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[order, ["name", *columns.values()]].reset_index(drop=True)


def _need_gpu(trace: Trace, what: str) -> None:
    if trace.device.type == "cpu":
        raise TraceError(f"{trace.source}: a CPU trace has no {what}: record on a GPU")


def _choose_step(trace: Trace, step: int | None) -> int | None:
    """The step asked for, else the middle one; None in a trace without steps."""
    steps = host_steps(trace.labels).step.tolist()
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise TraceError(f"{trace.source}: no step {step} in it; it has {known}")
    return step if step is not None else steps[len(steps) // 2] if steps else None


def _sync_warnings(trace: Trace) -> tuple[str, ...]:
    if "cuda_sync" in trace.events.category.values:
        return ()
    return (
        f"{trace.source}: holds no CUDA synchronisation events, so waits between streams are not on the "
        "path; record with the profiler's experimental option enable_cuda_sync_events",
    )
