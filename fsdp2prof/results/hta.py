"""Results of ``analyze trace --critical-path`` and its like: one rank's trace, by HolisticTraceAnalysis."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundByNs:
    """Time on a critical path by what bounds it; sums to the path."""

    host: int
    """An operator or a call on the host."""
    compute: int
    communication: int
    between_kernels: int
    """From the end of one kernel to the start of the next one of its stream."""
    launch_delay: int
    """From a launching call to the start of its kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathSegment:
    """All stretches of a critical path with one name and one bound."""

    name: str
    """Operator, call or kernel; ``(launch)`` is the way from a call to its kernel."""
    bound_by: str
    """A key of :class:`BoundByNs`."""
    duration_ns: int
    count: int
    duration_frac: float
    """Of the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath(Shown):
    """Result of ``--critical-path``: the longest chain of dependent work in one step."""

    schema: str = "fsdp2prof.trace.critical_path/1"
    rank: int | None
    source: str
    """Trace it was computed from."""
    step: int | None
    """Null: the whole trace."""
    duration_ns: int
    """Sum of its segments."""
    bound_by_ns: BoundByNs
    rows: list[PathSegment]
    """Longest first."""
    step_ns: int | None
    """Duration of the step on the host; null without steps."""
    verdict: list[str]
    """At most three sentences: how long, what bounds it, what to try."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch and its work on the device."""

    correlation: int
    """Joins the call and its work in the trace."""
    host_ns: int
    """Duration of the call."""
    device_ns: int
    """Duration of the work."""
    delay_ns: int
    """From the end of the call to the start of the work; 0 if it started earlier."""
    name: str
    """Kernel or copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedWork:
    """All launches of one kernel or copy, summed."""

    name: str
    count: int
    host_ns: int
    device_ns: int
    delay_ns: int
    delay_max_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchStatistics(Shown):
    """Result of ``--launch-statistics``: every launch whose call and work are both in the trace."""

    schema: str = "fsdp2prof.trace.launch_statistics/1"
    rank: int | None
    source: str
    rows: list[Launch]
    """Longest delay first."""
    by_name: list[LaunchedWork]
    """Largest sum of delays first."""
    host_median_ns: float | None
    """Of the calls; null, like the next two, without a launch."""
    device_median_ns: float | None
    delay_median_ns: float | None
    short_count: int
    """Launches whose work took less time than their call: the host cannot keep the device busy with these."""
    verdict: list[str]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamIdle:
    """Idle time of one stream by one cause."""

    stream: int
    cause: str
    """``host_wait``: the host had not launched the next kernel yet; ``kernel_wait``: a gap too short for a
    wait, the cost of launching; ``other``: mostly waiting for another stream."""
    idle_ns: int
    idle_frac: float | None
    """Of the stream's idle time; null where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamUse:
    """One stream from its first to its last activity."""

    stream: int
    busy_ns: int
    idle_ns: int
    idle_frac: float | None
    """Of both together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleCauses(Shown):
    """Result of ``--idle-causes``: why each stream stood idle between its activities."""

    schema: str = "fsdp2prof.trace.idle_causes/1"
    rank: int | None
    source: str
    rows: list[StreamIdle]
    """By stream, longest first."""
    streams: list[StreamUse]
    """The busiest first."""
    verdict: list[str]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NameChange:
    """Operators or kernels of one name in a step of two traces."""

    name: str
    where: str
    """``host`` or ``device``."""
    control_count: int
    test_count: int
    control_ns: int
    """Sum of durations; an operator's duration includes its callees."""
    test_ns: int
    diff_count: int
    diff_ns: int
    """Test minus control."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDiff(Shown):
    """Result of ``--diff``: what runs more often or longer in a step of one trace than of another."""

    schema: str = "fsdp2prof.trace.diff/1"
    rank: int | None
    source: str
    """The trace that is looked at: *test*."""
    control: str
    """The trace that it is compared with."""
    step: int | None
    """Null: the whole trace."""
    control_step: int | None
    step_ns: int | None
    """Duration of the step on the host; null without steps."""
    control_step_ns: int | None
    rows: list[NameChange]
    """Largest difference first."""
    verdict: list[str]
    warnings: list[str]
