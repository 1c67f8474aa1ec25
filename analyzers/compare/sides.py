"""``compare``: what changed from one run, trace, recording or estimate to another.

Both sides are results already, measured or predicted, and each part is compared where both sides know it.

Collectives of repeated layers that changed alike, folded into one row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from fsdp2prof.analyzers.compare.communication import communication_changes, largest_first
from fsdp2prof.analyzers.compare.memory_peaks import compare_peaks
from fsdp2prof.analyzers.compare.settings import fold_settings, setting_changes
from fsdp2prof.analyzers.compare.times import (
    beyond_spread,
    exposed_change,
    is_cut,
    layer_pace,
    step_changes,
    traced_spread,
    unrecorded_change,
    unrecorded_spread,
)
from fsdp2prof.analyzers.compare.wording import equalities, verdict
from fsdp2prof.analyzers.layers import family_name, fold_alike
from fsdp2prof.analyzers.means import known_sum
from fsdp2prof.analyzers.steps import unrecorded_step
from fsdp2prof.errors import InputError
from fsdp2prof.results.comparison import (
    CommChange,
    CommFigures,
    ComparedInput,
    RankPeakChange,
    RunComparison,
    StepSpread,
)
from fsdp2prof.results.estimate import CommEstimate
from fsdp2prof.results.peak import Peak
from fsdp2prof.results.run import ProcessorUse, RunSummary
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import RankTrace, TraceAnalysis
from fsdp2prof.units import format_frac

_MORE = 0.1
"""Part of a step that ranks wait longer for a processor, and of all processors that others use more, from
which on a change of step time is not the program's alone."""


def machine_change(before: ProcessorUse | None, after: ProcessorUse | None) -> str | None:
    """Say which side's ranks waited for processors that other programs used; None unless one did much more.

    Ranks that starve one another (too many threads) wait too, but leave others no larger part: that is a
    change of the program.
    """
    if before is None or after is None:
        return None
    waited = (before.wait_frac or 0.0, after.wait_frac or 0.0)
    others = (before.others_frac or 0.0, after.others_frac or 0.0)
    grown = [pair[1] - pair[0] for pair in (waited, others)]
    if min(map(abs, grown)) < _MORE or grown[0] * grown[1] < 0:
        return None
    return (
        f"the machine was {'busier' if grown[0] > 0 else 'less busy'}: ranks waited {format_frac(waited[1])} "
        f"of a step for a processor ({format_frac(waited[0])} before), and other programs used "
        f"{format_frac(others[1])} of the processors ({format_frac(others[0])} before)"
    )


_MEASURES = tuple(field.name for field in fields(CommFigures))


def fold_changes(rows: Sequence[CommChange]) -> list[CommChange]:
    """Fold layers that send the same before and the same after into one row each, their sums.

    One whose exposed time changed much more than its siblings' keeps a row of its own.
    """
    return _folded(rows, [abs(row.delta.exposed_ns or 0) for row in rows])


def fold_differing(rows: Sequence[CommChange]) -> list[CommChange]:
    """Fold the rows whose counts or bytes differ, whatever their times."""
    differing = [row for row in rows if not row.equal]
    return _folded(differing, [0] * len(differing))


def _folded(rows: Sequence[CommChange], costs: Sequence[float]) -> list[CommChange]:
    groups = fold_alike([(row.fqn, _sent(row)) for row in rows], costs)
    return largest_first([_sum([rows[i] for i in members]) for members in groups])


def _sent(row: CommChange) -> Hashable:
    sides = [None if side is None else (side.count, side.payload_bytes) for side in (row.before, row.after)]
    dtypes = tuple(row.before_dtypes), tuple(row.after_dtypes)
    sizes = tuple(row.before_group_sizes), tuple(row.after_group_sizes)
    return row.phase, row.op, *sides, *dtypes, *sizes


def _sum(rows: Sequence[CommChange]) -> CommChange:
    if len(rows) == 1:
        return rows[0]
    return replace(
        rows[0],
        fqn=family_name([row.fqn for row in rows]),
        layers=len(rows),
        before=_figures([row.before for row in rows]),
        after=_figures([row.after for row in rows]),
        delta=_figures([row.delta for row in rows]) or rows[0].delta,
        equal=all(row.equal for row in rows),
    )


