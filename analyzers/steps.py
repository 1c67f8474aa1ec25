"""Training steps of one rank: on the host from ``ProfilerStep#N`` labels, on a device through launches.

How long a step takes where nothing is recorded, and how many times as long tracing makes it.

Tracing slows the host down, often by more than the training's own work takes: the step of a training is the
unrecorded one, and the traced one shows what it is made of. Means over steps and ranks are exact integers
where they can be, unknown where a part of them is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.launches import DeviceTable
from fsdp2prof.by_key import grouped
from fsdp2prof.labels import parse_label
from fsdp2prof.manifest import StepInfo
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import RankTrace
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import LabelTable, StepTable, Trace

if TYPE_CHECKING:
    from fsdp2prof.results.run import StepTime

Window: TypeAlias = Literal["steps", "trace"]
"""The analysed range: every labelled step, or one step from the first to the last activity."""

STEP_LABEL = "ProfilerStep#"
"""Prefix of the range that the profiler puts around a step."""
_STEP = re.compile(STEP_LABEL + r"(\d{1,18})")


def host_steps(labels: LabelTable) -> StepTable:
    """Return the ``ProfilerStep#N`` ranges in order, as labelled; empty if there are none.

    A step that a crash interrupted can extend past its successor: it ends where the next one begins.
    """
    numbers = [match and int(match[1]) for match in map(_STEP.fullmatch, labels.name.values)]
    number = np.array([-1 if n is None else n for n in numbers] + [-1], dtype=np.int64)[labels.name.codes]
    rows = np.flatnonzero(number >= 0)
    rows = rows[np.argsort(labels.start_ns[rows], kind="stable")]
    _, first = np.unique(number[rows], return_index=True)
    rows = rows[np.sort(first)]
    start, end = labels.start_ns[rows], labels.end_ns[rows]
    end[:-1] = np.minimum(end[:-1], start[1:])
    return StepTable(step=number[rows], start_ns=start, end_ns=end)


def trained_steps(labels: LabelTable) -> set[int]:
    """Return the steps in which a labelled forward or backward began."""
    steps = host_steps(labels)
    parsed = map(parse_label, labels.name.values)
    trains = np.array([label is not None and label.kind != "optimizer" for label in parsed] + [False])
    starts = labels.start_ns[trains[labels.name.codes]]
    rows = intervals.containing(steps.start_ns, steps.end_ns, starts)
    return set(steps.step[rows[rows >= 0]].tolist())


def step_windows(
    trace: Trace,
    steps: StepTable,
    device: DeviceTable,
    window: Window = "steps",
    incomplete: Collection[int] = (),
) -> tuple[StepTable, list[str]]:
    """Return the windows to analyse and what a person should know about them.

    On a host-only trace a window is the step's range. On a device it lasts from the first activity launched
    inside the step to the first one launched inside the next; the last step ends with the last activity
    launched in it, and so does one whose successor is ``incomplete`` (misses records). Without step labels,
    or with ``window="trace"``: one step 0, from the first to the last activity, work queued before recording
    began included.
    """
    start, end = (device.start_ns, device.end_ns) if len(device) else _host_activity(trace)
    if not len(start):
        return StepTable.empty(), [f"{trace.source}: nothing ran in this trace"]
    whole = StepTable(
        step=np.zeros(1, dtype=np.int64), start_ns=start.min(keepdims=True), end_ns=end.max(keepdims=True)
    )
    if window == "trace":
        return whole, []
    if not len(steps):
        return whole, [f"{trace.source}: no ProfilerStep#N ranges; the whole trace is taken as one step"]
    if not len(device):
        return steps, []
    launched_in = intervals.containing(steps.start_ns, steps.end_ns, device.launch_ns)
    busy = intervals.distinct(launched_in[launched_in >= 0])
    if not len(busy) and len(incomplete):
        return StepTable.empty(), []
    if not len(busy):
        message = (
            f"{trace.source}: no device activity was launched inside a step; the whole trace is one step"
        )
        return whole, [message]
    warnings = [
        f"{trace.source}: step {steps.step[row]} launched nothing on the device and has no window"
        for row in np.setdiff1d(np.arange(len(steps)), busy, assume_unique=True)
        if int(steps.step[row]) not in incomplete
    ]
    first = np.full(len(steps) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, launched_in, device.start_ns)
    begins = np.maximum.accumulate(first[busy])
    last = np.full(len(steps) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, launched_in, device.end_ns)
    ends = np.maximum(last[busy], begins)
    known = ~np.isin(steps.step[np.minimum(busy + 1, len(steps) - 1)], list(incomplete))[:-1]
    ends[:-1] = np.where(known, begins[1:], np.minimum(ends[:-1], begins[1:]))
    return StepTable(step=steps.step[busy], start_ns=begins, end_ns=ends), warnings


def window_count(ranks: Iterable[RankTrace]) -> int:
    """Count the analysed steps of all ranks: the denominator of means per rank and step."""
    return sum(len(rank.steps) for rank in ranks)


_Kind = TypeVar("_Kind", bound=Hashable)
_FEW = 3
"""Kinds of steps from which on their means say no more than the mean of all."""


@dataclass(frozen=True, slots=True)
class StepKinds:
    """Steps that are alike, as the first rank with collectives of layers shows them."""

    rank: int
    reduced: dict[frozenset[str], list[int]]
    """Steps by the layers whose gradients they reduce."""
    gathered: dict[int, list[int]]
    """Steps by how many all-gathers of layers they have."""

    @property
    def apart(self) -> list[list[int]]:
        """Steps of each kind, if there are several and some have more than one step; otherwise empty."""
        kinds = list((self.reduced if len(self.reduced) > 1 else self.gathered).values())
        repeated = any(len(steps) > 1 for steps in kinds)
        return kinds if 1 < len(kinds) <= _FEW and repeated else []


def kinds_of_steps(groups: Iterable[GroupRow], ranks: Iterable[RankTrace]) -> StepKinds | None:
    """Distinguish steps of different kinds: models updated in turns, evaluation in between."""
    rows = [row for row in groups if row.fqn is not None and row.op in ("all_gather", "reduce_scatter")]
    if not rows:
        return None
    rank = min(row.rank for row in rows)
    traced = [one for one in ranks if one.rank == rank]
    counts: dict[str, dict[int, Counter[str]]] = {
        op: {step.step: Counter() for one in traced for step in one.steps}
        for op in ("all_gather", "reduce_scatter")
    }
    for row in rows:
        if row.rank == rank and row.step in counts[row.op]:
            counts[row.op][row.step][row.fqn or ""] += row.count
    reduced = {step: frozenset(layers) for step, layers in counts["reduce_scatter"].items()}
    gathered = {step: layers.total() for step, layers in counts["all_gather"].items()}
    return StepKinds(rank, _alike(reduced), _alike(gathered))


def _alike(steps: Mapping[int, _Kind]) -> dict[_Kind, list[int]]:
    return dict(grouped((kind, step) for step, kind in sorted(steps.items())))


def _host_activity(trace: Trace) -> tuple[IntArray, IntArray]:
    on_host = trace.events.thread >= 0
    return trace.events.start_ns[on_host], trace.events.end_ns[on_host]


_ALIKE, _ENOUGH = 1.4, 4
"""Ratio of upper to lower quartile above which steps are of several kinds, with at least this many steps."""
_LONG = 2
"""Times the median that a tenth of the steps take if they are of another kind."""
_APART = 1.1
"""Times as long as the other kind, from which on traced and unrecorded steps are called different."""


def unrecorded_step(ranks: Iterable[Sequence[StepInfo | StepTime]]) -> UnrecordedStep | None:
    """Return the unrecorded step of some ranks, each with its steps in order; None if there is none."""
    plain: list[int] = []
    traced: list[int] = []
    for steps in ranks:
        mine = [step.duration_ns for step in steps if step.kind == "plain"]
        recorded = [step.duration_ns for step in steps if step.kind == "traced"]
        warms_up = bool(steps) and steps[0].kind == "plain" and (len(mine) > 1 or bool(recorded))
        plain += mine[1:] if warms_up else mine
        traced += recorded
    if not plain:
        return None
    lower, middle, upper = quantiles(plain, n=4, method="inclusive") if len(plain) > 1 else plain * 3
    slow = median(traced) if traced else None
    step = UnrecordedStep(
        steps=len(plain),
        median_ns=middle,
        lower_quartile_ns=lower,
        upper_quartile_ns=upper,
        min_ns=min(plain),
        max_ns=max(plain),
        traced_median_ns=slow,
        slowdown=None if slow is None or not middle else slow / middle,
        mean_ns=fmean(plain),
        upper_decile_ns=quantiles(plain, n=10, method="inclusive")[-1] if len(plain) > 1 else middle,
    )
    return replace(step, slowdown=fmean(traced) / typical_ns(step)) if traced and are_unlike(step) else step


def are_unlike(step: UnrecordedStep) -> bool:
    """Whether unrecorded steps are of several kinds: models updated in turns, or generation in some."""
    if step.steps < _ENOUGH:
        return False
    some_long = step.upper_decile_ns is not None and step.upper_decile_ns > _LONG * step.median_ns
    return some_long or step.upper_quartile_ns > _ALIKE * step.lower_quartile_ns


def typical_ns(step: UnrecordedStep) -> float:
    """Return how long an unrecorded step takes: the median, or the mean of several kinds."""
    return step.mean_ns if are_unlike(step) and step.mean_ns is not None else step.median_ns


_CAN_VARY = 0.95
"""Part of what the device computes in a traced step that an unrecorded one may take on the host's clock."""


