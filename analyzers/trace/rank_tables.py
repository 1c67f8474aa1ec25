"""One rank's trace joined up: every table that the analyses of a rank share.

What the recorder saw of the host from outside: lines of the training's thread, and garbage collections.

Kernels that may be communication under an unknown name: those that run beside collectives only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.launches import (
    DeviceTable,
    LaunchTable,
    device_activities,
    incomplete_steps,
    launch_calls,
    overlapping_records,
)
from fsdp2prof.analyzers.layers import site_name
from fsdp2prof.analyzers.phases import build_phases
from fsdp2prof.analyzers.ranks.summary import GARBAGE
from fsdp2prof.analyzers.steps import Window, host_steps, step_windows
from fsdp2prof.analyzers.trace.accounting import (
    Exposure,
    Parts,
    Timeline,
    WorkTable,
    device_work,
    expose,
    host_work,
    split,
    timeline,
)
from fsdp2prof.analyzers.trace.collective_names import gloo_ranges
from fsdp2prof.analyzers.trace.collectives import Collectives, collect
from fsdp2prof.analyzers.trace.waits import WaitTable, charging_order, find_waits
from fsdp2prof.backends import kernel_name
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.manifest import HostSpan, HostStep, RankManifest
from fsdp2prof.results.step import IncompleteStep
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_tables
from fsdp2prof.tables.trace import LabelTable, PhaseTable, StepTable, Trace
from fsdp2prof.units import format_ns
from fsdp2prof.vocabulary import printable

_TORCH = "at::"
"""Namespace of torch's own kernels."""
_OPERATOR = "aten::"
"""The launches of torch's compute kernels."""
_POWER_CAP = "power_cap"
"""Reason for a lower clock that every GPU has under full load."""
_MOST_THROTTLED = 0.05
"""Part of a step's CPU time that a container's quota may keep its processes waiting."""
_NAMED = 3


def beside_communication(trace: Trace, work: WorkTable, collectives: Collectives) -> list[str]:
    """Return one line per stream that carries collectives and otherwise only kernels of unknown purpose.

    A kernel's purpose is known if it is torch's, if an operator or an FSDP label launched it, or if it is
    a copy. A stream with such a kernel counts as a compute stream.
    """
    streams = intervals.distinct(collectives.table.stream)
    lines = []
    for stream in streams.tolist():
        computing = (work.stream == stream) & ~work.is_fsdp & ~work.is_memcpy
        if not computing.any() or not _unknown(trace, work.take(computing)).all():
            continue
        time: Counter[str] = Counter()
        lengths = (work.end_ns - work.start_ns)[computing].tolist()
        for name, length in zip(
            trace.events.name.take(work.event[computing]).to_list(), lengths, strict=True
        ):
            time[printable(kernel_name(name or ""))] += length
        names = ", ".join(f"{name} ({format_ns(spent)})" for name, spent in time.most_common(_NAMED))
        more = f" and {len(time) - _NAMED} more" if len(time) > _NAMED else ""
        count = int(computing.sum())
        lines.append(
            (
                f"1 kernel on communication stream {stream} is counted as compute: "
                if count == 1
                else f"{count} kernels on communication stream {stream} are counted as compute: "
            )
            + names
            + more
        )
    return lines


