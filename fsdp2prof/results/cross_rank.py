"""Ranks against each other: matched collectives, who waited, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that made others wait, and where."""

    rank: int
    fqn: str | None
    """Layer whose work made the rank late."""
    wait_caused_ns: int
    """Waiting of the other ranks, summed over them."""
    cause: str | None = None
    """The work that made it late, in words."""
    kind: str | None = None
    """``kernel``, ``host`` (nothing launched in time), ``data_loader`` (its next batch was not
    there), ``communication`` (another one), or ``unknown``."""
    collectives: int = 0
    """Collectives it came last to, for this reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank of a set that is late: its waiting against the ranks outside the set, over all steps."""

    rank: int
    wait_caused_ns: int
    """The ranks outside waited for it, summed over them."""
    wait_ns: int
    """Time that the set waited for the ranks outside."""
    late_steps: int
    """Steps in which the ranks outside waited longer for it, on average, than it for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRanks:
    """The ranks that most of the waiting is for, and whether there are steps enough to call them slow."""

    ranks: list[LateRank]
    """The one that cost the others most, net of its own waiting, first."""
    compared: int
    """Ranks that were compared."""
    steps: int
    """Steps in which they were."""
    late_steps: int
    """Steps in which all ranks of the set were late."""
    explained_frac: float
    """Part of all waiting that the set caused."""
    least_explained_frac: float
    """Part of the waiting that the set caused in the step where it is least."""
    chance: float
    """Probability, at most, of this pattern among ranks that are all alike."""
    steps_needed: int
    """Steps that would settle it if the set is late in each of them."""
    steady: bool
    """Whether the set is late in a clear majority of the steps, too clearly for a coincidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWait:
    """One rank's waiting in collectives, and the others' for it: sums over the analysed steps."""

    rank: int
    wait_ns: int
    """Time that the rank waited for the last rank."""
    wait_caused_ns: int
    """Time that the others waited for the rank, summed over them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossRankGroup:
    """Matched collectives of one (fqn, phase, op, process group), summed over steps and ranks."""

    fqn: str | None
    phase: str
    op: str
    process_group: str | None
    count: int
    """Collectives, not ranks times collectives."""
    wait_ns: int
    """Waiting for the last rank, summed over ranks."""
    transfer_ns: int | None
    """From the last rank's start to the end; null without an instant common to all ranks."""
    busbw_bytes_per_s: float | None
    """Bus bandwidth of the transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossRank:
    """Collectives matched over ranks."""

    match_key: str | None
    """``comms_id``, ``seq``, ``order`` or null when nothing could be matched."""
    matched: int
    """Collectives found on every rank of their group that was loaded."""
    unmatched: int
    """Collectives that some rank lacks, or about which the ranks disagree."""
    clock_offset_ns: dict[str, int] = field(default_factory=dict)
    """Clock (host, else ``rank N``) -> how far it is ahead of the lowest rank's."""
    wait_ns: dict[str, int] = field(default_factory=dict)
    """Rank -> time its collectives waited for the last rank."""
    stragglers: list[Straggler] = field(default_factory=list)
    """Late ranks with layer and cause, the costliest first; together they sum to ``wait_caused_ns``."""
    matched_by: dict[str, int] = field(default_factory=dict)
    """Match key -> collectives."""
    unmatched_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> collectives."""
    wait_caused_ns: dict[str, int] = field(default_factory=dict)
    """Rank -> waiting of the others for it; sums to the sum of ``wait_ns``."""
    late: LateRanks | None = None
    """Null where no rank is waited for clearly longer than it waits itself."""
    waits_unknown_ns: int = 0
    """Time of the collectives, summed over ranks, of which some rank of the group could not be compared: what
    of it is waiting and what transfer is not known."""
    wait_caused_in_steps_ns: dict[str, list[int]] = field(default_factory=dict)
    """Waiting that each rank caused in each step, in order."""
    start_spread_ns: int | None = None
    """Median over collectives of latest start minus earliest."""
    end_spread_ns: int | None = None
    """Median over collectives of latest end minus earliest; ends should agree, so this bounds the error of
    the clocks."""
    groups: list[CrossRankGroup] = field(default_factory=list)
    ranks: list[RankWait] = field(default_factory=list)
    """Ranks that waited or were waited for, the one that cost the others most first."""
    summary: list[str] = field(default_factory=list)
    """Sentences: which rank waited for which; empty for a single rank."""
