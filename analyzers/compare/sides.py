"""``compare``: what changed from one run, trace, recording or estimate to another.

Both sides are results already, measured or predicted, and each part is compared where both sides know it.

Collectives of repeated layers that changed alike, folded into one row.

A comparison in sentences: the verdict, and what is equal on both sides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdp2prof.analyzers.compare.baseline import (
    Side,
    baseline_of,
    common_spreads,
    peak_of,
    step_changes,
    sums_by_key,
    sums_of,
)
from fsdp2prof.analyzers.compare.communication import (
    ALL_LAYERS,
    changes_of_sums,
    communication_changes,
    largest_first,
)
from fsdp2prof.analyzers.compare.memory_peaks import compare_peaks
from fsdp2prof.analyzers.compare.settings import changed, device_changes, fold_settings, setting_changes
from fsdp2prof.analyzers.compare.times import (
    beyond_spread,
    exposed_change,
    is_cut,
    layer_pace,
    unrecorded_change,
)
from fsdp2prof.analyzers.layers import family_name, fold_alike, in_phase, named_layer
from fsdp2prof.analyzers.steps import known_sum
from fsdp2prof.errors import InputError
from fsdp2prof.results.comparison import (
    Baseline,
    CommChange,
    CommFigures,
    ComparedInput,
    RankPeakChange,
    RunComparison,
    StepSpread,
    TimeChange,
)
from fsdp2prof.results.peak import Peak
from fsdp2prof.results.run import ProcessorUse
from fsdp2prof.results.trace import RankTrace, TraceAnalysis
from fsdp2prof.units import format_bytes, format_frac, format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, category_label, op_label

_MORE = 0.1
"""Thresholds for a changed machine: additional part of a step that ranks wait for a processor, and
additional part of all processors that other programs use."""


def machine_change(before: ProcessorUse | None, after: ProcessorUse | None) -> str | None:
    """Return which side's ranks waited for processors used by other programs; None unless one waited much
    more.

    Ranks that starve each other (too many threads) also wait, but other programs then use no larger part:
    that is a change of the program.
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
        f"of a step for a CPU core ({format_frac(waited[0])} before), and other programs used "
        f"{format_frac(others[1])} of the CPU time ({format_frac(others[0])} before)"
    )


_MEASURES = tuple(field.name for field in fields(CommFigures))