def _figures(sides: Sequence[CommFigures | None]) -> CommFigures | None:
    """Sum measure by measure; None where the side has none of them."""
    there = [side for side in sides if side is not None]
    if not there:
        return None
    count = sum(side.count for side in there)
    sums = {name: known_sum([getattr(side, name) for side in there]) for name in _MEASURES if name != "count"}
    return CommFigures(count=count, **sums)


_BUSY = 0.1
"""Part of a step that ranks wait for a processor, from which on that is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side: what is known of it, each part absent where it is not."""

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


def compare(before: Side, after: Side) -> RunComparison:
    """Compare two sides in all they share. Raises ``InputError`` if that is nothing."""
    cut = [side for side in (before, after) if is_cut(side.trace)]
    traces = (None, None) if cut else (before.trace, after.trace)
    communication = communication_changes(traces[0] or before.communication, traces[1] or after.communication)
    step, breakdown = step_changes(*traces)
    pace = layer_pace(before.trace, after.trace) if cut else None
    unrecorded = unrecorded_change(unrecorded_of(before), unrecorded_of(after))
    spreads = _spreads(before, after) if pace is None else pace[1:]
    pairs = _rank_pairs(before.peaks, after.peaks)
    if step is None and unrecorded is None and communication is None and pace is None and not pairs:
        raise InputError(
            _uncomparable(cut)
            if cut
            else f"{before.path} has {_parts(before)}, {after.path} has {_parts(after)}: nothing to compare"
        )
    peaks = [peak_change(before.peaks[a], after.peaks[b], a, b) for a, b in pairs]
    peaks.sort(key=lambda row: -row.delta_allocated_bytes)
    settings = setting_changes(before.run, after.run)
    comparison = RunComparison(
        before=_describe(before, spreads[0]),
        after=_describe(after, spreads[1]),
        settings=settings,
        settings_folded=fold_settings(settings),
        step=step,
        breakdown=breakdown,
        exposed=exposed_change(breakdown),
        unrecorded_step=unrecorded,
        layer_pace=None if pace is None else pace[0],
        machine_changed=machine_change(_processors(before), _processors(after)),
        beyond_spread=beyond_spread(*spreads),
        communication=communication or [],
        communication_folded=fold_changes(communication or []),
        communication_differing=fold_differing(communication or []),
        communication_equal=None if communication is None else all(row.equal for row in communication),
        peaks=peaks,
        memory=compare_peaks(before.peaks[peaks[0].before_rank], after.peaks[peaks[0].after_rank])
        if peaks
        else None,
        warnings=[
            *([_uncomparable(cut)] if cut else []),
            *_warnings(before, after),
            *_busy(before),
            *_busy(after),
        ],
        before_timeline=before.trace.timeline if before.trace else None,
        after_timeline=after.trace.timeline if after.trace else None,
    )
    return replace(comparison, verdict=verdict(comparison), equalities=equalities(comparison))


def _uncomparable(cut: Sequence[Side]) -> str:
    names = " and ".join(side.path for side in cut)
    return (
        f"{names}: without step marks (ProfilerStep#N) a window is as long as the capture, so steps and "
        "collectives per step are not compared; capture whole steps, or record with fsdp2prof"
    )


def _processors(side: Side) -> ProcessorUse | None:
    return None if side.run is None else side.run.processors


def _busy(side: Side) -> list[str]:
    """Say that the machine of a side was busy: then the machine may explain a slower step."""
    ledger = None if side.trace is None else side.trace.ledger
    waited = (
        0.0 if ledger is None or not ledger.step_ns else ledger.causes_ns.get("starved", 0.0) / ledger.step_ns
    )
    if waited < _BUSY:
        return []
    return [
        f"{side.path}: the host was busy, its ranks waited {format_frac(waited)} of a step for a "
        "processor; the machine may explain a change of step time"
    ]


def _describe(side: Side, spread: StepSpread | None) -> ComparedInput:
    whole = () if is_cut(side.trace) else _ranks(side.trace)
    durations = [step.duration_ns for rank in whole for step in rank.steps]
    return ComparedInput(
        path=side.path,
        kind=side.kind,
        world_size=side.world_size,
        traced_ranks=[rank.rank for rank in _ranks(side.trace)],
        memory_ranks=sorted(side.peaks),
        steps=len(durations),
        step_min_ns=min(durations, default=None),
        step_max_ns=max(durations, default=None),
        spread=spread,
    )


