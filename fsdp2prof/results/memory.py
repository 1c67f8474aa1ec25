"""Result of ``analyze memory``: every rank's peak, and what to think of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.peak import Fragmentation, OutOfMemory, Peak, Remedy
from fsdp2prof.results.shown import Shown
from fsdp2prof.results.timeline import Focus

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
    """State of the trace of the same run at the peak."""

    match: Literal["clock", "place"]
    """``clock``: the trace covers that instant; ``place``: the same position in a traced step."""
    step: int | None
    """Traced step with the same place."""
    operator: str | None
    """Innermost operator on the host."""
    launched: str | None
    """Device activity whose launch came last; null on a CPU."""
    running: list[str]
    """Device activities and collectives in flight: a kernel's name, or ``all_gather layers.3``."""


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
    """Layers and phases in the order in which they first ran."""
    fragmentation: Fragmentation | None
    """Null without a caching allocator, and where memory was freed after the failure that ended the work."""
    oom: OutOfMemory | None
    truncated: bool
    timeline: dict[str, list[int]] = field(default_factory=dict)
    """Down-sampled allocated bytes by category over time, for plots: ``time_ns`` plus one list a category."""
    phase_spans: list[PhaseSpan] = field(default_factory=list)
    """When forward, backward and optimizer ran, on the clock of ``timeline``."""
    at_peak: AtPeak | None = None
    """From the rank's trace; null where there is none that has the peak's place, and for all but the fullest
    rank."""
    device_total_bytes: int | None = None
    """Memory of the device; null where it is not recorded."""
    remedies: list[Remedy] = field(default_factory=list)
    """What each change would take off the peak, most bytes first."""
    model_part: str | None = None
    """Digest of its parameters' names and shapes: ranks of another hold another part of the model, as stages
    of a pipeline do; null where no manifest says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """The numbers of the fullest rank that a reader needs first."""

    rank: int
    allocated_bytes: int
    reserved_bytes: int | None
    device_total_bytes: int | None
    device_frac: float | None
    """Reserved memory, or allocated where nothing reserves, of the device's; null where that is unknown."""
    unattributed_frac: float
    """Unattributed part of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAnalysis(Shown):
    """Result of ``analyze memory``: what fills the device at the peak of each rank."""

    schema: str = MEMORY_SCHEMA
    ranks: list[RankMemory]
    """Ranks, the highest peak first."""
    findings: list[Finding]
    warnings: list[str]
    key_figures: MemoryFigures | None = None
    verdict: list[str] = field(default_factory=list)
    """Sentences about the fullest rank: how high its peak is, where it is, its largest parts, what to try."""
    advice: list[str] = field(default_factory=list)
    """Notes on the fullest rank: layers unsharded at its peak, other peaks almost as high."""
    focus: Focus | None = None
    """Part of the analysis that is shown; null is all. Sums over layers stay those of all."""
