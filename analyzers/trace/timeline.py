"""One step of all ranks on one clock: the chart at the top of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from fsdp2prof.analyzers.ranks.comparison import RankComparison
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.analyzers.trace.prefetch import AwaitedTable
from fsdp2prof.analyzers.trace.spans import RANKS, RankSpans, SpanTable, fold, spans_shown
from fsdp2prof.by_key import grouped
from fsdp2prof.results.communication import PrefetchRow
from fsdp2prof.results.step import RankTimeline, StepTimeline, TimelineLane, TimelineStall
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.vocabulary import LANES

_STALLS = 1000
_SLICES = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSteps:
    """The chart's data of one rank."""

    summary: RankSummary
    steps: Sequence[RankSpans]
    awaited: AwaitedTable
    verdicts: Sequence[PrefetchRow]
    """Of the awaited collectives, in order of need."""


class _Index:
    """Values by the order in which they first occur."""

    def __init__(self) -> None:
        self.rows: dict[str | None, int] = {}

    def __call__(self, value: str | None) -> int:
        return self.rows.setdefault(value, len(self.rows))


def step_timeline(ranks: Sequence[RankSteps], comparison: RankComparison) -> StepTimeline | None:
    """Return a typical step of the ranks that matter most; None if no step was analysed."""
    step = _typical([rank.steps for rank in ranks])
    if step is None:
        return None
    having = [(rank, one) for rank in ranks for one in rank.steps if one.step == step and one.packed]
    if not having:
        return None
    chosen = _worth_showing(having, comparison)
    shift, aligned = _shifts(chosen, comparison)
    most = spans_shown(len(chosen))
    resolution = 0
    layers, phases, names = _Index(), _Index(), _Index()
    pictured: list[RankTimeline] = []
    for (rank, one), offset in zip(chosen, shift, strict=True):
        spans, folded = fold(one.spans, most)
        resolution = max(resolution, folded, one.resolution_ns)
        wait_ns = comparison.wait_ns.get(rank.summary.rank)
        lanes = [
            _lane(name, spans, offset, rank.summary, wait_ns, (layers, phases, names))
            for name in LANES
            if spans.lane.equals(name).any()
        ]
        pictured.append(
            RankTimeline(
                rank=rank.summary.rank,
                start_ns=one.start_ns + offset,
                duration_ns=one.end_ns - one.start_ns,
                lanes=lanes,
                stalls=_stalls(rank, step, offset),
            )
        )
    pictured, left_out = _longest_stalls(pictured)
    phase_names = [phase or "other" for phase in phases.rows]
    duration = max(_end(rank) for rank in pictured)
    compute_frac, slice_phases = compute_slices(pictured, duration, phase_names)
    return StepTimeline(
        step=step,
        duration_ns=duration,
        aligned=aligned,
        resolution_ns=resolution,
        layers=list(layers.rows),
        phases=phase_names,
        names=[name or "" for name in names.rows],
        ranks=pictured,
        ranks_left_out=len(having) - len(chosen),
        stalls_left_out=left_out,
        compute_frac=compute_frac,
        slice_phases=slice_phases,
    )


