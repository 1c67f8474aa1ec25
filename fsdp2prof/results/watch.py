"""Result of ``watch``: how a running job does, from the lines that each rank leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRank:
    """One rank over the last ``window`` steps; recorded steps are left out where there are others."""

    rank: int
    last_step: int
    step_ns: int
    """Median."""
    exposed_ns: int | None
    """Median time in FSDP2's waits for communication; null unknown."""
    busy_ns: int | None
    """Median of the rest of a step: the rank's own time."""
    behind_ns: int | None
    """What it needs itself beyond the median of ranks (of two the quicker one), step by step: the others wait
    for it."""
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    resident_peak_bytes: int | None
    peak_bytes: int | None
    """The reserved one of a GPU, the resident one of a CPU; so far."""
    growth_bytes: int | None
    """How much that grew over the window."""
    retries: int | None
    """Times the allocator freed its cache to go on, so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedTime:
    """One step: the median over ranks."""

    step: int
    duration_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRun(Shown):
    """Result of ``watch``."""

    schema: str = "fsdp2prof.watch/1"
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: the step, a slow rank, memory that grows."""
    path: str
    state: str
    """Of the run, as in ``run.json``."""
    window: int
    """Steps that medians are of, at most."""
    last_step: int
    """That every rank has ended."""
    step_ns: int
    """Median over ranks and steps."""
    exposed_frac: float | None
    """Exposed part of ``step_ns``: the median of the ranks' own; null unknown."""
    tokens_per_s: float | None
    """Of all ranks together; null unless told how many a step has."""
    step_spread: int
    """Steps between the rank that is furthest ahead and the last one."""
    ranks: list[WatchedRank]
    """Those behind most first."""
    steps: list[WatchedTime]
    """The last steps, in order."""
    warnings: list[str]
