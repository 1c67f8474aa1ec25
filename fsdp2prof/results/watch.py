"""Result of ``watch``: the state of a running job, from the lines that each rank writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRank:
    """One rank over the last ``window`` steps, without recorded steps if there are others."""

    rank: int
    last_step: int
    step_ns: int
    """Median step time."""
    exposed_ns: int | None
    """Median time in FSDP2's waits for communication; null unknown."""
    busy_ns: int | None
    """Median step time without these waits: the rank's own time."""
    behind_ns: int | None
    """Median over steps of the rank's own time minus that of the median rank (of two ranks, the quicker
    one), for which the others wait."""
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    resident_peak_bytes: int | None
    peak_bytes: int | None
    """Peak memory so far: reserved on a GPU, resident on a CPU."""
    growth_bytes: int | None
    """Growth of the peak over the window."""
    retries: int | None
    """Number of times so far that the allocator freed its cache and retried."""


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
    """State of the run, as in ``run.json``."""
    window: int
    """Maximum number of steps in medians."""
    last_step: int
    """Last step that every rank has finished."""
    step_ns: int
    """Step time: median over ranks and steps."""
    exposed_frac: float | None
    """Exposed fraction of ``step_ns``: median over ranks; null if unknown."""
    tokens_per_s: float | None
    """Tokens per second over all ranks; null unless the tokens per step are given."""
    step_spread: int
    """Number of steps between the fastest and the slowest rank."""
    ranks: list[WatchedRank]
    """Ranks, those furthest behind first."""
    steps: list[WatchedTime]
    """The last steps, in order."""
    warnings: list[str]