def _unknown(trace: Trace, work: WorkTable) -> BoolArray:
    """Per row of work, whether neither its name nor its launch says that it computes."""
    events = trace.events
    names = events.name.take(work.event)
    known = work.is_fsdp | work.is_memcpy | names.matches(lambda name: _TORCH in name.partition("<")[0])
    operators = np.flatnonzero(events.name.matches(lambda name: name.startswith(_OPERATOR)))
    for thread in intervals.distinct(events.thread[operators]):
        of_thread = operators[events.thread[operators] == thread]
        mine = np.flatnonzero((work.thread == thread) & (work.launch_ns >= 0) & ~known)
        spans = intervals.union(events.start_ns[of_thread], events.end_ns[of_thread])
        known[mine] |= intervals.containing(spans.start, spans.end, work.launch_ns[mine]) >= 0
    return ~known


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that a thread was on; times are on the trace's clock."""

    start_ns: IntArray
    """When a line was seen first, ascending."""
    end_ns: IntArray
    """When it was seen last before another."""
    line: Strings

    def seen(self, start: IntArray, end: IntArray) -> list[str | None]:
        """Return the most frequent line in each interval; null if none was sampled."""
        first = np.searchsorted(self.end_ns, start, side="left").tolist()
        last = np.searchsorted(self.start_ns, end, side="right").tolist()
        return [
            self._most(low, high, int(begin), int(until)) if high > low else None
            for low, high, begin, until in zip(first, last, start, end, strict=True)
        ]

    def nearest(self, time: IntArray) -> tuple[IntArray, IntArray]:
        """Return the row of the line seen nearest to each time, and how far away that was; -1 without any."""
        if not len(self.start_ns):
            return np.full(len(time), -1), np.full(len(time), np.iinfo(np.int64).max)
        after = np.searchsorted(self.start_ns, time, side="right")
        before, after = np.maximum(after - 1, 0), np.minimum(after, len(self.start_ns) - 1)
        passed = np.maximum(np.maximum(time - self.end_ns[before], self.start_ns[before] - time), 0)
        coming = np.abs(self.start_ns[after] - time)
        return np.where(passed <= coming, before, after), np.minimum(passed, coming)

    def _most(self, low: int, high: int, start: int, end: int) -> str | None:
        spent: Counter[str | None] = Counter()
        for row in range(low, high):
            inside = min(end, int(self.end_ns[row])) - max(start, int(self.start_ns[row]))
            line = self.line[row]
            # All of autograd's work is seen inside the call of backward: that says nothing about a pause.
            spent[None if line is None or line.startswith("backward() (") else line] += inside + 1
        return spent.most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class Sighted:
    """The recorder's samples of one rank's host."""

    lines: Lines
    """Where its thread was."""
    callers: Lines
    """Where it had called a module from, from outside any."""
    collections: Intervals
    """When Python collected garbage."""
    sleeps: Intervals
    """When its thread slept: it neither computed nor was ready to."""

    def gaps(self, start: IntArray, end: IntArray) -> list[str | None]:
        """Return the line of each interval, ``GARBAGE`` if garbage collections take most of it."""
        collected = 2 * intervals.covered(self.collections, start, end) > end - start
        return [
            GARBAGE if is_garbage else line
            for is_garbage, line in zip(collected.tolist(), self.lines.seen(start, end), strict=True)
        ]


def sighted(trace: Trace, manifest: RankManifest | None) -> Sighted:
    """Return the content of the manifest beside a trace; empty if there is none, or no common clock."""
    steps = [] if manifest is None or not trace.base_time_ns else manifest.host_steps
    base_ns = trace.base_time_ns
    lines = _lines([span for one in steps for span in one.lines], base_ns)
    callers = _lines([span for one in steps for span in one.callers], base_ns)
    collected = _times((span for one in steps for span in one.garbage_collections), base_ns)
    slept = _times((span for one in steps for span in one.sleeps), base_ns)
    return Sighted(lines, callers, intervals.union(*collected), intervals.union(*slept))


def _lines(spans: list[HostSpan], base_ns: int) -> Lines:
    start, end = _times(spans, base_ns)
    order = np.argsort(start, kind="stable")
    return Lines(
        start[order], end[order], Strings.intern([site_name(span.line) for span in spans]).take(order)
    )


def _times(spans: Iterable[HostSpan], base_ns: int) -> tuple[IntArray, IntArray]:
    spans = list(spans)
    start = np.array([one.start_ns - base_ns for one in spans], dtype=np.int64)
    return start, start + np.array([one.duration_ns for one in spans], dtype=np.int64)


_SHOWN = 6
_HOW_LOST = (
    "The profiler lost them (CUPTI before CUDA 13.1, full buffers, another tool on the GPU): record again, "
    "fewer steps at a time."
)

