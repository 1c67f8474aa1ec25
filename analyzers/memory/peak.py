"""The peak: height, time, place, and live memory; and every layer's own peak and growth.

Each layer's memory at an instant: one row per layer, and one row for layers with the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.layers import fold_names, natural_key
from fsdp2prof.analyzers.memory.attribution import own_frame
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, allocated_totals
from fsdp2prof.results.memory import LayerPeak
from fsdp2prof.results.peak import (
    CategoryBytes,
    LayerBytes,
    LayerMemory,
    LineBytes,
    LiveBlock,
    OtherPeak,
    Peak,
)
from fsdp2prof.tables.allocations import AllocationTable, Stacks
from fsdp2prof.tables.columns import IntArray, Strings
from fsdp2prof.vocabulary import CATEGORIES, layer_name

_BLOCKS = 10
_LINES = 10
_OTHERS = 5


def sum_by(values: IntArray, *columns: Strings) -> dict[tuple[str | None, ...], int]:
    """Sum values by the distinct combinations of string columns, largest sum first."""
    sums: dict[tuple[str | None, ...], int] = {}
    if not len(values):
        return sums
    codes = np.stack([column.codes for column in columns])
    distinct, inverse = np.unique(codes, axis=1, return_inverse=True)
    totals = np.zeros(distinct.shape[1], dtype=np.int64)
    np.add.at(totals, inverse.reshape(-1), values)
    for index in np.argsort(-totals, kind="stable").tolist():
        found = zip(distinct[:, index].tolist(), columns, strict=True)
        key = tuple(None if code < 0 else column.values[code] for code, column in found)
        sums[key] = sums.get(key, 0) + int(totals[index])
    return sums


def layer_bytes(allocations: AllocationTable) -> list[LayerBytes]:
    """Return the bytes of every (fqn, category), largest first; they sum to the table's."""
    sums = sum_by(allocations.size, allocations.fqn, allocations.category)
    return [LayerBytes(fqn=fqn, category=str(category), bytes=size) for (fqn, category), size in sums.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The program's position at an instant, as far as labels show it."""

    row: int
    """Row of the phases; -1 outside every one."""
    phase: str | None
    """Null outside every label."""
    fqn: str | None
    step: int | None


def place_at(view: PreparedRecording, time_ns: int) -> Place:
    """Look an instant up in the phases and steps; -1 is an unknown time."""
    phases, steps = view.phases, view.steps
    instant = np.array([time_ns], dtype=np.int64)
    row = int(intervals.containing(phases.start_ns, phases.end_ns, instant)[0])
    step = int(intervals.containing(steps.start_ns, steps.end_ns, instant)[0])
    return Place(
        row=row,
        phase=phases.phase[row] if row >= 0 else None,
        fqn=phases.fqn[row] if row >= 0 else None,
        step=int(steps.step[step]) if step >= 0 else None,
    )


def describe_peak(view: PreparedRecording) -> Peak:
    """Describe the instant of the largest total, the first one among equals.

    ``reserved_bytes`` is the most that was ever reserved, like ``torch.cuda.max_memory_reserved``. Outside
    of every label the phase is that of the allocation that made the peak.
    """
    order = view.peak_order
    live = view.live(order)
    time_ns = int(view.times[order]) if view.times[order] >= 0 else None
    place = place_at(view, -1 if time_ns is None else time_ns)
    by_category = sum_by(live.size, live.category)
    categories = {name: by_category.get((name,), 0) for name in CATEGORIES}
    by_layer = layer_bytes(live)
    layers = layer_rows(by_layer)
    return Peak(
        allocated_bytes=int(view.totals[order]),
        reserved_bytes=None if view.reserved is None else int(view.reserved.max()),
        step=place.step,
        phase=place.phase or _phase_of_maker(view),
        fqn=place.fqn,
        categories=categories,
        by_layer=by_layer,
        time_ns=time_ns,
        largest_blocks=largest_blocks(live, view.recording.stacks, time_ns),
        by_line=_line_bytes(live, view.recording.stacks),
        others=_other_peaks(view, place.row),
        by_category=category_shares(categories.items()),
        layers=layers,
        layers_folded=fold_layers(layers),
    )


def largest_blocks(live: AllocationTable, stacks: Stacks, time_ns: int | None) -> list[LiveBlock]:
    """Return the ten largest of some live allocations, largest first, the oldest first among equals."""
    blocks = []
    for row in np.argsort(-live.size, kind="stable")[:_BLOCKS].tolist():
        born, stack, step = int(live.alloc_ns[row]), int(live.stack[row]), int(live.step[row])
        frames = list(stacks[stack]) if stack >= 0 else []
        blocks.append(
            LiveBlock(
                bytes=int(live.size[row]),
                category=str(live.category[row]),
                fqn=live.fqn[row],
                phase=str(live.phase[row]),
                step=step if step >= 0 else None,
                op=live.op[row],
                age_ns=None if born < 0 or time_ns is None else time_ns - born,
                stack=frames,
                place=own_frame(frames),
            )
        )
    return blocks


def _line_bytes(live: AllocationTable, stacks: Stacks) -> list[LineBytes]:
    """Return the ten (line, category) that hold most of some live allocations, largest first."""
    rows, stack = np.unique(live.stack, return_inverse=True)
    places = Strings.intern([own_frame(stacks[row]) if row >= 0 else None for row in rows.tolist()])
    place = places.take(stack.reshape(-1))
    count = sum_by(np.ones(len(live), dtype=np.int64), place, live.category)
    lines = [
        LineBytes(place=key[0], category=str(key[1]), bytes=size, blocks=count[key])
        for key, size in sum_by(live.size, place, live.category).items()
    ]
    return lines[:_LINES] if places.values else []


def _other_peaks(view: PreparedRecording, but: int) -> list[OtherPeak]:
    """Return the five highest totals of any other (phase, fqn) than that of phase row ``but``."""
    phases = view.phases
    highest, _, _ = _over_rows(view)
    names = list(zip(phases.phase.to_list(), phases.fqn.to_list(), strict=True))
    best: dict[tuple[str | None, str | None], tuple[int, int]] = {}
    for row in np.argsort(-highest, kind="stable").tolist():
        best.setdefault(names[row], (int(highest[row]), int(phases.step[row])))
    if but >= 0:
        del best[names[but]]
    return [
        OtherPeak(allocated_bytes=total, step=step if step >= 0 else None, phase=str(phase), fqn=fqn)
        for (phase, fqn), (total, step) in list(best.items())[:_OTHERS]
    ]


def layer_peaks(view: PreparedRecording) -> list[LayerPeak]:
    """Return each layer's peak and growth by phase, in the order in which they first ran."""
    phases = view.phases
    highest, before, after = _over_rows(view)
    peaks: dict[tuple[str | None, str], list[int]] = {}
    names = zip(phases.fqn.to_list(), phases.phase.to_list(), strict=True)
    for (fqn, phase), high, first, last in zip(
        names, highest.tolist(), before.tolist(), after.tolist(), strict=True
    ):
        cell = peaks.setdefault((fqn, str(phase)), [0, 0])
        cell[0] = max(cell[0], high)
        cell[1] += last - first
    return [
        LayerPeak(fqn=fqn, phase=phase, peak_bytes=peak, delta_bytes=delta)
        for (fqn, phase), (peak, delta) in peaks.items()
    ]


def timeline(view: PreparedRecording, points: int = 400) -> dict[str, list[int]]:
    """Return allocated bytes by category at evenly spaced events, including the peak.

    Keys: ``time_ns``, one per category, and ``reserved`` if there is a caching allocator. At every point
    the categories sum to the allocated bytes.
    """
    events = len(view.times)
    even = np.linspace(0, events - 1, min(points, events)).astype(np.int64)
    chosen = np.unique(np.append(even, view.peak_order))
    course = {"time_ns": view.times[chosen].tolist()}
    for name in CATEGORIES:
        rows = view.allocations.take(view.allocations.category.equals(name))
        course[name] = allocated_totals(rows, events)[chosen].tolist()
    if view.reserved is not None:
        course["reserved"] = view.reserved[chosen].tolist()
    return course


def _phase_of_maker(view: PreparedRecording) -> str:
    """Phase of the allocation that made the peak; ``other`` if there is none."""
    made = np.flatnonzero(view.allocations.alloc_order == view.peak_order)
    return str(view.allocations.phase[int(made[0])]) if len(made) else "other"


def _over_rows(view: PreparedRecording) -> tuple[IntArray, IntArray, IntArray]:
    """Return the highest total inside each phase row, and the totals right before and at the end of it."""
    totals, phases = view.totals, view.phases
    first = np.searchsorted(view.times, phases.start_ns)
    last = np.searchsorted(view.times, phases.end_ns)
    padded = np.append(totals, totals[-1])
    before = totals[np.maximum(first - 1, 0)]
    after = totals[np.maximum(last - 1, 0)]
    inside = np.maximum.reduceat(padded, np.stack([first, last], axis=1).reshape(-1))[::2]
    return np.where(last > first, np.maximum(inside, before), before), before, after


def category_shares(categories: Iterable[tuple[str, int]]) -> list[CategoryBytes]:
    """Return categories with their share of the total, largest first, without empty ones."""
    held = [(name, size) for name, size in categories if size]
    whole = sum(size for _, size in held)
    held.sort(key=lambda item: -item[1])
    return [CategoryBytes(category=name, bytes=size, frac=size / whole) for name, size in held]


def layer_rows(by_layer: Sequence[LayerBytes]) -> list[LayerMemory]:
    """Return one row per layer, largest first."""
    cells: dict[str | None, dict[str, int]] = {}
    for row in by_layer:
        held = cells.setdefault(row.fqn, {})
        held[row.category] = held.get(row.category, 0) + row.bytes
    rows = [
        LayerMemory(name=layer_name(fqn), fqns=[fqn], bytes=sum(held.values()), categories=held)
        for fqn, held in cells.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, natural_key(row.name)))


def fold_layers(rows: Sequence[LayerMemory]) -> list[LayerMemory]:
    """Sum layers whose names differ in one number and that hold the same; the largest row first."""
    alike = [(row.fqns[0], tuple(sorted(row.categories.items()))) for row in rows]
    folded = []
    for name, members in fold_names(alike):
        first = rows[members[0]]
        folded.append(
            LayerMemory(
                name=name,
                fqns=[fqn for i in members for fqn in rows[i].fqns],
                bytes=first.bytes * len(members),
                categories={key: size * len(members) for key, size in first.categories.items()},
            )
        )
    return sorted(folded, key=lambda row: -row.bytes)
