"""``compare``: what changed from one run, trace, recording or estimate to another.

Both sides are results already, measured or predicted. Collectives meet by (fqn, phase, op): a new dtype or
mesh then shows as a change of bytes, not as one row gone and another come. Means are over ranks and steps;
whether counts and bytes are equal is decided on the integer sums behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from fsdp2prof.analyzers.memory_compare import compare_peaks
from fsdp2prof.errors import InputError
from fsdp2prof.results import (
    BreakdownNs,
    CommChange,
    CommEstimate,
    CommFigures,
    CommRow,
    ComparedInput,
    GroupRow,
    Peak,
    RankPeakChange,
    RankTrace,
    RunComparison,
    RunSummary,
    SettingChange,
    TimeChange,
    TraceAnalysis,
)

__all__ = ["Side", "compare"]

_Key: TypeAlias = "tuple[str | None, str, str]"
"""Layer, phase, op."""


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


@dataclass(slots=True)
class _Sums:
    """Collectives of one key, summed over ``windows`` rank-steps; null is unknown."""

    windows: int
    count: int = 0
    payload_bytes: int | None = 0
    wire_bytes: int | None = 0
    total_ns: int | None = 0
    exposed_ns: int | None = 0
    stall_ns: int | None = 0
    dtypes: set[str] = field(default_factory=set)
    group_sizes: set[int] = field(default_factory=set)


_MEASURES = tuple(field.name for field in fields(CommFigures))
_EXACT = ("count", "payload_bytes", "wire_bytes")
_NO_COLLECTIVE = CommFigures(count=0, payload_bytes=0, wire_bytes=0, total_ns=0, exposed_ns=0, stall_ns=0)


def compare(before: Side, after: Side) -> RunComparison:
    """Compare two sides in all they share. Raises ``InputError`` if that is nothing."""
    sums = _comm_sums(before), _comm_sums(after)
    communication = [] if None in sums else _comm_changes(sums[0] or {}, sums[1] or {})
    step, breakdown = _times(before.trace, after.trace)
    pairs = _rank_pairs(before.peaks, after.peaks)
    if step is None and None in sums and not pairs:
        raise InputError(
            f"{before.path} has {_parts(before)}, {after.path} has {_parts(after)}: nothing to compare"
        )
    peaks = [_peak_change(before.peaks[a], after.peaks[b], a, b) for a, b in pairs]
    peaks.sort(key=lambda row: -row.delta_allocated_bytes)
    return RunComparison(
        before=_describe(before),
        after=_describe(after),
        settings=_settings(before.run, after.run) if before.run and after.run else [],
        step=step,
        breakdown=breakdown,
        communication=communication,
        communication_equal=None if None in sums else all(row.equal for row in communication),
        peaks=peaks,
        memory=compare_peaks(before.peaks[peaks[0].before_rank], after.peaks[peaks[0].after_rank])
        if peaks
        else None,
        warnings=_warnings(before, after),
    )


def _describe(side: Side) -> ComparedInput:
    durations = [step.duration_ns for rank in _ranks(side.trace) for step in rank.steps]
    return ComparedInput(
        path=side.path,
        kind=side.kind,
        world_size=side.world_size,
        traced_ranks=[rank.rank for rank in _ranks(side.trace)],
        memory_ranks=sorted(side.peaks),
        steps=len(durations),
        step_min_ns=min(durations, default=None),
        step_max_ns=max(durations, default=None),
    )


def _times(
    before: TraceAnalysis | None, after: TraceAnalysis | None
) -> tuple[TimeChange | None, list[TimeChange]]:
    """Return the change of the step and of its parts; none without steps on both sides."""
    steps = [[step for rank in _ranks(trace) for step in rank.steps] for trace in (before, after)]
    if not all(steps):
        return None, []
    whole = [[step.duration_ns for step in side] for side in steps]
    parts = [field.name for field in fields(BreakdownNs)]
    return _time("step", *whole), [
        _time(part, *([getattr(step.breakdown_ns, part) for step in side] for side in steps))
        for part in parts
    ]


def _time(part: str, before: list[int], after: list[int]) -> TimeChange:
    means = _mean(sum(before), len(before)), _mean(sum(after), len(after))
    delta = means[1] - means[0]
    return TimeChange(
        part=part,
        before_ns=means[0],
        after_ns=means[1],
        delta_ns=delta,
        delta_frac=delta / means[0] if means[0] else None,
    )


def _comm_sums(side: Side) -> dict[_Key, _Sums] | None:
    """Sum a side's collectives per key; None where they are not known."""
    if side.trace is not None:
        windows = sum(len(rank.steps) for rank in side.trace.ranks)
        return _sum_rows(((row.fqn, row) for row in side.trace.groups), windows) if windows else None
    if side.communication is None:
        return None
    rows = side.communication.groups
    several = len({row.root for row in rows}) > 1
    return _sum_rows(
        (f"root{row.root}:{row.fqn}" if several and row.fqn is not None else row.fqn, row) for row in rows
    )


