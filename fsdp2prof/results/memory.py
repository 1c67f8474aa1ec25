"""Result of ``analyze memory``: the peak, and two peaks compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown

__all__ = [
    "MEMORY_COMPARISON_SCHEMA",
    "MEMORY_SCHEMA",
    "AtPeak",
    "LayerBytes",
    "LayerPeak",
    "LiveBlock",
    "MemoryAnalysis",
    "MemoryComparison",
    "MemoryDelta",
    "OtherPeak",
    "Peak",
    "PhaseSpan",
    "RankMemory",
]

MEMORY_SCHEMA = "fsdp2prof.memory/1"
MEMORY_COMPARISON_SCHEMA = "fsdp2prof.memory_comparison/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Live bytes of one layer and category at the peak."""

    fqn: str | None
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPeak:
    """One layer's own peak and growth in one phase."""

    fqn: str | None
    phase: str
    peak_bytes: int
    """Most allocated bytes, device-wide, while this layer and phase ran."""
    delta_bytes: int
    """Allocated bytes at its end minus at its start, summed over its intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The instant of the largest allocated bytes."""

    allocated_bytes: int
    reserved_bytes: int | None
    """Most bytes reserved at any time; null where there is no caching allocator."""
    step: int | None
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Sums exactly to ``allocated_bytes``."""
    by_layer: list[LayerBytes]
    """Sums exactly to ``allocated_bytes``."""
    time_ns: int | None = None
    """Host time of the peak; null where the recording has no times."""
    largest_blocks: list[LiveBlock] = field(default_factory=list)
    """The ten largest allocations alive at the peak, largest first."""
    others: list[OtherPeak] = field(default_factory=list)
    """The highest totals elsewhere, one a (phase, fqn), highest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtPeak:
    """What the trace of the same run shows at the peak."""

    match: Literal["clock", "place"]
    """``clock``: the trace covers that instant; ``place``: the same place of a traced step stands for it."""
    step: int | None
    """Traced step that was looked at."""
    operator: str | None
    """Innermost operator on the host."""
    launched: str | None
    """Device activity whose launch came last; null on a CPU."""
    running: list[str]
    """Device activities and collectives in flight: a kernel's name, or ``all_gather layers.3``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """One allocation alive at an instant."""

    bytes: int
    category: str
    fqn: str | None
    phase: str
    """Phase that allocated it."""
    step: int | None
    """Step that allocated it; null if it was there before the history began."""
    op: str | None
    age_ns: int | None
    """Time since it was allocated; null if unknown."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPeak:
    """The highest total while one layer ran in one phase, and the step that had it."""

    allocated_bytes: int
    step: int | None
    phase: str
    fqn: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpan:
    """A stretch of one phase of one step."""

    start_ns: int
    end_ns: int
    step: int | None
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One device's memory analysis."""

    rank: int
    device: str
    source: str
    """``cuda_snapshot``, ``storage_count``, ``kineto`` or ``estimate``."""
    peak: Peak
    layers: list[LayerPeak]
    fragmentation: dict[str, Any]
    oom: dict[str, Any] | None
    truncated: bool
    timeline: dict[str, list[int]] = field(default_factory=dict)
    """Down-sampled allocated bytes by category over time, for plots: ``time_ns`` plus one list a category."""
    phase_spans: list[PhaseSpan] = field(default_factory=list)
    """When forward, backward and optimizer ran, on the clock of ``timeline``."""
    at_peak: AtPeak | None = None
    """From the rank's trace; null where there is none that has the peak's place, and for all but the fullest
    rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAnalysis(Shown):
    """Result of ``analyze memory``."""

    schema: str = MEMORY_SCHEMA
    ranks: list[RankMemory]
    findings: list[Finding]
    warnings: list[str]
    verdict: list[str] = field(default_factory=list)
    """Of the fullest rank: how high its peak is, where it is and what fills it, what to try."""
    advice: list[str] = field(default_factory=list)
    """What to look at next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDelta:
    """What one category, layer or place in the program holds at the peak of two recordings."""

    before_bytes: int
    after_bytes: int
    delta_bytes: int
    category: str | None = None
    fqn: str | None = None
    op: str | None = None
    stack: list[str] = field(default_factory=list)
    """Frames, innermost first; empty except by stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryComparison(Shown):
    """Two recordings at their peaks; each list sums to ``delta_bytes`` and starts with the largest change."""

    schema: str = MEMORY_COMPARISON_SCHEMA
    before: Peak
    after: Peak
    delta_bytes: int
    by_category: list[MemoryDelta]
    by_layer: list[MemoryDelta]
    by_stack: list[MemoryDelta]
