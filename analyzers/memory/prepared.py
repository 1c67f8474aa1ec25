"""One recording made ready for analysis: attributed allocations, phases, and the totals after every event.

Requests that failed, and the work they ended.

A program that runs out of memory lets go of everything its step held, often while the history is still being
written. Lifetimes then say nothing: what was kept for the backward is freed like a temporary. So memory that
such a failure set free counts as it stood at the failure.

A failure *ended its work* if, at some point after it, a quarter of what was alive then is gone and less than
that has been made anew. Work that goes on (a library that tries another algorithm) makes new memory before it
frees as much.

Exact use of memory over a recording: running totals, what is live at an instant, and where the peaks are.

Totals are indexed by order: ``totals[k]`` is what was held right after event ``k``. What was there before the
history began counts from the start, also when it was freed inside, so the largest total is the true peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.allocations import AllocationTable, BlockTable, MemoryRecording, SegmentTable
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray
from fsdp2prof.tables.trace import PhaseTable, StepTable


def running_total(alloc_order: IntArray, free_order: IntArray, size: IntArray, events: int) -> IntArray:
    """Return the sum of ``size`` held after each of ``events`` orders, one entry even if there are none.

    An ``alloc_order`` of -1 was there before; a ``free_order`` of ``NEVER`` stays.
    """
    delta = np.zeros(max(events, 1), dtype=np.int64)
    born, freed = alloc_order >= 0, free_order != NEVER
    np.add.at(delta, alloc_order[born], size[born])
    np.subtract.at(delta, free_order[freed], size[freed])
    return np.asarray(size[~born].sum(dtype=np.int64) + np.cumsum(delta), dtype=np.int64)


def allocated_totals(allocations: AllocationTable, events: int) -> IntArray:
    """Return the allocated bytes after each event."""
    return running_total(allocations.alloc_order, allocations.free_order, allocations.size, events)


def reserved_totals(segments: SegmentTable, events: int) -> IntArray | None:
    """Return the bytes taken from the device after each event; ``None`` without a caching allocator."""
    if not len(segments):
        return None
    return running_total(segments.alloc_order, segments.free_order, segments.size, events)


def live_at(allocations: AllocationTable, order: int) -> BoolArray:
    """Return the mask of the allocations that are live right after event ``order``."""
    return np.asarray((allocations.alloc_order <= order) & (order < allocations.free_order))


def event_times(recording: MemoryRecording) -> IntArray:
    """Return the host time after each event, never decreasing; -1 if no time is known yet.

    Events that are neither an allocation nor a free take the time of the previous one.
    """
    allocations = recording.allocations
    times = np.full(max(recording.events, 1), -1, dtype=np.int64)
    born, freed = allocations.alloc_order >= 0, allocations.free_order != NEVER
    times[allocations.alloc_order[born]] = allocations.alloc_ns[born]
    times[allocations.free_order[freed]] = allocations.free_ns[freed]
    return np.asarray(np.maximum.accumulate(times), dtype=np.int64)


_GONE = 4
"""One part in this many of the live memory must be freed."""
_AFTERMATH = 20
"""A history ends with a failure if less than one part in this many of its memory is allocated after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request whose failure ended the work it was part of."""

    order: int
    time_ns: int
    last: bool
    """Whether hardly anything was made after it."""


def ending_failures(recording: MemoryRecording) -> list[Failure]:
    """Return the failures that ended their work, in order; of several with no free between, the last."""
    allocations, ooms = recording.allocations, recording.ooms
    frees_before = np.searchsorted(np.sort(allocations.free_order), ooms.order)
    ooms = ooms.take(np.diff(frees_before, append=-1) != 0)
    found = []
    for order, time_ns in zip(ooms.order.tolist(), ooms.time_ns.tolist(), strict=True):
        freed, made = _after(allocations, order)
        if len(freed) and bool(((freed * _GONE >= freed[-1]) & (made < freed)).any()):
            made_at_all = int(allocations.size[allocations.alloc_order > order].sum())
            last = made_at_all * _AFTERMATH < int(freed[-1])
            found.append(Failure(order=order, time_ns=time_ns, last=last))
    return found


def _after(allocations: AllocationTable, order: int) -> tuple[IntArray, IntArray]:
    """Return, after each free of the memory alive at ``order``, the bytes freed and the bytes allocated by
    then.

    Counts only memory that the history shows being allocated and later freed.
    """
    held = live_at(allocations, order) & (allocations.alloc_order >= 0) & (allocations.free_order != NEVER)
    rows = np.flatnonzero(held)
    rows = rows[np.argsort(allocations.free_order[rows], kind="stable")]
    later = allocations.alloc_order > order
    made = np.concatenate([[0], np.cumsum(allocations.size[later])])
    by_then = np.searchsorted(allocations.alloc_order[later], allocations.free_order[rows])
    return np.cumsum(allocations.size[rows]), made[by_then]


def until_failure(recording: MemoryRecording, failure: Failure) -> MemoryRecording:
    """Return a recording as if it had ended with a failure.

    The blocks of its end are left out: they show the memory left after everything had been freed.
    """
    allocations, segments, order = recording.allocations, recording.segments, failure.order
    allocations = allocations.take(allocations.alloc_order <= order)
    gone = allocations.free_order > order
    segments = segments.take(segments.alloc_order <= order)
    return replace(
        recording,
        allocations=allocations.with_columns(
            free_order=np.where(gone, NEVER, allocations.free_order),
            free_ns=np.where(gone, NEVER, allocations.free_ns),
            release_order=np.where(allocations.release_order > order, NEVER, allocations.release_order),
        ),
        segments=segments.with_columns(
            free_order=np.where(segments.free_order > order, NEVER, segments.free_order)
        ),
        blocks=BlockTable.empty(),
        ooms=recording.ooms.take(recording.ooms.order <= order),
        events=order + 1,
        end_ns=failure.time_ns,
    )


def as_of_failures(
    allocations: AllocationTable, failures: list[Failure], end_ns: int
) -> tuple[AllocationTable, IntArray]:
    """Return allocations as they were when their work ended, and that time, one per row.

    Memory alive at a failure was never freed; all other work ended with the history.
    """
    free_order, free_ns = allocations.free_order.copy(), allocations.free_ns.copy()
    ends = np.full(len(allocations), end_ns, dtype=np.int64)
    for failure in reversed(failures):
        held = live_at(allocations, failure.order)
        free_order[held] = free_ns[held] = NEVER
        ends[held] = failure.time_ns
    return allocations.with_columns(free_order=free_order, free_ns=free_ns), ends


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRecording:
    """A recording with everything that is derived from it once; the arrays are indexed by order."""

    recording: MemoryRecording
    allocations: AllocationTable
    """With step, phase, fqn, activity and category."""
    phases: PhaseTable
    steps: StepTable
    totals: IntArray
    """Allocated bytes after each event."""
    reserved: IntArray | None
    """Reserved bytes after each event; null without a caching allocator."""
    times: IntArray
    """Host time of each event; -1 unknown."""
    peak_order: int
    """The event that made the highest total, the first one among equals."""

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at the peak."""
        return int(self.totals[self.peak_order])

    def live(self, order: int) -> AllocationTable:
        """Return the allocations that are live right after an event."""
        return self.allocations.take(live_at(self.allocations, order))