def _typical(ranks: Sequence[Sequence[RankSpans]]) -> int | None:
    """Return the step of median duration among those that most ranks have."""
    durations = grouped(
        (one.step, one.end_ns - one.start_ns) for one in (one for steps in ranks for one in steps)
    )
    most = max(map(len, durations.values()), default=0)
    common = sorted(
        (step for step, found in durations.items() if len(found) == most),
        key=lambda step: (fmean(durations[step]), step),
    )
    return common[(len(common) - 1) // 2] if common else None


def _worth_showing(
    having: Sequence[tuple[RankSteps, RankSpans]], comparison: RankComparison
) -> list[tuple[RankSteps, RankSpans]]:
    """Return the ranks that the others wait for, then those whose steps are longest, in order of rank."""
    caused = comparison.result.wait_caused_ns
    ordered = sorted(
        having,
        key=lambda pair: (
            -caused.get(str(pair[0].summary.rank), 0),
            pair[1].start_ns - pair[1].end_ns,
            pair[0].summary.rank,
        ),
    )
    return sorted(ordered[:RANKS], key=lambda pair: pair[0].summary.rank)


def _shifts(
    chosen: Sequence[tuple[RankSteps, RankSpans]], comparison: RankComparison
) -> tuple[list[int], bool]:
    """Return the offset of each rank's times so that the first step window begins at 0, and whether the
    clocks agree."""
    offsets = comparison.result.clock_offset_ns
    clocks = {rank.summary.clock for rank, _ in chosen}
    aligned = len(clocks) == 1 or clocks <= offsets.keys()
    first = [one.start_ns for _, one in chosen]
    if not aligned:
        return [-start for start in first], False
    shift = [rank.summary.base_ns - offsets.get(rank.summary.clock, 0) for rank, _ in chosen]
    origin = min(start + offset for start, offset in zip(first, shift, strict=True))
    return [offset - origin for offset in shift], True


def _lane(
    lane: str,
    spans: SpanTable,
    offset: int,
    summary: RankSummary,
    wait_ns: IntArray | None,
    indices: tuple[_Index, _Index, _Index],
) -> TimelineLane:
    mine = spans.take(spans.lane.equals(lane))
    mine = mine.take(np.argsort(mine.start_ns, kind="stable"))
    layers, phases, names = indices
    is_collective = lane not in ("host", "compute", "fsdp_copy", "memcpy")
    rows = mine.collective.tolist() if is_collective else []
    payload = [_known(summary.collectives.payload_bytes, row) for row in rows]
    waits = [None if wait_ns is None else _known(wait_ns, row) for row in rows]
    return TimelineLane(
        lane=lane,
        start_ns=(mine.start_ns + offset).tolist(),
        duration_ns=(mine.end_ns - mine.start_ns).tolist(),
        busy_ns=mine.busy_ns.tolist(),
        count=mine.count.tolist(),
        layer=[layers(value) for value in mine.fqn.to_list()],
        phase=[phases(value or "other") for value in mine.phase.to_list()],
        name=[names(value or "") for value in mine.name.to_list()],
        payload_bytes=payload,
        peer_wait_ns=waits,
    )


def _known(values: IntArray, row: int) -> int | None:
    """Return a collective's number; None where the span is none of one collective, or it is unknown (-1)."""
    return None if row < 0 or values[row] < 0 else int(values[row])


def _stalls(rank: RankSteps, step: int, offset: int) -> list[TimelineStall]:
    table, waited = rank.summary.collectives, rank.awaited
    order = np.argsort(waited.needed_ns, kind="stable").tolist()
    found = []
    for row, verdict in zip(order, rank.verdicts, strict=True):
        collective = int(waited.collective[row])
        if verdict.step != step or verdict.stall_ns <= 0:
            continue
        found.append(
            TimelineStall(
                lane=verdict.op if verdict.op in LANES else "other_comm",
                fqn=verdict.fqn,
                phase=verdict.phase,
                start_ns=int(table.start_ns[collective]) + offset,
                end_ns=int(table.end_ns[collective]) + offset,
                needed_ns=int(waited.needed_ns[row]) + offset,
                stall_ns=verdict.stall_ns,
                cause=verdict.cause,
            )
        )
    return sorted(found, key=lambda stall: -stall.stall_ns)


def _longest_stalls(ranks: Sequence[RankTimeline]) -> tuple[list[RankTimeline], int]:
    """Return the ranks with the longest stalls of all, and how many are left out."""
    stalls = sorted((stall.stall_ns for rank in ranks for stall in rank.stalls), reverse=True)
    if len(stalls) <= _STALLS:
        return list(ranks), 0
    least = stalls[_STALLS]
    kept = [
        replace(rank, stalls=[stall for stall in rank.stalls if stall.stall_ns > least]) for rank in ranks
    ]
    return kept, len(stalls) - sum(len(rank.stalls) for rank in kept)


def _end(rank: RankTimeline) -> int:
    """Latest instant of a rank's lanes and window."""
    ends = (
        start + length
        for lane in rank.lanes
        for start, length in zip(lane.start_ns, lane.duration_ns, strict=True)
    )
    return max(ends)


def compute_slices(
    ranks: Sequence[RankTimeline], duration: int, phases: Sequence[str]
) -> tuple[list[float], list[str]]:
    """Return how much of each of equal slices of a step the ranks compute, and for which phase most."""
    edges = np.linspace(0, duration, _SLICES + 1)
    busy = np.zeros((max(1, len(phases)), _SLICES))
    for lane in (lane for rank in ranks for lane in rank.lanes if lane.lane == "compute"):
        start, length = np.array(lane.start_ns), np.array(lane.duration_ns)
        rate = np.array(lane.busy_ns) / np.maximum(length, 1)
        for phase in set(lane.phase):
            mine = np.array(lane.phase) == phase
            inside = np.minimum(edges[1:, None], (start + length)[mine]) - np.maximum(
                edges[:-1, None], start[mine]
            )
            busy[phase] += (np.clip(inside, 0, None) * rate[mine]).sum(axis=1)
    whole = max(1, duration) / _SLICES * len(ranks)
    fractions = np.minimum(busy.sum(axis=0) / whole, 1.0).tolist()
    names: list[str] = []
    for row in range(_SLICES):
        before = names[-1] if names else "other"
        names.append(phases[int(busy[:, row].argmax())] if busy[:, row].any() else before)
    return fractions, names