def waited_for(step: UnrecordedStep | None, ranks: Sequence[RankTrace]) -> UnrecordedStep | None:
    """Return the unrecorded step, or None if its time is only the host's.

    A host that launches faster than the device computes runs ahead of it, by all steps of a short run: its
    clock then shows the time of launching. No step is shorter than the device's compute time in the
    shortest one. If only some steps are, the host ran ahead in these, and they are not of another kind.
    """
    computed = [one.breakdown_ns.compute for rank in ranks if rank.device_type != "cpu" for one in rank.steps]
    if step is None or not computed:
        return step
    least = _CAN_VARY * min(computed)
    if step.median_ns < least:
        return None
    if step.lower_quartile_ns >= least or not are_unlike(step):
        return step
    clear = replace(step, lower_quartile_ns=least)
    if are_unlike(clear) or step.traced_median_ns is None:
        return clear
    return replace(clear, slowdown=step.traced_median_ns / step.median_ns)


def added_ns(step: UnrecordedStep | None) -> float:
    """Return tracing overhead per step; 0 if unknown or none."""
    if step is None or step.traced_median_ns is None:
        return 0
    if step.slowdown is None:
        return 0
    return max(0.0, (step.slowdown - 1) * typical_ns(step))


def differs_traced(traced_ns: float, unrecorded_ns: float | None) -> bool:
    """Whether traced steps are longer or shorter than unrecorded ones by more than steps vary."""
    return unrecorded_ns is not None and not unrecorded_ns <= _APART * traced_ns <= _APART**2 * unrecorded_ns


_Number = TypeVar("_Number", int, float)


def mean(total: float, count: int) -> float:
    """Return total / count, as an exact integer if it is one."""
    return total // count if isinstance(total, int) and total % count == 0 else total / count


def means(rows: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the mean of each key over rows that all have it."""
    return {key: mean(sum(row[key] for row in rows), len(rows)) for key in (rows[0] if rows else ())}


def known_sum(values: Sequence[_Number | None]) -> _Number | None:
    """Return the sum; None where one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def rate(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return bytes over their time, for (bytes, rate) pairs; None if none is known."""
    known = [(size, speed) for size, speed in pairs if size and speed]
    time = sum(size / speed for size, speed in known)
    return sum(size for size, _ in known) / time if time else None
