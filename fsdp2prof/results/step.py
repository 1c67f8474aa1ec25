"""The training step: its parts, their means, the duration of unrecorded steps, its timeline in lanes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.communication import LateCause


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakdownNs:
    """Disjoint parts of a step window; they sum to it exactly."""

    compute: int
    fsdp_copy: int
    exposed_all_gather: int
    exposed_reduce_scatter: int
    exposed_all_reduce: int
    exposed_other_comm: int
    exposed_memcpy: int
    idle: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBreakdown:
    """One step of one rank."""

    step: int
    duration_ns: int
    breakdown_ns: BreakdownNs
    start_ns: int
    """Start on the trace's own clock."""
    idle_ns: dict[str, int] = field(default_factory=dict)
    """Idle time by cause; sums to ``breakdown_ns.idle``.

    ``host_bound`` (nothing launched in time), ``data_loader`` (the same, while the training got its next
    batch), ``device_sync`` and ``memcpy`` (the host had been waiting for the device, or for a copy),
    ``communication`` (the caller was blocked while no transfer ran), ``queued`` (launched but not
    started), ``profiler``, ``unknown`` (the launch is not in the file).
    """
    flops: int | None = None
    """Floating-point operations of matrix products and attention, recomputation included; null without
    recorded shapes, or with operators whose shapes do not determine them (convolutions)."""
    work: int | None = None
    """Operations including convolutions, whose first backward may count twice; for comparing ranks that
    train one model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncompleteStep:
    """A step with missing device records."""

    step: int
    launches: int
    """Number of calls that launched a kernel, graph, copy or fill; of collectives only, if just those miss
    records."""
    missing: int
    """Number of calls without a device record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPace:
    """Time from one forward of repeated layers to the next, on the device if there is one."""

    layer: str
    """Name of the layers with a star instead of their number: ``layers.*``."""
    intervals: int
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrecordedStep:
    """Wall time of unrecorded steps, on the host's clock.

    A rank's first step includes initialisation: it counts only if the rank has no other.
    """

    steps: int
    """Number of steps over all ranks."""
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float
    """Upper quartile; half of the steps lie between the quartiles."""
    min_ns: int
    max_ns: int
    traced_median_ns: float | None
    """Median of the traced steps on the same clock; null if none ended."""
    slowdown: float | None
    """``traced_median_ns`` over ``median_ns`` (or of the means if steps are of several kinds): the
    slowdown by tracing."""
    mean_ns: float | None = None
    """Mean step time if steps are of several kinds (models updated alternately)."""
    upper_decile_ns: float | None = None
    """A tenth of the steps take longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Training speed of one rank; null is unknown."""

    step_ns: int
    """Median duration of its steps: unrecorded ones if the run has them, otherwise traced ones."""
    tokens_per_s: float | None
    """Tokens per second: tokens of a step over all ranks, divided by its duration."""
    flops_per_s: float | None
    """Rate of recorded operations of this rank over their steps' durations."""
    mfu: float | None
    """Operations as a fraction of the device's peak; recomputed operations count."""
    measured_on: Literal["unrecorded", "traced"] = "traced"
    """Kind of the steps in the duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeans:
    """One rank's mean traced step."""

    rank: int
    steps: int
    """Number of step windows that the means cover."""
    step_ns: float
    breakdown_ns: dict[str, float]
    """Part of :class:`BreakdownNs` -> mean; sums to ``step_ns``."""
    communication_ns: float
    """Communication: union of the rank's collectives."""
    exposed_ns: float
    overlap_frac: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceTotals:
    """The mean traced step over all ranks; null where there is no step."""

    windows: int = 0
    """Number of steps of all ranks, over which every mean of the analysis is taken."""
    step_ns: float | None = None
    breakdown_ns: dict[str, float] = field(default_factory=dict)
    """Part of :class:`BreakdownNs` -> mean; sums to ``step_ns``."""
    breakdown_frac: dict[str, float] = field(default_factory=dict)
    """The same as fractions of ``step_ns``."""
    idle_ns: dict[str, float] = field(default_factory=dict)
    """Idle time by cause: mean, largest first; sums to ``breakdown_ns.idle``."""
    communication_ns: float | None = None
    """Communication: union of a rank's collectives."""
    exposed_ns: float | None = None
    """Exposed communication: the part of ``communication_ns`` that neither compute nor FSDP copies hide."""
    exposed_frac: float | None = None
    """Exposed fraction: ``exposed_ns`` over ``step_ns``."""
    overlap_frac: float | None = None
    """Overlap: 1 - exposed / communication; null without communication."""
    attributed_frac: float | None = None
    """Attributed communication time as a fraction of all; null without communication."""
    tokens_per_s: float | None = None
    """Tokens per second of the slowest rank, which limits all ranks."""
    flops_per_s: float | None = None
    """Operations per second, mean over the ranks."""
    mfu: float | None = None
    """MFU, mean over the ranks."""
    fastest_rank: int | None = None
    """Fastest rank by mean step."""
    median_rank: int | None = None
    slowest_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Focus:
    """Filter of an analysis by layer, rank and step; null shows all. The analysis itself covers
    everything."""

    layers: list[str] | None
    """Patterns of layer names: ``layers.3*``, ``(root)``."""
    ranks: list[int] | None
    steps: list[int] | None
    """Steps of the trace."""

    def __str__(self) -> str:
        """Return the filter in words: ``layers layers.3*; rank 1``."""
        parts = [f"layers {', '.join(self.layers)}"] if self.layers is not None else []
        for what, numbers in (("rank", self.ranks), ("step", self.steps)):
            if numbers is not None:
                some = what if len(numbers) == 1 else f"{what}s"
                parts.append(f"{some} {', '.join(map(str, numbers))}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineLane:
    """Spans of one lane sorted by start, stored by column: entry *i* of every list is span *i*."""

    lane: str
    """``host`` (what the issuing threads were doing), ``compute``, ``fsdp_copy``, ``all_gather``,
    ``reduce_scatter``, ``all_reduce``, ``other_comm`` or ``memcpy``."""
    start_ns: list[int]
    """Starts on the timeline's clock; negative if the host runs ahead of the step."""
    duration_ns: list[int]
    busy_ns: list[int]
    """Busy time within the span, which is less than its length if small gaps are folded in."""
    count: list[int]
    """Kernels, copies or collectives in the span."""
    layer: list[int]
    """Index in :attr:`StepTimeline.layers`; for a folded span, that of its longest part."""
    phase: list[int]
    """Index in :attr:`StepTimeline.phases`."""
    name: list[int]
    """Index in :attr:`StepTimeline.names`: kernel, activity or collective; for a folded span, the longest."""
    payload_bytes: list[int | None] = field(default_factory=list)
    """Payload of collectives; empty in the other lanes."""
    peer_wait_ns: list[int | None] = field(default_factory=list)
    """For collectives: part of the duration spent waiting for the last rank; null if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineStall:
    """A wait of the compute stream for a collective."""

    lane: str
    fqn: str | None
    phase: str
    start_ns: int
    """Start of the collective."""
    end_ns: int
    needed_ns: int
    """Time from which the compute stream had nothing to do but wait."""
    stall_ns: int
    cause: LateCause | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    start_ns: int
    """Start of its step window, on the timeline's clock."""
    duration_ns: int
    lanes: list[TimelineLane]
    """Lanes with spans, from top to bottom."""
    stalls: list[TimelineStall]
    """Waits, longest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """A typical step: the one of median duration among those recorded on most ranks."""

    step: int
    duration_ns: int
    """From the beginning of the earliest step window, 0 on the timeline's clock, to the latest span."""
    aligned: bool
    """Whether all ranks are on one clock; otherwise each rank begins at its own step."""
    resolution_ns: int
    """Spans of one layer and phase closer than this are merged; 0 if nothing is folded."""
    layers: list[str | None]
    """FSDP modules; the empty string is the root; null: outside every module."""
    phases: list[str]
    names: list[str]
    ranks: list[RankTimeline]
    ranks_left_out: int
    """Number of ranks left out beyond 64: those that cause no wait and take the least time."""
    stalls_left_out: int
    """Number of waits left out, the shortest ones."""
    compute_frac: list[float] = field(default_factory=list)
    """Mean fraction of ranks that compute, in each of 96 equal slices of the duration."""
    slice_phases: list[str] = field(default_factory=list)
    """Phase of most compute in each slice; a slice without compute has that of the previous one."""