_COUNTERS = "cuda_profiler_range"
"""Category of CUPTI's measurements of hardware counters."""
_COUNTED = (
    "The profiler measured hardware counters, which exclude kernel times: record without "
    "profiler_metrics in the profiler's experimental_config."
)

_ALWAYS = StepTable(
    step=np.zeros(1, dtype=np.int64),
    start_ns=np.full(1, np.iinfo(np.int64).min),
    end_ns=np.full(1, np.iinfo(np.int64).max),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTables:
    """What :func:`rank_tables` found."""

    trace: Trace
    manifest: RankManifest | None
    steps: StepTable
    """All labelled steps, in host time."""
    analysed: StepTable
    """The analysed range, in host time."""
    windows: StepTable
    """The analysed range, in the time of the device (host-only: of the host)."""
    measurable: tuple[int, ...]
    """Every step that has a window, analysed or not."""
    incomplete: list[IncompleteStep]
    """Steps that miss records of the device; analysed only where they were chosen."""
    device: DeviceTable
    """Empty on a host-only trace."""
    phases: PhaseTable
    collectives: Collectives
    work: WorkTable
    waits: WaitTable
    run: Timeline
    parts: Parts
    exposure: Exposure
    sighted: Sighted
    """Where the host was; without stretches if no recorder looked."""
    warnings: list[str]


def rank_tables(
    trace: Trace,
    manifest: RankManifest | None = None,
    window: Window = "steps",
    chosen: Collection[int] | None = None,
    left_out: Collection[int] = (),
) -> RankTables:
    """Join a rank's trace: launches to streams, host time to phases, collectives to layers and waits.

    ``chosen`` steps are analysed, by default all that miss no records of the device and are not
    ``left_out``.
    """
    steps = host_steps(trace.labels)
    device = device_activities(trace)
    calls = launch_calls(trace)
    incomplete = incomplete_steps(calls, steps if window == "steps" and len(steps) else _ALWAYS)
    if not len(device) and not incomplete and _used_gpu(manifest):
        numbers = steps.step.tolist() or [0]
        incomplete = [IncompleteStep(step=number, launches=0, missing=0) for number in numbers]
    unusable = [one.step for one in incomplete]
    windows, warnings = step_windows(trace, steps, device, window, unusable)
    if unusable and not len(device):
        windows, warnings = StepTable.empty(), []
    phases = build_phases(phase_labels(trace), steps, manifest.root_count if manifest else 0)
    labelled = window == "steps" and bool(np.isin(windows.step, steps.step).all())
    host = steps if labelled else _ALWAYS
    measurable = tuple(windows.step.tolist())
    wanted = set(windows.step.tolist()) - {*unusable, *left_out} if chosen is None else set(chosen)
    windows = windows.take(np.isin(windows.step, sorted(wanted)))
    collectives = collect(trace, device, phases, host, windows, manifest)
    if len(device):
        work = device_work(trace, device, phases, collectives)
        warnings += [f"{trace.source}: {line}" for line in beside_communication(trace, work, collectives)]
        if len(aside := gloo_ranges(trace)):
            warnings.append(
                f"{trace.source}: {len(aside)} collectives ran on the host (gloo); the device breakdown "
                "excludes them"
            )
    else:
        work = host_work(trace, phases)
        if collectives.unserved and not unusable:
            warnings.append(
                f"{trace.source}: {collectives.unserved} collectives were issued without a recorded transfer"
            )
    waits = find_waits(trace, phases, work, collectives)
    run = timeline(work, device, collectives)
    parts = split(run, windows)
    return RankTables(
        trace=trace,
        manifest=manifest,
        steps=steps,
        analysed=host.take(np.isin(host.step, windows.step)),
        windows=windows,
        measurable=measurable,
        incomplete=incomplete,
        device=device,
        phases=phases,
        collectives=collectives,
        work=work,
        waits=waits,
        run=run,
        parts=parts,
        exposure=expose(parts, windows, collectives, charging_order(collectives, waits)),
        sighted=sighted(trace, manifest),
        warnings=[
            *_missing_records(trace, manifest, device, calls, incomplete, wanted),
            *_disagreements(trace, manifest),
            *_held_back(trace, manifest),
            *trace.warnings,
            *warnings,
        ],
    )


def _used_gpu(manifest: RankManifest | None) -> bool:
    return manifest is not None and manifest.device.type != "cpu" and manifest.rehearsal is None


def _missing_records(
    trace: Trace,
    manifest: RankManifest | None,
    device: DeviceTable,
    calls: LaunchTable,
    incomplete: list[IncompleteStep],
    analysed: Collection[int],
) -> list[str]:
    """Report which records of the device are missing or wrong, and the effect on the analysis."""
    told = []
    if incomplete and not len(device):
        known = [f"it has {len(calls):,} launches"] if len(calls) else []
        if manifest is not None and _used_gpu(manifest):
            known.append(f"the rank ran on {manifest.device.name or 'a GPU'}")
        why = _COUNTED if trace.events.category.equals(_COUNTERS).any() else _HOW_LOST
        told = [f"no device records, although {' and '.join(known)}; no step is analysed. {why}"]
    elif incomplete:
        shown = [f"{one.missing:,} of {one.launches:,} in step {one.step}" for one in incomplete[:_SHOWN]]
        if len(incomplete) > _SHOWN:
            shown.append(f"and in {len(incomplete) - _SHOWN} more steps")
        numbers = ",".join(str(one.step) for one in incomplete[:_SHOWN] if one.step not in analysed)
        fate = f"left out; --steps {numbers} analyses them anyway" if numbers else "analysed as requested"
        told = [f"launches without a device record: {', '.join(shown)}: {fate}. {_HOW_LOST}"]
    if twice := overlapping_records(device):
        told.append(
            f"{twice:,} device records overlap the preceding record on their stream: "
            "their durations are wrong"
        )
    return [f"{trace.source}: {line}" for line in told]


def _disagreements(trace: Trace, manifest: RankManifest | None) -> list[str]:
    """Say where the trace and the manifest beside it are not of one rank."""
    if manifest is None:
        return []
    pairs = (
        ("rank", trace.rank, manifest.rank),
        ("world size", trace.world_size, manifest.world_size),
        ("device", trace.device.name or None, manifest.device.name or None),
        ("torch", trace.torch_version, manifest.versions.get("torch")),
    )
    return [
        f"{trace.source}: its {what} is {here}, but the manifest beside it says {there}: is the trace from "
        "another rank or run?"
        for what, here, there in pairs
        if here is not None and there is not None and here != there
    ]


def _held_back(trace: Trace, manifest: RankManifest | None) -> list[str]:
    """Report in which recorded steps the GPU's clock was lowered, or a quota throttled the container."""
    lowered: dict[str, list[int]] = {}
    quota: list[HostStep] = []
    for step in [] if manifest is None else manifest.host_steps:
        for reason in set(step.slowed_by or ()) - {_POWER_CAP}:
            lowered.setdefault(reason, []).append(step.step)
        if (step.quota_throttled_ns or 0) > _MOST_THROTTLED * step.cpu_time_ns:
            quota.append(step)
    told = [
        f"{printable(reason)} lowered the GPU's clock in {_steps(steps)} (NVML): check cooling and power"
        for reason, steps in sorted(lowered.items())
    ]
    if quota:
        stopped = format_ns(sum(one.quota_throttled_ns or 0 for one in quota) // len(quota))
        told.append(
            f"the container's CPU quota was exhausted for {stopped} per step in "
            f"{_steps([one.step for one in quota])}: raise its CPU limit"
        )
    return [f"{trace.source}: {line}" for line in told]


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def phase_labels(trace: Trace) -> LabelTable:
    """Return the trace's labels with autograd's node ranges, which mark backward work without FSDP labels."""
    events = trace.events
    node = events.name.matches(lambda name: name.startswith(AUTOGRAD_NODE))
    nodes = LabelTable(
        thread=events.thread[node].astype(np.int64),
        start_ns=events.start_ns[node],
        end_ns=events.end_ns[node],
        name=Strings.full(int(node.sum()), AUTOGRAD_NODE),
    )
    return concat_tables([trace.labels, nodes])
