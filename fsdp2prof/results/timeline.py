"""One step as a picture of time: what ran when, in lanes, on all ranks and one clock.

A bounded form of the trace: spans that lie closer than :attr:`StepTimeline.resolution_ns` are one span, so
that a step of a hundred layers on dozens of ranks stays a file that a browser opens at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.communication import LateCause


@dataclass(frozen=True, kw_only=True, slots=True)
class Focus:
    """Part of an analysis that is shown: rows of these; null is all. Everything was analysed and compared
    before."""

    layers: list[str] | None
    """Patterns of layers' names: ``layers.3*``, ``(root)``."""
    ranks: list[int] | None
    steps: list[int] | None
    """Steps of the trace."""

    def __str__(self) -> str:
        """Say it in words: ``layers layers.3*; rank 1``."""
        parts = [f"layers {', '.join(self.layers)}"] if self.layers is not None else []
        for what, numbers in (("rank", self.ranks), ("step", self.steps)):
            if numbers is not None:
                some = what if len(numbers) == 1 else f"{what}s"
                parts.append(f"{some} {', '.join(map(str, numbers))}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineLane:
    """Spans of one lane by start, column by column: entry *i* of every list is span *i*."""

    lane: str
    """``host`` (what the issuing threads were doing), ``compute``, ``fsdp_copy``, ``all_gather``,
    ``reduce_scatter``, ``all_reduce``, ``other_comm`` or ``memcpy``."""
    start_ns: list[int]
    """Starts on the timeline's clock; negative where a host runs ahead of the step."""
    duration_ns: list[int]
    busy_ns: list[int]
    """Time within the span in which something ran: less than its length where small gaps are folded in."""
    count: list[int]
    """Kernels, copies or collectives in the span."""
    layer: list[int]
    """Index in :attr:`StepTimeline.layers`; of a folded span that of its longest part."""
    phase: list[int]
    """Index in :attr:`StepTimeline.phases`."""
    name: list[int]
    """Index in :attr:`StepTimeline.names`: kernel, activity or collective; the longest of a folded span."""
    payload_bytes: list[int | None] = field(default_factory=list)
    """Payload of collectives; empty in the other lanes."""
    peer_wait_ns: list[int | None] = field(default_factory=list)
    """Of collectives: part of the duration in which the last rank had not come; null where unknown."""


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
    """Time at which the compute stream had nothing left to do but wait."""
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
    """Lanes that hold something, from top to bottom."""
    stalls: list[TimelineStall]
    """Longest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """A typical step: of those on most ranks the one of median duration."""

    step: int
    duration_ns: int
    """From the beginning of the earliest step window, 0 on the timeline's clock, to the latest span."""
    aligned: bool
    """Whether all ranks are on one clock; else each begins where its own step does."""
    resolution_ns: int
    """Spans of one layer and phase closer than this are one; 0 where nothing is folded."""
    layers: list[str | None]
    """FSDP modules; the empty string is the root; null: outside every module."""
    phases: list[str]
    names: list[str]
    ranks: list[RankTimeline]
    ranks_left_out: int
    """Ranks left out beyond 64: those that cause no wait and take the least time."""
    stalls_left_out: int
    """Waits left out: the shortest ones."""
    compute_frac: list[float] = field(default_factory=list)
    """Part of each of 96 equal slices of the duration in which a rank computes: mean over the ranks."""
    slice_phases: list[str] = field(default_factory=list)
    """Phase that most of each slice's computing is for; of one without any that of the slice before."""