def _sum_rows(rows: Iterable[tuple[str | None, GroupRow | CommRow]], windows: int = 1) -> dict[_Key, _Sums]:
    sums: dict[_Key, _Sums] = defaultdict(lambda: _Sums(windows))
    for fqn, row in rows:
        entry = sums[fqn, row.phase, row.op]
        for measure in _MEASURES:
            so_far, more = getattr(entry, measure), getattr(row, measure, None)
            setattr(entry, measure, None if so_far is None or more is None else so_far + more)
        entry.dtypes |= {row.dtype} if row.dtype is not None else set()
        entry.group_sizes |= {row.group_size} if row.group_size is not None else set()
    return sums


def _comm_changes(before: dict[_Key, _Sums], after: dict[_Key, _Sums]) -> list[CommChange]:
    rows = [_comm_change(key, before.get(key), after.get(key)) for key in {**before, **after}]
    rows.sort(key=lambda row: (-(row.delta.exposed_ns or 0), -abs(row.delta.wire_bytes or 0)))
    return rows


def _comm_change(key: _Key, before: _Sums | None, after: _Sums | None) -> CommChange:
    fqn, phase, op = key
    figures = [None if sums is None else _figures(sums) for sums in (before, after)]
    return CommChange(
        fqn=fqn,
        phase=phase,
        op=op,
        before=figures[0],
        after=figures[1],
        delta=_delta(figures[0] or _NO_COLLECTIVE, figures[1] or _NO_COLLECTIVE),
        equal=before is not None and after is not None and _is_equal(before, after),
        before_dtypes=sorted(before.dtypes) if before else [],
        after_dtypes=sorted(after.dtypes) if after else [],
        before_group_sizes=sorted(before.group_sizes) if before else [],
        after_group_sizes=sorted(after.group_sizes) if after else [],
    )


def _figures(sums: _Sums) -> CommFigures:
    def mean(total: int | None) -> float | None:
        return None if total is None else _mean(total, sums.windows)

    return CommFigures(
        count=_mean(sums.count, sums.windows),
        payload_bytes=mean(sums.payload_bytes),
        wire_bytes=mean(sums.wire_bytes),
        total_ns=mean(sums.total_ns),
        exposed_ns=mean(sums.exposed_ns),
        stall_ns=mean(sums.stall_ns),
    )


def _delta(before: CommFigures, after: CommFigures) -> CommFigures:
    def difference(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else other - one

    return CommFigures(
        count=after.count - before.count,
        payload_bytes=difference(before.payload_bytes, after.payload_bytes),
        wire_bytes=difference(before.wire_bytes, after.wire_bytes),
        total_ns=difference(before.total_ns, after.total_ns),
        exposed_ns=difference(before.exposed_ns, after.exposed_ns),
        stall_ns=difference(before.stall_ns, after.stall_ns),
    )


def _is_equal(before: _Sums, after: _Sums) -> bool:
    pairs = [(getattr(before, measure), getattr(after, measure)) for measure in _EXACT]
    return all(a is not None and b is not None and a * after.windows == b * before.windows for a, b in pairs)


def _mean(total: int, count: int) -> float:
    return total // count if total % count == 0 else total / count


def _rank_pairs(before: Mapping[int, Peak], after: Mapping[int, Peak]) -> list[tuple[int, int]]:
    """Pair the ranks that both sides have, else the fullest of each."""
    if not before or not after:
        return []
    shared = sorted(set(before) & set(after))
    if shared:
        return [(rank, rank) for rank in shared]
    fullest = [max(sorted(peaks), key=lambda rank: peaks[rank].allocated_bytes) for peaks in (before, after)]
    return [(fullest[0], fullest[1])]


def _peak_change(before: Peak, after: Peak, before_rank: int, after_rank: int) -> RankPeakChange:
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


def _settings(before: RunSummary, after: RunSummary) -> list[SettingChange]:
    """Return what was set up otherwise: command, libraries, environment, devices, sharding, optimizers."""
    sides = _setup(before), _setup(after)
    return [
        SettingChange(name=name, before=sides[0].get(name), after=sides[1].get(name))
        for name in {**sides[0], **sides[1]}
        if sides[0].get(name) != sides[1].get(name)
    ]


def _setup(run: RunSummary) -> dict[str, str]:
    known = {
        "command": " ".join(run.command),
        "world_size": "" if run.world_size is None else str(run.world_size),
        "device": ", ".join(sorted({rank.device for rank in run.ranks if rank.device})),
        "optimizer": ", ".join(run.optimizers),
        **{f"versions.{name}": value for name, value in run.versions.items()},
        **{f"environment.{name}": value for name, value in run.environment.items()},
    }
    several = len({group.root for group in run.shard_groups}) > 1
    for group in run.shard_groups:
        name = f"root{group.root}:{group.fqn}" if several else group.fqn
        known[f"sharding of {name or '(root)'}"] = (
            f"mesh {group.mesh}; {group.dtype}, gathered as {group.param_dtype or group.dtype}, "
            f"reduced as {group.reduce_dtype or group.param_dtype or group.dtype}; "
            f"reshard after forward: {group.reshard_after_forward}{'; offloaded' if group.offload else ''}"
        )
    return {name: value for name, value in known.items() if value}


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
                f"{other.path} ran on a CPU, {side.path} predicts a GPU: its libraries' workspaces and kernels' "
                "temporaries are in one only"
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
