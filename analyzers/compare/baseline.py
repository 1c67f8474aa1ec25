"""A run as a small baseline, and a run against one: in sums, whatever layers and ranks there are."""

from __future__ import annotations

from dataclasses import fields, replace

from fsdp2prof.analyzers.compare.communication import (
    ALL_LAYERS,
    CollectiveKey,
    CollectiveSums,
    changes_of_sums,
    sums_of_all_layers,
)
from fsdp2prof.analyzers.compare.memory_peaks import compare_peaks
from fsdp2prof.analyzers.compare.settings import changed, main_settings
from fsdp2prof.analyzers.compare.sides import (
    Side,
    equalities,
    machine_change,
    peak_change,
    unrecorded_of,
    verdict,
)
from fsdp2prof.analyzers.compare.times import (
    beyond_spread,
    exposed_change,
    is_cut,
    time_change,
    traced_spread,
    unrecorded_change,
    unrecorded_spread,
)
from fsdp2prof.analyzers.steps import mean
from fsdp2prof.errors import InputError
from fsdp2prof.results.comparison import (
    Baseline,
    BaselineCollectives,
    BaselinePeak,
    ComparedInput,
    RunComparison,
    StepSpread,
    TimeChange,
)
from fsdp2prof.results.peak import LayerBytes, Peak
from fsdp2prof.results.step import BreakdownNs

_MEASURES = ("count", "payload_bytes", "wire_bytes", "total_ns", "exposed_ns", "stall_ns")


def baseline_of(side: Side) -> Baseline:
    """Sum up a run, a trace or a memory analysis. Raises ``InputError`` for an estimate, and for nothing."""
    if side.kind == "estimate":
        raise InputError(f"{side.path}: is an estimate, not a run: use it directly with compare")
    if is_cut(side.trace):
        raise InputError(f"{side.path}: has no step marks (ProfilerStep#N): a baseline needs whole steps")
    steps = [step for rank in side.trace.ranks for step in rank.steps] if side.trace else []
    sums = sums_of_all_layers(side.trace) if side.trace else None
    if not steps and not side.peaks and unrecorded_of(side) is None:
        raise InputError(f"{side.path}: has no steps and no memory: nothing to store in a baseline")
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


def compare_with_baseline(path: str, before: Baseline, after: Side) -> RunComparison:
    """Compare a run with the baseline at ``path``. Raises ``InputError`` if they have nothing in common."""
    now = baseline_of(after)
    step, breakdown = _step_changes(before, now)
    unrecorded = unrecorded_change(before.unrecorded_step, now.unrecorded_step)
    communication = changes_of_sums(_sums(before), _sums(now))
    if step is None and unrecorded is None and (before.peak is None or now.peak is None):
        raise InputError(f"{path} and {after.path} have no data in common to compare")
    settings = changed(before.settings, now.settings) if before.settings and now.settings else []
    spreads = _spreads(before, now)
    peaks = None if before.peak is None or now.peak is None else (_peak(before.peak), _peak(now.peak))
    ranks = (before.peak.rank, now.peak.rank) if before.peak and now.peak else (0, 0)
    comparison = RunComparison(
        before=_describe(path, before, spreads[0]),
        after=_describe(after.path, now, spreads[1]),
        settings=settings,
        settings_folded=settings,
        step=step,
        breakdown=breakdown,
        exposed=exposed_change(breakdown),
        unrecorded_step=unrecorded,
        machine_changed=machine_change(before.processors, now.processors),
        beyond_spread=beyond_spread(*spreads),
        communication=communication or [],
        communication_folded=communication or [],
        communication_differing=[row for row in communication or [] if not row.equal],
        communication_equal=None if communication is None else all(row.equal for row in communication),
        peaks=[] if peaks is None else [peak_change(*peaks, *ranks)],
        memory=None if peaks is None else compare_peaks(*peaks),
        warnings=_warnings(path, before, after.path, now, after),
    )
    return replace(comparison, verdict=verdict(comparison), equalities=equalities(comparison))


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


def _sums(side: Baseline) -> dict[CollectiveKey, CollectiveSums] | None:
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


def _step_changes(before: Baseline, after: Baseline) -> tuple[TimeChange | None, list[TimeChange]]:
    if before.step_ns is None or after.step_ns is None:
        return None, []
    return _change("step", before, before.step_ns, after, after.step_ns), [
        _change(part, before, before.breakdown_ns.get(part, 0), after, after.breakdown_ns.get(part, 0))
        for part in (field.name for field in fields(BreakdownNs))
    ]


def _change(part: str, before: Baseline, before_ns: int, after: Baseline, after_ns: int) -> TimeChange:
    return time_change(part, mean(before_ns, before.windows), mean(after_ns, after.windows))


def _spreads(before: Baseline, after: Baseline) -> tuple[StepSpread | None, StepSpread | None]:
    """Return the spreads of unrecorded steps, otherwise of traced ones: those that both sides have."""
    unrecorded = unrecorded_spread(before.unrecorded_step), unrecorded_spread(after.unrecorded_step)
    return unrecorded if None not in unrecorded else (before.spread, after.spread)


def _peak(peak: BaselinePeak) -> Peak:
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


def _describe(path: str, side: Baseline, spread: StepSpread | None) -> ComparedInput:
    return ComparedInput(
        path=path,
        kind=side.kind,
        world_size=side.world_size,
        traced_ranks=list(range(side.traced_ranks)),
        memory_ranks=[] if side.peak is None else [side.peak.rank],
        steps=side.windows,
        step_min_ns=None if side.spread is None else int(side.spread.low_ns),
        step_max_ns=None if side.spread is None else int(side.spread.high_ns),
        spread=spread,
    )


def _warnings(path: str, before: Baseline, after_path: str, now: Baseline, after: Side) -> list[str]:
    lines = [f"{path} is a baseline of sums: layers and ranks are not compared one by one"]
    for name, old, new in (("times", before.step_ns, now.step_ns), ("memory", before.peak, now.peak)):
        if (old is None) != (new is None):
            lines.append(f"{path if old is None else after_path} has no {name}: they are not compared")
    if before.world_size != now.world_size and None not in (before.world_size, now.world_size):
        lines.append(
            f"{before.world_size} ranks before, {now.world_size} after: times and bytes are means per rank"
        )
    if before.devices != now.devices and before.devices and now.devices:
        lines.append(
            f"{', '.join(before.devices)} before, {', '.join(now.devices)} after: "
            "their times cannot be compared"
        )
    return [*lines, *(f"{after_path}: {text}" for text in after.warnings)]
