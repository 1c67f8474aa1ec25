"""Result of ``analyze memory``: every rank's peak, with verdict and findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results import Shown
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.peak import Fragmentation, OutOfMemory, Peak, Remedy
from fsdp2prof.results.step import Focus

MEMORY_SCHEMA = "fsdp2prof.memory/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPeak:
    """One layer's own peak and growth in one phase."""

    fqn: str | None
    phase: str
    peak_bytes: int
    """Most allocated bytes of the device while this layer and phase ran."""
    delta_bytes: int
    """Growth: allocated bytes at the end minus at the start, summed over its intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtPeak:
    """Activity in the trace of the same run at the memory peak."""

    match: Literal["clock", "place"]
    """``clock``: the trace covers that instant; ``place``: the same position in a traced step."""
    step: int | None
    """Traced step with the same position."""
    operator: str | None
    """Innermost operator on the host."""
    launched: str | None
    """Device activity whose launch came last; null on a CPU."""
    running: list[str]
    """Device activities and collectives in flight: a kernel's name, or ``all_gather layers.3``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpan:
    """An interval of one phase of one step."""

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
    """Layers and phases in the order in which they first ran."""
    fragmentation: Fragmentation | None
    """State of the allocator; null without a caching allocator, or if memory was freed after the failure
    that ended the step."""
    oom: OutOfMemory | None
    truncated: bool
    timeline: dict[str, list[int]] = field(default_factory=dict)
    """Down-sampled allocated bytes by category over time, for plots: ``time_ns`` plus one list per
    category."""
    phase_spans: list[PhaseSpan] = field(default_factory=list)
    """Intervals of forward, backward and optimizer, on the clock of ``timeline``."""
    at_peak: AtPeak | None = None
    """Activity at the peak in the rank's trace; null for all but the rank with the highest peak, and if no
    trace covers its position."""
    device_total_bytes: int | None = None
    """Memory of the device; null if not recorded."""
    remedies: list[Remedy] = field(default_factory=list)
    """Changes with an upper bound of their savings, largest first."""
    model_part: str | None = None
    """Digest of the parameters' names and shapes: ranks with different digests hold different parts of the
    model, as pipeline stages do; null without a manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Key figures of the rank with the highest peak."""

    rank: int
    allocated_bytes: int
    reserved_bytes: int | None
    device_total_bytes: int | None
    device_frac: float | None
    """Reserved memory (allocated memory without a caching allocator) as a fraction of the device's; null
    if unknown."""
    unattributed_frac: float
    """Unattributed fraction of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAnalysis(Shown):
    """Result of ``analyze memory``: contents of each rank's memory at its peak."""

    schema: str = MEMORY_SCHEMA
    ranks: list[RankMemory]
    """Ranks, the highest peak first."""
    findings: list[Finding]
    warnings: list[str]
    key_figures: MemoryFigures | None = None
    verdict: list[str] = field(default_factory=list)
    """Sentences about the rank with the highest peak: its height, its phase, its largest parts, changes to
    try."""
    advice: list[str] = field(default_factory=list)
    """Notes on the rank with the highest peak: layers unsharded at the peak, other peaks almost as high."""
    focus: Focus | None = None
    """Filter of the shown part; null shows all. Sums over layers always cover all layers."""
