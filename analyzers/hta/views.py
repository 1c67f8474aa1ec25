"""HolisticTraceAnalysis's views of a trace: critical path, idle causes, launch statistics, trace diff."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.hta.frames import RANK, calling_hta, choose_step, event_rows, hta_trace, need_device
from fsdp2prof.backends import kernel_name
from fsdp2prof.by_key import grouped
from fsdp2prof.results.hta import (
    BoundByNs,
    CriticalPath,
    IdleCauses,
    Launch,
    LaunchedWork,
    LaunchStatistics,
    NameChange,
    PathSegment,
    StreamIdle,
    StreamUse,
    TraceDiff,
)
from fsdp2prof.tables.trace import Trace
from fsdp2prof.units import format_count, format_frac, format_ns, plural
from fsdp2prof.vocabulary import PATH_BOUNDS, STREAM_IDLE_CAUSES

if TYPE_CHECKING:
    import pandas as pd

_BOUNDS = {
    "cpu_bound": "host",
    "gpu_compute_bound": "compute",
    "gpu_communication_bound": "communication",
    "gpu_kernel_kernel_overhead": "between_kernels",
    "gpu_kernel_launch_overhead": "launch_delay",
}
"""HTA's names of the bounds of critical path segments -> ours."""

_REMEDIES = {
    "host": "Reduce host work to shorten this step: fewer and larger operators (torch.compile, "
    "CUDA graphs, a fused optimizer).",
    "compute": "Use faster kernels to shorten this step: larger ones, lower precision, less recomputation.",
    "communication": "Start communication earlier or make it faster to shorten this step: prefetch, keep "
    "parameters gathered, or shard within a node.",
    "between_kernels": "The device waits between kernels: fuse small ones, and check the launches with "
    "--launch-statistics.",
    "launch_delay": "Kernels start long after their launch: check the launches with --launch-statistics.",
}


def critical_path(trace: Trace, step: int | None = None) -> CriticalPath:
    """Find the critical path of a step, by default the middle one.

    Raises ``TraceError`` for a CPU trace, an unknown step, or a trace that HTA cannot order.
    """
    need_device(trace, "critical path")
    number, step_ns = choose_step(trace, step)
    with calling_hta("critical path", trace):
        from hta.analyzers.critical_path_analysis import CriticalPathAnalysis

        annotation = "" if number is None else f"ProfilerStep#{number}"
        graph, complete = CriticalPathAnalysis.critical_path_analysis(hta_trace(trace), RANK, annotation, 0)
        if not complete:
            raise ValueError("its events form a dependency cycle")
        edges = graph.get_critical_path_breakdown()
    edges = edges[edges["duration"] > 0]
    names = np.asarray([*trace.events.name.to_list(), "(launch)"])
    edges = edges.assign(bound_by=edges["bound_by"].map(_BOUNDS), name=names[event_rows(edges["event_idx"])])
    totals = edges.groupby("bound_by")["duration"].sum()
    bounds = BoundByNs(**{name: int(totals.get(name, 0)) for name in _BOUNDS.values()})
    rows = _segments(edges)
    duration = sum(row.duration_ns for row in rows)
    return CriticalPath(
        rank=trace.rank,
        source=trace.source,
        step=number,
        step_ns=step_ns,
        duration_ns=duration,
        bound_by_ns=bounds,
        rows=rows,
        verdict=_path_verdict(number, step_ns, duration, bounds, rows),
        warnings=_sync_warnings(trace),
    )


def _segments(edges: pd.DataFrame) -> list[PathSegment]:
    total = int(edges["duration"].sum())
    sums = (
        edges.groupby(["name", "bound_by"])["duration"]
        .agg(["sum", "count"])
        .sort_values("sum", ascending=False, kind="stable")
        .reset_index()
    )
    return [
        PathSegment(
            name=name, bound_by=bound, duration_ns=duration, count=count, duration_frac=duration / total
        )
        for name, bound, duration, count in zip(
            *(sums[column].tolist() for column in ("name", "bound_by", "sum", "count")), strict=True
        )
    ]


def _path_verdict(
    step: int | None, step_ns: int | None, duration: int, bounds: BoundByNs, rows: list[PathSegment]
) -> list[str]:
    if not rows:
        return ["The critical path has no event with a duration."]
    bound, time = max(asdict(bounds).items(), key=lambda item: item[1])
    whole = "" if step is None or step_ns is None else f" of step {step}, which lasts {format_ns(step_ns)},"
    first = rows[0]
    return [
        f"The critical path{whole} is {format_ns(duration)} long: "
        f"{format_frac(time / duration)} of it is {PATH_BOUNDS[bound].label}.",
        f"The longest part is `{kernel_name(first.name)}` ({PATH_BOUNDS[first.bound_by].label}): "
        f"{format_ns(first.duration_ns)} in {plural(first.count, 'segment')}.",
        _REMEDIES[bound],
    ]


