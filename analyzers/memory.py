"""``analyze memory``: what fills each device at its peak, by layer, phase and kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from fsdp2prof.analyzers.memory_attribution import attribute
from fsdp2prof.analyzers.memory_categories import categorize
from fsdp2prof.analyzers.memory_fragmentation import fragmentation
from fsdp2prof.analyzers.memory_oom import out_of_memory
from fsdp2prof.analyzers.memory_peak import describe_peak, layer_peaks, timeline
from fsdp2prof.analyzers.memory_usage import allocated_totals, event_times, reserved_totals
from fsdp2prof.analyzers.phase_spans import phase_spans
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results import MemoryAnalysis, RankMemory
from fsdp2prof.tables import MemoryRecording, StepTable

__all__ = ["RankRecording", "analyze_memory"]

RankRecording: TypeAlias = "tuple[int, MemoryRecording, RankManifest | None]"
"""A rank, one of its devices' recordings, and what the recorder said about the rank, if it did."""


def analyze_memory(recordings: Sequence[RankRecording]) -> MemoryAnalysis:
    """Analyse recordings of any ranks, from any source."""
    return MemoryAnalysis(
        ranks=[_analyze_rank(rank, recording, manifest) for rank, recording, manifest in recordings],
        findings=[],
        warnings=[f"rank {rank}: {text}" for rank, recording, _ in recordings for text in recording.warnings],
    )


def _analyze_rank(rank: int, recording: MemoryRecording, manifest: RankManifest | None) -> RankMemory:
    steps = _steps(recording, manifest)
    attributed = attribute(recording, steps)
    allocations = categorize(attributed, manifest, recording.end_ns)
    totals = allocated_totals(allocations, recording.events)
    reserved = reserved_totals(recording.segments, recording.events)
    times = event_times(recording)
    return RankMemory(
        rank=rank,
        device=recording.device,
        source=recording.source,
        peak=describe_peak(allocations, attributed.phases, steps, recording.stacks, totals, reserved, times),
        layers=layer_peaks(attributed.phases, totals, times),
        fragmentation=fragmentation(recording, totals, reserved, int(np.argmax(totals))),
        oom=out_of_memory(recording, allocations, attributed.phases, totals, reserved),
        truncated=recording.truncated,
        timeline=timeline(allocations, reserved, times, int(np.argmax(totals))),
        phase_spans=phase_spans(attributed.phases),
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