def fold_changes(rows: Sequence[CommChange]) -> list[CommChange]:
    """Fold layers that send the same before and the same after into one row each, their sums.

    A layer whose exposed time changed much more than its siblings' has its own row.
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


def compare(before: Side, after: Side) -> RunComparison:
    """Compare two sides in all they share. Raises ``InputError`` if that is nothing."""
    cut = [side for side in (before, after) if is_cut(side.trace)]
    traces = (None, None) if cut else (before.trace, after.trace)
    communication = communication_changes(traces[0] or before.communication, traces[1] or after.communication)
    pace = layer_pace(before.trace, after.trace) if cut else None
    old, new = sums_of(before), sums_of(after)
    spreads = common_spreads(old, new) if pace is None else pace[1:]
    pairs = _rank_pairs(before.peaks, after.peaks)
    peaks = [peak_change(before.peaks[a], after.peaks[b], a, b) for a, b in pairs]
    peaks.sort(key=lambda row: -row.delta_allocated_bytes)
    settings = setting_changes(before.run, after.run) or device_changes(before.trace, after.trace)
    machine = machine_change(old.processors, new.processors)
    comparison = _joined(
        old,
        new,
        spreads,
        communication,
        whole=not cut,
        before=_described(before, old, spreads[0]),
        after=_described(after, new, spreads[1]),
        settings=settings,
        settings_folded=fold_settings(settings),
        layer_pace=None if pace is None else pace[0],
        communication_folded=fold_changes(communication or []),
        communication_differing=fold_differing(communication or []),
        peaks=peaks,
        memory=compare_peaks(before.peaks[peaks[0].before_rank], after.peaks[peaks[0].after_rank])
        if peaks
        else None,
        warnings=[
            *([_uncomparable(cut)] if cut else []),
            *_warnings(before, after),
            *([*_busy(before), *_busy(after)] if machine is None else []),  # the verdict says it then
        ],
        before_timeline=before.trace.timeline if before.trace else None,
        after_timeline=after.trace.timeline if after.trace else None,
    )
    known = (comparison.step, comparison.unrecorded_step, communication, pace)
    if not pairs and all(part is None for part in known):
        raise InputError(
            _uncomparable(cut)
            if cut
            else f"{before.path} has {_parts(before)}, {after.path} has {_parts(after)}: nothing to compare"
        )
    return comparison


def compare_with_baseline(path: str, before: Baseline, after: Side) -> RunComparison:
    """Compare a run with the baseline at ``path``. Raises ``InputError`` if they have nothing in common."""
    now = baseline_of(after)
    communication = changes_of_sums(sums_by_key(before), sums_by_key(now))
    settings = changed(before.settings, now.settings) if before.settings and now.settings else []
    spreads = common_spreads(before, now)
    ends = before.peak, now.peak
    peaks = None if ends[0] is None or ends[1] is None else (peak_of(ends[0]), peak_of(ends[1]))
    ranks = (ends[0].rank, ends[1].rank) if ends[0] and ends[1] else (0, 0)
    comparison = _joined(
        before,
        now,
        spreads,
        communication,
        before=_describe(path, before, spreads[0], *_counted_ranks(before)),
        after=_describe(after.path, now, spreads[1], *_counted_ranks(now)),
        settings=settings,
        settings_folded=settings,
        communication_folded=communication or [],
        communication_differing=[row for row in communication or [] if not row.equal],
        peaks=[] if peaks is None else [peak_change(*peaks, *ranks)],
        memory=None if peaks is None else compare_peaks(*peaks),
        warnings=_baseline_warnings(path, before, after.path, now, after),
    )
    if comparison.step is None and comparison.unrecorded_step is None and peaks is None:
        raise InputError(f"{path} and {after.path} have no data in common to compare")
    return comparison


def _joined(
    old: Baseline,
    new: Baseline,
    spreads: Sequence[StepSpread | None],
    communication: list[CommChange] | None,
    *,
    whole: bool = True,
    **parts: Any,
) -> RunComparison:
    """Compare the sums of two sides; steps only if both are ``whole``. ``parts`` are the other fields."""
    step, breakdown = step_changes(old, new) if whole else (None, [])
    comparison = RunComparison(
        step=step,
        breakdown=breakdown,
        exposed=exposed_change(breakdown),
        unrecorded_step=unrecorded_change(old.unrecorded_step, new.unrecorded_step),
        machine_changed=machine_change(old.processors, new.processors),
        beyond_spread=beyond_spread(*spreads),
        communication=communication or [],
        communication_equal=None if communication is None else all(row.equal for row in communication),
        **parts,
    )
    return replace(comparison, verdict=verdict(comparison), equalities=equalities(comparison))


def _uncomparable(cut: Sequence[Side]) -> str:
    names = " and ".join(side.path for side in cut)
    return (
        f"{names}: without step marks (ProfilerStep#N) the capture counts as one step, so steps and "
        "collectives per step are not compared; capture whole steps, or record with fsdp2prof"
    )


def _busy(side: Side) -> list[str]:
    """Say that a side's machine was busy, which may explain a slower step."""
    ledger = None if side.trace is None else side.trace.ledger
    waited = (
        0.0 if ledger is None or not ledger.step_ns else ledger.causes_ns.get("starved", 0.0) / ledger.step_ns
    )
    if waited < _BUSY:
        return []
    return [
        f"{side.path}: the host was busy; its ranks waited {format_frac(waited)} of a step for a "
        "CPU core, which may explain a change of step time"
    ]


def _describe(
    path: str, sums: Baseline, spread: StepSpread | None, traced: list[int], memory: list[int]
) -> ComparedInput:
    return ComparedInput(
        path=path,
        kind=sums.kind,
        world_size=sums.world_size,
        traced_ranks=traced,
        memory_ranks=memory,
        steps=sums.windows,
        step_min_ns=None if sums.spread is None else int(sums.spread.low_ns),
        step_max_ns=None if sums.spread is None else int(sums.spread.high_ns),
        spread=spread,
    )


def _described(side: Side, sums: Baseline, spread: StepSpread | None) -> ComparedInput:
    if is_cut(side.trace):
        sums = replace(sums, windows=0, spread=None)
    return _describe(side.path, sums, spread, [rank.rank for rank in _ranks(side.trace)], sorted(side.peaks))


def _counted_ranks(side: Baseline) -> tuple[list[int], list[int]]:
    """Return stand-ins for the traced ranks, of which a baseline has the number, and the rank of its peak."""
    return list(range(side.traced_ranks)), [] if side.peak is None else [side.peak.rank]


def _rank_pairs(before: Mapping[int, Peak], after: Mapping[int, Peak]) -> list[tuple[int, int]]:
    """Pair the ranks that both sides have, otherwise the rank with the highest peak of each."""
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
        lines.append(f"{devices[0]} before, {devices[1]} after: their times cannot be compared")
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


def _baseline_warnings(path: str, before: Baseline, after_path: str, now: Baseline, after: Side) -> list[str]:
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
    return [*lines, *_busy(after), *(f"{after_path}: {text}" for text in after.warnings)]


_SAME = 0.0005
"""Part of a step up to which a change is written as 0.0 %."""


def verdict(comparison: RunComparison) -> list[str]:
    """Return at most three sentences: the step, its largest change, memory."""
    memory = comparison.memory.verdict if comparison.memory is not None else []
    return [*_step(comparison), *_place(comparison), *memory][:3]