def _sync_warnings(trace: Trace) -> list[str]:
    if "cuda_sync" in trace.events.category.values:
        return []
    return [
        f"{trace.source}: has no CUDA synchronization events, so waits between streams are not on the "
        "path; record with the profiler's experimental option enable_cuda_sync_events"
    ]


CONSECUTIVE_KERNEL_DELAY_NS = 30_000
"""A shorter gap between kernels is the cost of launching them, not a wait: HTA's default of 30 us."""


def idle_causes(trace: Trace, consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS) -> IdleCauses:
    """Return the idle time of every stream by its cause, from its first to its last activity.

    Raises ``TraceError`` for a CPU trace.
    """
    need_device(trace, "idle causes")
    with calling_hta("idle causes", trace):
        from hta.analyzers.breakdown_analysis import BreakdownAnalysis

        table, _ = BreakdownAnalysis.get_idle_time_breakdown(
            hta_trace(trace), consecutive_kernel_delay_ns, RANK, None, visualize=False, visualize_pctg=False
        )
    found = [
        (int(stream), str(cause), int(idle))
        for stream, cause, idle in zip(
            *(table[name].tolist() for name in ("stream", "idle_category", "idle_time")), strict=True
        )
    ]
    totals: dict[int, int] = {}
    for stream, _, idle in found:
        totals[stream] = totals.get(stream, 0) + idle
    rows = [
        StreamIdle(stream=stream, cause=cause, idle_ns=idle, idle_frac=_share(idle, totals[stream]))
        for stream, cause, idle in found
    ]
    rows.sort(key=lambda row: (row.stream, -row.idle_ns))
    streams = _streams(trace, totals)
    return IdleCauses(
        rank=trace.rank,
        source=trace.source,
        rows=rows,
        streams=streams,
        verdict=_idle_verdict(rows, streams),
        warnings=[],
    )


def _streams(trace: Trace, idle: dict[int, int]) -> list[StreamUse]:
    events = trace.events
    work = np.flatnonzero(events.category.matches(backends.is_work))
    uses = []
    for stream, idle_ns in idle.items():
        own = work[events.stream[work] == stream]
        busy = intervals.total(intervals.union(events.start_ns[own], events.end_ns[own]))
        uses.append(
            StreamUse(stream=stream, busy_ns=busy, idle_ns=idle_ns, idle_frac=_share(idle_ns, busy + idle_ns))
        )
    return sorted(uses, key=lambda use: (-use.busy_ns, use.stream))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _idle_verdict(rows: Sequence[StreamIdle], streams: Sequence[StreamUse]) -> list[str]:
    if not streams:
        return ["No stream has idle time between its activities."]
    busiest = streams[0]
    first = (
        f"Stream {busiest.stream}, the busiest, has work for {format_ns(busiest.busy_ns)} "
        f"and is idle for {format_ns(busiest.idle_ns)} ({format_frac(busiest.idle_frac)})."
    )
    cause = next((row for row in rows if row.stream == busiest.stream and row.idle_ns), None)
    if cause is None:
        return [first]
    why = STREAM_IDLE_CAUSES[cause.cause].label if cause.cause in STREAM_IDLE_CAUSES else cause.cause
    return [first, f"{format_frac(cause.idle_frac)} of its idle time: {why}."]


_MANY = 0.5
"""Share of launches with short work from which the advice is to reduce host work."""


def launch_statistics(trace: Trace) -> LaunchStatistics:
    """Return every launch whose call and work are both in the file.

    Raises ``TraceError`` for a CPU trace.
    """
    need_device(trace, "launch statistics")
    with calling_hta("launch statistics", trace):
        from hta.analyzers.cuda_kernel_analysis import CudaKernelAnalysis

        built = hta_trace(trace)
        table = CudaKernelAnalysis.cuda_kernel_launch_stats(built, [RANK], visualize=False)[RANK]
    names = _work_names(trace)
    columns = ("correlation", "cpu_duration", "gpu_duration", "launch_delay")
    rows = [
        Launch(correlation=number, host_ns=host, device_ns=device, delay_ns=delay, name=names[number])
        for number, host, device, delay in zip(*(table[name].tolist() for name in columns), strict=True)
    ]
    rows.sort(key=lambda row: -row.delay_ns)
    short = sum(row.device_ns < row.host_ns for row in rows)
    return LaunchStatistics(
        rank=trace.rank,
        source=trace.source,
        rows=rows,
        by_name=_by_name(rows),
        host_median_ns=_median([row.host_ns for row in rows]),
        device_median_ns=_median([row.device_ns for row in rows]),
        delay_median_ns=_median([row.delay_ns for row in rows]),
        short_count=short,
        verdict=_launch_verdict(rows, short),
        warnings=[],
    )


def _work_names(trace: Trace) -> dict[int, str]:
    """Name of the device work of each correlation id."""
    events = trace.events
    rows = np.flatnonzero(events.category.matches(backends.is_work))
    names = events.name.take(rows).to_list()
    return {number: name or "" for number, name in zip(events.correlation[rows].tolist(), names, strict=True)}