def _spreads(before: Side, after: Side) -> tuple[StepSpread | None, StepSpread | None]:
    """Return the spreads of unrecorded steps, else of traced ones: whichever both sides know."""
    unrecorded = unrecorded_spread(unrecorded_of(before)), unrecorded_spread(unrecorded_of(after))
    traced = traced_spread(before.trace), traced_spread(after.trace)
    return next((pair for pair in (unrecorded, traced) if None not in pair), (None, None))


def unrecorded_of(side: Side) -> UnrecordedStep | None:
    """Return the steps that pay for no recording, over all ranks."""
    if side.run is not None:
        return unrecorded_step(rank.steps for rank in side.run.ranks)
    return None if side.trace is None else side.trace.unrecorded_step


def _rank_pairs(before: Mapping[int, Peak], after: Mapping[int, Peak]) -> list[tuple[int, int]]:
    """Pair the ranks that both sides have, else the fullest of each."""
    if not before or not after:
        return []
    shared = sorted(set(before) & set(after))
    if shared:
        return [(rank, rank) for rank in shared]
    fullest = [max(sorted(peaks), key=lambda rank: peaks[rank].allocated_bytes) for peaks in (before, after)]
    return [(fullest[0], fullest[1])]


def peak_change(before: Peak, after: Peak, before_rank: int, after_rank: int) -> RankPeakChange:
    """Return the change of a peak from one rank to another."""
    reserved = before.reserved_bytes, after.reserved_bytes
    return RankPeakChange(
        before_rank=before_rank,
        after_rank=after_rank,
        before_allocated_bytes=before.allocated_bytes,
        after_allocated_bytes=after.allocated_bytes,
        delta_allocated_bytes=after.allocated_bytes - before.allocated_bytes,
        before_reserved_bytes=reserved[0],
        after_reserved_bytes=reserved[1],
        delta_reserved_bytes=None
        if reserved[0] is None or reserved[1] is None
        else reserved[1] - reserved[0],
    )


def _warnings(before: Side, after: Side) -> list[str]:
    lines = []
    for side, other in ((before, after), (after, before)):
        missing = []
        if side.trace is None and other.trace is not None:
            missing.append("times" if side.communication is not None else "times and collectives")
        if not side.peaks and other.peaks:
            missing.append("memory")
        if missing:
            lines.append(f"{side.path} has {_parts(side)}: {' and '.join(missing)} cannot be compared")
    worlds = before.world_size, after.world_size
    if None not in worlds and worlds[0] != worlds[1]:
        lines.append(f"{worlds[0]} ranks before, {worlds[1]} after: times and bytes are means per rank")
    devices = [
        ", ".join(sorted({rank.device_type for rank in _ranks(side.trace)})) for side in (before, after)
    ]
    if all(devices) and devices[0] != devices[1]:
        lines.append(f"{devices[0]} before, {devices[1]} after: their times do not compare")
    for side, other in ((before, after), (after, before)):
        if side.kind == "estimate" and side.peaks and _devices(other) == {"cpu"}:
            lines.append(
                f"{other.path} ran on a CPU, {side.path} predicts a GPU with its libraries' workspaces "
                "and the temporaries of its kernels"
            )
    named = [f"{side.path}: {text}" for side in (before, after) for text in side.warnings]
    return list(dict.fromkeys(lines + named))


def _devices(side: Side) -> set[str]:
    recorded = {rank.device for rank in side.run.ranks if rank.device} if side.run else set()
    return {rank.device_type for rank in _ranks(side.trace)} or recorded


def _parts(side: Side) -> str:
    parts = [
        name
        for name, is_there in (
            ("a trace", side.trace is not None),
            ("predicted collectives", side.communication is not None),
            ("memory", bool(side.peaks)),
        )
        if is_there
    ]
    return " and ".join(parts) or "nothing"


def _ranks(trace: TraceAnalysis | None) -> list[RankTrace]:
    return [] if trace is None else trace.ranks
