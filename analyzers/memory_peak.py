"""The peak: how high, when, where, and what is alive then; and every layer's own peak and growth."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.memory_usage import allocated_totals, live_at
from fsdp2prof.results import LayerBytes, LayerPeak, LiveBlock, OtherPeak, Peak
from fsdp2prof.tables import CATEGORIES, AllocationTable, IntArray, PhaseTable, Stacks, StepTable, Strings

__all__ = [
    "describe_peak",
    "largest_blocks",
    "layer_bytes",
    "layer_peaks",
    "other_peaks",
    "sum_by",
    "timeline",
]

_BLOCKS = 10
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


def describe_peak(
    allocations: AllocationTable,
    phases: PhaseTable,
    steps: StepTable,
    stacks: Stacks,
    totals: IntArray,
    reserved: IntArray | None,
    times: IntArray,
) -> Peak:
    """Describe the instant of the largest total, the first one among equals.

    ``totals``, ``reserved`` and ``times`` are indexed by order (:mod:`fsdp2prof.analyzers.memory_usage`).
    ``reserved_bytes`` is the most that was ever reserved, like ``torch.cuda.max_memory_reserved``.
    """
    order = int(np.argmax(totals))
    live = allocations.take(live_at(allocations, order))
    time_ns = int(times[order]) if times[order] >= 0 else None
    instant = np.array([-1 if time_ns is None else time_ns], dtype=np.int64)
    row = int(intervals.containing(phases.start_ns, phases.end_ns, instant)[0])
    step = int(intervals.containing(steps.start_ns, steps.end_ns, instant)[0])
    by_category = sum_by(live.size, live.category)
    return Peak(
        allocated_bytes=int(totals[order]),
        reserved_bytes=None if reserved is None else int(reserved.max()),
        step=int(steps.step[step]) if step >= 0 else None,
        phase=_phase_then(allocations, phases, row, order),
        fqn=phases.fqn[row] if row >= 0 else None,
        categories={name: by_category.get((name,), 0) for name in CATEGORIES},
        by_layer=layer_bytes(live),
        time_ns=time_ns,
        largest_blocks=largest_blocks(live, stacks, time_ns),
        others=other_peaks(phases, totals, times, row),
    )


def largest_blocks(live: AllocationTable, stacks: Stacks, time_ns: int | None) -> list[LiveBlock]:
    """Return the ten largest of some live allocations, largest first, the oldest first among equals."""
    blocks = []
    for row in np.argsort(-live.size, kind="stable")[:_BLOCKS].tolist():
        born, stack, step = int(live.alloc_ns[row]), int(live.stack[row]), int(live.step[row])
        blocks.append(
            LiveBlock(
                bytes=int(live.size[row]),
                category=str(live.category[row]),
                fqn=live.fqn[row],
                phase=str(live.phase[row]),
                step=step if step >= 0 else None,
                op=live.op[row],
                age_ns=None if born < 0 or time_ns is None else time_ns - born,
                stack=list(stacks[stack]) if stack >= 0 else [],
            )
        )
    return blocks


def other_peaks(phases: PhaseTable, totals: IntArray, times: IntArray, but: int) -> list[OtherPeak]:
    """Return the five highest totals of any other (step, phase, fqn) than that of phase row ``but``."""
    highest, _, _ = _over_rows(phases, totals, times)
    best: dict[tuple[int, str, str | None], int] = {}
    names = zip(phases.step.tolist(), phases.phase.to_list(), phases.fqn.to_list(), strict=True)
    keys = [(int(step), str(phase), fqn) for step, phase, fqn in names]
    for key, total in zip(keys, highest.tolist(), strict=True):
        best[key] = max(best.get(key, 0), total)
    if but >= 0:
        del best[keys[but]]
    ranked = sorted(best.items(), key=lambda item: -item[1])[:_OTHERS]
    return [
        OtherPeak(allocated_bytes=total, step=step if step >= 0 else None, phase=phase, fqn=fqn)
        for (step, phase, fqn), total in ranked
    ]


def layer_peaks(phases: PhaseTable, totals: IntArray, times: IntArray) -> list[LayerPeak]:
    """Return each layer's peak and growth by phase, in the order in which they first ran."""
    highest, before, after = _over_rows(phases, totals, times)
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


def timeline(
    allocations: AllocationTable, reserved: IntArray | None, times: IntArray, peak: int, points: int = 400
) -> dict[str, list[int]]:
    """Return allocated bytes by category at evenly spaced events, the peak among them.

    Keys: ``time_ns``, one per category, and ``reserved`` where there is a caching allocator. At every point
    the categories sum to the allocated bytes.
    """
    events = len(times)
    chosen = np.unique(np.append(np.linspace(0, events - 1, min(points, events)).astype(np.int64), peak))
    course = {"time_ns": times[chosen].tolist()}
    for name in CATEGORIES:
        rows = allocations.take(allocations.category.equals(name))
        course[name] = allocated_totals(rows, events)[chosen].tolist()
    if reserved is not None:
        course["reserved"] = reserved[chosen].tolist()
    return course


def _phase_then(allocations: AllocationTable, phases: PhaseTable, row: int, order: int) -> str:
    """Phase of the peak: of its instant, or outside of every label that of the allocation that made it."""
    made = np.flatnonzero(allocations.alloc_order == order)
    if row >= 0 or not len(made):
        return str(phases.phase[row]) if row >= 0 else "other"
    return str(allocations.phase[int(made[0])])


def _over_rows(phases: PhaseTable, totals: IntArray, times: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the highest total inside each phase row, and the totals right before and at the end of it."""
    first = np.searchsorted(times, phases.start_ns)
    last = np.searchsorted(times, phases.end_ns)
    padded = np.append(totals, totals[-1])
    before = totals[np.maximum(first - 1, 0)]
    after = totals[np.maximum(last - 1, 0)]
    inside = np.maximum.reduceat(padded, np.stack([first, last], axis=1).reshape(-1))[::2]
    return np.where(last > first, np.maximum(inside, before), before), before, after
