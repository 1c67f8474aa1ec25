"""Sides of a comparison and their sums, whatever layers and ranks they have: a baseline is a run's sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from fsdp2prof.analyzers.compare.communication import (
    ALL_LAYERS,
    CollectiveKey,
    CollectiveSums,
    sums_of_all_layers,
)
from fsdp2prof.analyzers.compare.settings import main_settings
from fsdp2prof.analyzers.compare.times import is_cut, time_change, traced_spread, unrecorded_spread
from fsdp2prof.analyzers.steps import mean, unrecorded_step, waited_for
from fsdp2prof.errors import InputError
from fsdp2prof.results.comparison import (
    Baseline,
    BaselineCollectives,
    BaselinePeak,
    StepSpread,
    TimeChange,
)
from fsdp2prof.results.estimate import CommEstimate
from fsdp2prof.results.peak import LayerBytes, Peak
from fsdp2prof.results.run import RunSummary
from fsdp2prof.results.step import BreakdownNs, UnrecordedStep
from fsdp2prof.results.trace import TraceAnalysis

_MEASURES = ("count", "payload_bytes", "wire_bytes", "total_ns", "exposed_ns", "stall_ns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a comparison; missing parts are None."""

    path: str
    kind: str
    """As in :class:`ComparedInput`."""
    trace: TraceAnalysis | None = None
    communication: CommEstimate | None = None
    peaks: Mapping[int, Peak] = field(default_factory=dict)
    """By rank."""
    run: RunSummary | None = None
    world_size: int | None = None
    warnings: Sequence[str] = ()


def baseline_of(side: Side) -> Baseline:
    """Sum up a run, a trace or a memory analysis. Raises ``InputError`` for an estimate, and for nothing."""
    if side.kind == "estimate":
        raise InputError(f"{side.path}: is an estimate, not a run: use it directly with compare")
    if is_cut(side.trace):
        raise InputError(f"{side.path}: has no step marks (ProfilerStep#N): a baseline needs whole steps")
    found = sums_of(side)
    if not found.windows and not side.peaks and found.unrecorded_step is None:
        raise InputError(f"{side.path}: has no steps and no memory: nothing to store in a baseline")
    return found


def sums_of(side: Side) -> Baseline:
    """Sum up one side of a comparison."""
    steps = [step for rank in side.trace.ranks for step in rank.steps] if side.trace else []
    sums = sums_of_all_layers(side.trace) if side.trace else None
    ranks = side.trace.ranks if side.trace else []
    recorded = {rank.device for rank in side.run.ranks if rank.device} if side.run else set()
    return Baseline(
        kind=side.kind,
        world_size=side.world_size,
        devices=sorted(recorded or {rank.device_type for rank in ranks}),
        traced_ranks=len(ranks),
        windows=len(steps),
        step_ns=sum(step.duration_ns for step in steps) if steps else None,
        breakdown_ns={
            part.name: sum(getattr(step.breakdown_ns, part.name) for step in steps)
            for part in (fields(BreakdownNs) if steps else ())
        },
        spread=traced_spread(side.trace),
        unrecorded_step=unrecorded_of(side),
        collectives=None if sums is None else [_collectives(key, one) for key, one in sorted(sums.items())],
        peak=_fullest(side),
        settings=main_settings(side.run),
        processors=None if side.run is None else side.run.processors,
    )


def _collectives(key: CollectiveKey, sums: CollectiveSums) -> BaselineCollectives:
    return BaselineCollectives(
        phase=key[1],
        op=key[2],
        dtypes=sorted(sums.dtypes),
        group_sizes=sorted(sums.group_sizes),
        **{name: getattr(sums, name) for name in _MEASURES},
    )


def _fullest(side: Side) -> BaselinePeak | None:
    if not side.peaks:
        return None
    rank, peak = max(sorted(side.peaks.items()), key=lambda one: one[1].allocated_bytes)
    return BaselinePeak(
        rank=rank,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        categories=dict(peak.categories),
    )


def unrecorded_of(side: Side) -> UnrecordedStep | None:
    """Return the steps that pay for no recording, over all ranks."""
    step = None if side.trace is None else side.trace.unrecorded_step
    if side.run is not None:
        step = unrecorded_step(rank.steps for rank in side.run.ranks)
    return step if side.trace is None else waited_for(step, side.trace.ranks)


def step_changes(before: Baseline, after: Baseline) -> tuple[TimeChange | None, list[TimeChange]]:
    """Return the change of the mean step and of its parts; none without steps on both sides."""
    if before.step_ns is None or after.step_ns is None:
        return None, []

    def change(part: str, old: int, new: int) -> TimeChange:
        return time_change(part, mean(old, before.windows), mean(new, after.windows))

    return change("step", before.step_ns, after.step_ns), [
        change(part.name, before.breakdown_ns.get(part.name, 0), after.breakdown_ns.get(part.name, 0))
        for part in fields(BreakdownNs)
    ]


def common_spreads(before: Baseline, after: Baseline) -> tuple[StepSpread | None, StepSpread | None]:
    """Return the spreads of unrecorded steps, otherwise of traced ones: those that both sides have."""
    unrecorded = unrecorded_spread(before.unrecorded_step), unrecorded_spread(after.unrecorded_step)
    return next(
        (pair for pair in (unrecorded, (before.spread, after.spread)) if None not in pair), (None, None)
    )


def sums_by_key(side: Baseline) -> dict[CollectiveKey, CollectiveSums] | None:
    """Return the collectives of a baseline as a comparison takes them; None where it has none."""
    if side.collectives is None:
        return None
    return {
        (ALL_LAYERS, row.phase, row.op): CollectiveSums(
            side.windows,
            dtypes=set(row.dtypes),
            group_sizes=set(row.group_sizes),
            **{name: getattr(row, name) for name in _MEASURES},
        )
        for row in side.collectives
    }


def peak_of(peak: BaselinePeak) -> Peak:
    """Return the peak of a baseline as a comparison takes it, whose layers are all one."""
    return Peak(
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        step=None,
        phase="other",
        fqn=None,
        categories=peak.categories,
        by_layer=[
            LayerBytes(fqn=ALL_LAYERS, category=name, bytes=size) for name, size in peak.categories.items()
        ],
    )
