"""Result of ``compare``: what changed between two runs, traces, recordings or estimates."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.memory_comparison import MemoryComparison
from fsdp2prof.results.shown import Shown

__all__ = [
    "COMPARISON_SCHEMA",
    "CommChange",
    "CommFigures",
    "ComparedInput",
    "RankPeakChange",
    "RunComparison",
    "SettingChange",
    "TimeChange",
]

COMPARISON_SCHEMA = "fsdp2prof.compare/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedInput:
    """One side of a comparison."""

    path: str
    kind: str
    """``run``, ``trace``, ``memory`` (recorded), or ``estimate`` (predicted)."""
    world_size: int | None
    traced_ranks: list[int]
    memory_ranks: list[int]
    steps: int
    """Step windows that its times are means of, over all ranks."""
    step_min_ns: int | None
    """Shortest of them: less than the spread of one side is no change."""
    step_max_ns: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeChange:
    """A part of the step on both sides, each a mean over its ranks and steps unless said otherwise."""

    part: str
    """``step``, ``unrecorded_step``, or a key of :class:`BreakdownNs`."""
    before_ns: float
    after_ns: float
    delta_ns: float
    delta_frac: float | None
    """Of before; null where that is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFigures:
    """Collectives of one layer, phase and op: means per rank and step, exact integers where they are some."""

    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float | None
    """Null, like the next two, in an estimate."""
    exposed_ns: float | None
    stall_ns: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommChange:
    """Collectives of one layer, phase and op on both sides."""

    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    phase: str
    op: str
    before: CommFigures | None
    """Null where that side has none of them."""
    after: CommFigures | None
    delta: CommFigures
    equal: bool
    """Whether count, payload and wire bytes are known and exactly the same; a broadcast has no wire bytes."""
    before_dtypes: list[str]
    after_dtypes: list[str]
    before_group_sizes: list[int]
    after_group_sizes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPeakChange:
    """Peak memory of one rank that both sides have, or of the fullest of each where they share none."""

    before_rank: int
    after_rank: int
    before_allocated_bytes: int
    after_allocated_bytes: int
    delta_allocated_bytes: int
    before_reserved_bytes: int | None
    after_reserved_bytes: int | None
    delta_reserved_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """Something that was set up otherwise; null is absent."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison(Shown):
    """Result of ``compare``: what changed from one run, trace, recording or estimate to another."""

    schema: str = COMPARISON_SCHEMA
    before: ComparedInput
    after: ComparedInput
    settings: list[SettingChange]
    """Between two runs."""
    step: TimeChange | None
    """Null, with an empty breakdown, unless both sides have a trace."""
    breakdown: list[TimeChange]
    """Its parts; the changes sum to the step's."""
    unrecorded_step: TimeChange | None
    """Median wall time of the steps that pay for no recording, over all ranks; null unless both sides are
    runs that have some."""
    communication: list[CommChange]
    """Largest growth of exposed time first; where no times are known, largest change in bytes first."""
    communication_equal: bool | None
    """Whether every row is; null unless both sides know their collectives."""
    peaks: list[RankPeakChange]
    """Largest growth first."""
    memory: MemoryComparison | None
    """Of the rank whose peak grew most; ``by_stack`` is empty. Null unless both sides know their memory."""
    warnings: list[str]