def prepare(recording: MemoryRecording, manifest: RankManifest | None) -> PreparedRecording:
    """Attribute a recording, with the recorder's data about its rank if available.

    A recording that ends with a failed request, after which everything is freed, is read up to the
    failure.
    """
    failures = ending_failures(recording)
    if failures and failures[-1].last:
        recording = until_failure(recording, failures[-1])
    steps = _steps(recording, manifest)
    judged, ends = as_of_failures(recording.allocations, failures, recording.end_ns)
    attributed = attribute(
        replace(recording, allocations=judged), steps, manifest.root_count if manifest else 0
    )
    allocations = categorize(attributed, manifest, ends).with_columns(
        free_order=recording.allocations.free_order, free_ns=recording.allocations.free_ns
    )
    totals = allocated_totals(allocations, recording.events)
    return PreparedRecording(
        recording=recording,
        allocations=allocations,
        phases=attributed.phases,
        steps=steps,
        totals=totals,
        reserved=reserved_totals(recording.segments, recording.events),
        times=event_times(recording),
        peak_order=int(np.argmax(totals)),
    )


def _steps(recording: MemoryRecording, manifest: RankManifest | None) -> StepTable:
    """Return the recording's own steps, otherwise those that the recorder timed for it."""
    if len(recording.steps) or manifest is None:
        return recording.steps
    steps = [step for step in manifest.steps if step.kind == "memory"]
    start = np.array([step.start_ns for step in steps], dtype=np.int64)
    return StepTable(
        step=np.array([step.step for step in steps], dtype=np.int64),
        start_ns=start,
        end_ns=start + np.array([step.duration_ns for step in steps], dtype=np.int64),
    )