def _by_name(rows: Sequence[Launch]) -> list[LaunchedWork]:
    alike = grouped((row.name, row) for row in rows)
    works = [
        LaunchedWork(
            name=name,
            count=len(same),
            host_ns=sum(row.host_ns for row in same),
            device_ns=sum(row.device_ns for row in same),
            delay_ns=sum(row.delay_ns for row in same),
            delay_max_ns=max(row.delay_ns for row in same),
        )
        for name, same in alike.items()
    ]
    return sorted(works, key=lambda work: (-work.delay_ns, work.name))


def _median(values: Sequence[int]) -> float | None:
    return median(values) if values else None


def _launch_verdict(rows: Sequence[Launch], short: int) -> list[str]:
    if not rows:
        return ["No launch has both its host call and its device work in this trace."]
    host, device, delay = (
        format_ns(median(values))
        for values in zip(*((row.host_ns, row.device_ns, row.delay_ns) for row in rows), strict=True)
    )
    share = short / len(rows)
    return [
        f"A launch takes {host} on the host, its work starts {delay} later and runs for {device} (medians).",
        f"The work of {format_count(short)} of {format_count(len(rows))} launches ({format_frac(share)}) is "
        "shorter than the call that launched it"
        + (": fuse small kernels (torch.compile) or replay them (CUDA graphs)." if share > _MANY else "."),
    ]


Device: TypeAlias = Literal["all", "host", "gpu"]

_STEP = re.compile(r"ProfilerStep#\d+")
"""The steps' own labels differ in their number only: they are identified by their contents."""

_COLUMNS = (
    "control_counts",
    "test_counts",
    "control_total_duration",
    "test_total_duration",
    "diff_counts",
    "diff_duration",
)


def trace_diff(
    control: Trace,
    test: Trace,
    *,
    control_step: int | None = None,
    test_step: int | None = None,
    device: Device = "all",
) -> TraceDiff:
    """Compare operators and kernels by name between a step of two traces, by default the middle ones.

    Raises ``TraceError`` for a step that is not there.
    """
    before, before_ns = choose_step(control, control_step)
    after, after_ns = choose_step(test, test_step)
    with calling_hta("trace diff", test):
        from hta.trace_diff import DeviceType, LabeledTrace
        from hta.trace_diff import TraceDiff as HtaDiff

        kind = {"all": DeviceType.ALL, "host": DeviceType.CPU, "gpu": DeviceType.GPU}[device]
        table = HtaDiff.compare_traces(
            LabeledTrace(label="control", t=hta_trace(control, cuda_names=False)),
            LabeledTrace(label="test", t=hta_trace(test, cuda_names=False)),
            control_iteration=before or 0,
            test_iteration=after or 0,
            device_type=kind,
        )
    on_device = _device_names(control) | _device_names(test)
    numbers = zip(*(table[column].tolist() for column in _COLUMNS), strict=True)
    rows = [
        NameChange(
            name=name,
            where="device" if name in on_device else "host",
            control_count=int(control_count),
            test_count=int(test_count),
            control_ns=int(control_ns),
            test_ns=int(test_ns),
            diff_count=int(diff_count),
            diff_ns=int(diff_ns),
        )
        for name, (control_count, test_count, control_ns, test_ns, diff_count, diff_ns) in zip(
            table.index.tolist(), numbers, strict=True
        )
        if not _STEP.fullmatch(name)
    ]
    rows.sort(key=lambda row: -abs(row.diff_ns))
    return TraceDiff(
        rank=test.rank,
        source=test.source,
        control=control.source,
        step=after,
        control_step=before,
        step_ns=after_ns,
        control_step_ns=before_ns,
        rows=rows,
        verdict=_diff_verdict(before_ns, after_ns, rows),
        warnings=[],
    )


def _device_names(trace: Trace) -> set[str]:
    events = trace.events
    codes = events.name.codes[events.category.matches(backends.is_work)]
    return {events.name.values[code] for code in np.unique(codes).tolist()}


def _diff_verdict(before_ns: int | None, after_ns: int | None, rows: Sequence[NameChange]) -> list[str]:
    lines = []
    if before_ns is not None and after_ns is not None:
        change = after_ns - before_ns
        sense = "longer" if change > 0 else "shorter"
        against = f"{format_ns(abs(change))} {sense} than {format_ns(before_ns)}"
        lines.append(f"The step takes {format_ns(after_ns)}, {against if change else 'like before'}.")
    return [*lines, *(text for where in ("device", "host") if (text := _largest(rows, where)))]


def _largest(rows: Sequence[NameChange], where: str) -> str | None:
    """Name the largest change on the device, or on the host."""
    row = next((row for row in rows if row.where == where and row.diff_ns), None)
    if row is None:
        return None
    sense = "more" if row.diff_ns > 0 else "less"
    return (
        f"On the {where} `{kernel_name(row.name)}` changed most: {format_ns(abs(row.diff_ns))} {sense} "
        f"(calls: {format_count(row.control_count)} before, {format_count(row.test_count)} after)."
    )
