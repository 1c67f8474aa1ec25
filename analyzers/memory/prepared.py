"""One recording made ready for analysis: attributed allocations, phases, and the totals after every event."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.analyzers.memory.failures import as_of_failures, ending_failures, until_failure
from fsdp2prof.analyzers.memory.usage import allocated_totals, event_times, live_at, reserved_totals
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables import AllocationTable, IntArray, MemoryRecording, PhaseTable, StepTable

__all__ = ["PreparedRecording", "prepare"]


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

    def live(self, order: int) -> AllocationTable:
        """Return the allocations that are live right after an event."""
        return self.allocations.take(live_at(self.allocations, order))


def prepare(recording: MemoryRecording, manifest: RankManifest | None) -> PreparedRecording:
    """Attribute a recording, with what the recorder said about its rank if it did.

    One that ends with a failed request, and with letting everything go after it, is read up to the failure.
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
    """Return the recording's own steps, else those that the recorder timed for it."""
    if len(recording.steps) or manifest is None:
        return recording.steps
    steps = [step for step in manifest.steps if step.kind == "memory"]
    start = np.array([step.start_ns for step in steps], dtype=np.int64)
    return StepTable(
        step=np.array([step.step for step in steps], dtype=np.int64),
        start_ns=start,
        end_ns=start + np.array([step.duration_ns for step in steps], dtype=np.int64),
    )
