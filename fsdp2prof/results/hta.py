"""Results of ``analyze trace --critical-path``, ``--launch-statistics``, ``--idle-causes`` and ``--diff``:
one rank's trace, analysed by HolisticTraceAnalysis."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundByNs:
    """Time on a critical path by what bounds it; sums to the path."""

    host: int
    """Time in operators or calls on the host."""
    compute: int
    communication: int
    between_kernels: int
    """Time from the end of one kernel to the start of the next one on its stream."""
    launch_delay: int
    """Time from a launching call to the start of its kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathSegment:
    """All segments of a critical path with one name and one bound."""

    name: str
    """Operator, call or kernel; ``(launch)`` is the time from a call to its kernel."""
    bound_by: str
    """A key of :class:`BoundByNs`."""
    duration_ns: int
    count: int
    duration_frac: float
    """Fraction of the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath(Shown):
    """Result of ``--critical-path``: the longest chain of dependent work in one step."""

    schema: str = "fsdp2prof.trace.critical_path/1"
    rank: int | None
    source: str
    """Path of the trace."""
    step: int | None
    """Analysed step; null: the whole trace."""
    duration_ns: int
    """Duration of the path: the sum of its segments."""
    bound_by_ns: BoundByNs
    rows: list[PathSegment]
    """Segments by name, longest first."""
    step_ns: int | None
    """Duration of the step on the host; null without steps."""
    verdict: list[str]
    """At most three sentences: duration, bound, change to try."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch call and its work on the device."""

    correlation: int
    """Correlation id that joins the call and its work."""
    host_ns: int
    """Duration of the host call."""
    device_ns: int
    """Duration of the device work."""
    delay_ns: int
    """Time from the end of the call to the start of the work; 0 if the work started earlier."""
    name: str
    """Kernel or copy that was launched."""


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
    """Result of ``--launch-statistics``: every launch with both call and work in the trace."""

    schema: str = "fsdp2prof.trace.launch_statistics/1"
    rank: int | None
    source: str
    rows: list[Launch]
    """Launches, longest delay first."""
    by_name: list[LaunchedWork]
    """Kernels and copies, largest sum of delays first."""
    host_median_ns: float | None
    """Median duration of the calls; null, like the next two fields, without a launch."""
    device_median_ns: float | None
    delay_median_ns: float | None
    short_count: int
    """Number of launches whose work is shorter than their call: with these the host cannot keep the device
    busy."""
    verdict: list[str]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamIdle:
    """Idle time of one stream by one cause."""

    stream: int
    cause: str
    """``host_wait``: the host had not yet launched the next kernel; ``kernel_wait``: a short gap, the cost
    of launching; ``other``: mostly waiting for another stream."""
    idle_ns: int
    idle_frac: float | None
    """Fraction of the stream's idle time; null without idle time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamUse:
    """One stream from its first to its last activity."""

    stream: int
    busy_ns: int
    idle_ns: int
    idle_frac: float | None
    """Idle time as a fraction of busy and idle time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleCauses(Shown):
    """Result of ``--idle-causes``: idle time of each stream between its activities, by cause."""

    schema: str = "fsdp2prof.trace.idle_causes/1"
    rank: int | None
    source: str
    rows: list[StreamIdle]
    """Idle time by stream and cause, longest first."""
    streams: list[StreamUse]
    """Streams, busiest first."""
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
    """Result of ``--diff``: operators and kernels that run more often or longer in a step of one trace
    than of another."""

    schema: str = "fsdp2prof.trace.diff/1"
    rank: int | None
    source: str
    """Path of the *test* trace."""
    control: str
    """Path of the *control* trace."""
    step: int | None
    """Compared step; null: the whole trace."""
    control_step: int | None
    step_ns: int | None
    """Duration of the step on the host; null without steps."""
    control_step_ns: int | None
    rows: list[NameChange]
    """Operators and kernels, largest difference first."""
    verdict: list[str]
    warnings: list[str]
