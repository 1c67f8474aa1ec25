"""Timeline of one step in lanes, for all ranks on one clock.

A bounded form of the trace: spans closer than :attr:`StepTimeline.resolution_ns` are merged, so a step of
a hundred layers on dozens of ranks stays small enough for a browser.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.communication import LateCause


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