def equalities(comparison: RunComparison) -> list[str]:
    """Return the quantities that are equal to the byte on both sides."""
    lines = []
    rows = comparison.communication
    equal = sum(row.equal for row in rows)
    if equal:
        which = f"all {equal}" if equal == len(rows) else f"{equal} of {len(rows)}"
        lines.append(f"counts, payload and wire bytes of the collectives: {which} rows (layer, phase, op)")
    memory = comparison.memory
    if memory is not None:
        kinds = [
            category_label(row.category or "unattributed")
            for row in memory.by_category
            if row.delta_bytes == 0 and row.before_bytes
        ]
        whole = ["the whole peak"] if memory.delta_bytes == 0 else []
        if kinds:
            lines.append(f"bytes at the peak: {', '.join([*whole, *kinds])}")
    return lines


def _step(comparison: RunComparison) -> Iterator[str]:
    change = comparison.unrecorded_step or comparison.step or comparison.layer_pace
    before, after = comparison.before.spread, comparison.after.spread
    if change is None or before is None or after is None:
        return
    which = f"The {before.measured_on} step"
    if before.measured_on == "layers":
        change = comparison.layer_pace or change
        which = f"From one forward of `{change.part}` to the next the time"
    if change.delta_frac is None or abs(change.delta_frac) < _SAME:
        same = "is" if before.measured_on == "layers" else "takes"
        yield f"{which} {same} {format_ns(change.after_ns)} on both sides."
        return
    sense = "slower" if change.delta_ns > 0 else "faster"
    if before.measured_on == "layers":
        sense = "longer" if change.delta_ns > 0 else "shorter"
    machine = f"; {comparison.machine_changed}" if comparison.machine_changed else ""
    if comparison.beyond_spread is False:
        yield (
            f"No change beyond the spread of the steps: {which[0].lower()}{which[1:]} is "
            f"{format_ns(change.after_ns)} after {format_ns(change.before_ns)} "
            f"({100 * change.delta_frac:+.1f}%; {_range(before)} before, {_range(after)} after){machine}."
        )
        return
    yield (
        f"{which} is {100 * abs(change.delta_frac):.1f}% {sense}: {format_ns(change.after_ns)} after "
        f"{format_ns(change.before_ns)}, {_beyond(comparison, before, after)}{machine}."
    )


def _beyond(comparison: RunComparison, before: StepSpread, after: StepSpread) -> str:
    if comparison.beyond_spread is None:
        return f"too few steps to exclude coincidence ({before.steps} and {after.steps})"
    return f"beyond the spread of the steps ({_range(before)} before, {_range(after)} after)"


def _range(spread: StepSpread) -> str:
    return f"{format_ns(spread.low_ns)} to {format_ns(spread.high_ns)}"


def _place(comparison: RunComparison) -> Iterator[str]:
    if comparison.communication_equal and comparison.step is None:
        rows = plural(len(comparison.communication), "row")
        yield f"Communication is equal: counts, payload and wire bytes of all {rows}."
        return
    step = 0.0 if comparison.step is None else comparison.step.before_ns
    shown = comparison.beyond_spread is not False
    parts = [row for row in comparison.breakdown if shown and abs(row.delta_ns) > _SAME * step]
    timed = [row for row in comparison.communication_folded if row.delta.exposed_ns]
    if parts:
        part = max(parts, key=lambda row: abs(row.delta_ns))
        yield f"Of the traced step, {_part(part)} changed most{_and(timed)}."
        return
    sent = comparison.communication_differing
    if sent:
        row = max(sent, key=lambda row: abs(row.delta.wire_bytes or row.delta.payload_bytes or 0))
        yield f"Communication differs most in the {_collective(row)}: {_sent_more(row)}."


def _part(row: TimeChange) -> str:
    return f"{BREAKDOWN_PARTS[row.part].label} ({_signed(format_ns(row.delta_ns), row.delta_ns)})"


def _and(timed: list[CommChange]) -> str:
    if not timed:
        return ""
    row = max(timed, key=lambda row: abs(row.delta.exposed_ns or 0))
    delta = row.delta.exposed_ns or 0
    return f"; among collectives, the {_collective(row)} ({_signed(format_ns(delta), delta)} exposed)"


def _collective(row: CommChange) -> str:
    where = "outside every layer" if row.fqn is None else f"of {named_layer(row.fqn)}"
    if row.fqn == ALL_LAYERS:
        where = f"of {ALL_LAYERS}"
    return f"{op_label(row.op)} {where} {in_phase(row.phase)}"


def _sent_more(row: CommChange) -> str:
    return f"{_wire(row.before)} on the wire before, {_wire(row.after)} after"


def _wire(side: CommFigures | None) -> str:
    if side is None:
        return "nothing"
    return "unknown" if side.wire_bytes is None else format_bytes(round(side.wire_bytes))


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text
