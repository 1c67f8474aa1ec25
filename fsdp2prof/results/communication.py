"""Collectives of a trace: by layer, by punctuality, rates, attribution, and matches across ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """A rank's communication over the analysed window."""

    total_ns: int
    """Communication time: union of the rank's collectives, not a sum."""
    exposed_ns: int
    overlap_frac: float | None
    """Overlap: 1 - exposed / total; null where there is no communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """Sums over the collectives of one (rank, step, fqn, phase, op, process group, dtype)."""

    rank: int
    step: int
    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    phase: str
    op: str
    process_group: str | None
    mesh_dim: str | None
    dtype: str | None
    count: int
    payload_bytes: int | None
    wire_bytes: int | None
    total_ns: int
    exposed_ns: int
    stall_ns: int | None
    overlap_frac: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """Collectives of one layer, phase, op, group and dtype: means per rank and step, including bytes and
    counts.

    Sums over repeated layers that are folded into one row.
    """

    fqn: str | None
    """FSDP module, or ``layers.0-31`` for folded layers; the empty string is the root, null is
    unattributed."""
    layers: int
    """Number of layers folded into this row."""
    phase: str
    op: str
    group: str | None
    """Mesh dimension, or the process group's name if the mesh is unknown."""
    dtype: str | None
    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float
    exposed_ns: float
    stall_ns: float | None
    overlap_frac: float | None
    busbw_bytes_per_s: float | None
    """Bus bandwidth: wire bytes over duration."""
    steps: list[int] = field(default_factory=list)
    """Steps of one kind that the means cover; empty: all steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotal:
    """All collectives of one layer: means per rank and step."""

    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    total_ns: float
    """Communication time, summed over the layer's collectives."""
    exposed_ns: float


LateCause = Literal["launch", "communicator", "stream", "transfer", "peer", "transfer_or_peer"]
"""Reason for a late collective: launched too late; queued behind another collective of its process group,
or behind other work of its stream; a transfer slower than the median of its kind; a late peer; or one of
the last two, which one rank's trace cannot distinguish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRow:
    """One collective that the compute stream waits for, and whether it finished in time."""

    rank: int
    step: int
    fqn: str | None
    phase: str
    op: str
    process_group: str | None
    issued_before_ns: int
    """Time from its launch until it was needed; negative if it was needed before its launch."""
    finished_before_ns: int
    """Time from its end until it was needed; negative if it was late."""
    stall_ns: int
    """Time that the compute stream waited for it."""
    late_ns: dict[LateCause, int]
    """Stall by cause; the parts sum to the stall."""
    cause: LateCause | None
    """Largest cause of the stall; null if the collective was in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRow:
    """Collectives of one layer, phase and op that were late for one main cause, or in time."""

    fqn: str | None
    """FSDP module, or ``layers.0-31`` for folded layers; the empty string is the root, null is
    unattributed."""
    layers: int
    """Number of layers folded into this row."""
    phase: str
    op: str
    cause: LateCause | None
    """Main cause of the delay; null if the collectives were in time."""
    count: float
    """Number of collectives, mean per rank and step."""
    issued_before_ns: float
    """Median."""
    finished_before_ns: float
    """Median time from their end until they were needed; negative is late."""
    stall_ns: float
    """Stall, mean per rank and step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthRow:
    """Rates of all collectives of one (op, process group, dtype, payload) over steps and ranks."""

    op: str
    process_group: str | None
    mesh_dim: str | None
    group_size: int | None
    dtype: str | None
    payload_bytes: int
    count: int
    algbw_bytes_per_s: float
    """Algorithm bandwidth: median of payload over duration."""
    busbw_bytes_per_s: float | None
    """Bus bandwidth: median of wire bytes over transfer; excludes the wait for the last rank if ranks were
    compared."""
    best_busbw_bytes_per_s: float | None
    """Best bus bandwidth of a single collective of this row."""
    of_best_frac: float | None
    """Median busbw as a fraction of the best busbw of this op in this process group at any size; null if
    waits are unknown."""
    of_peak_frac: float | None = None
    """Median busbw as a fraction of the hardware's peak; null if the peak or the waits are unknown."""
    ranks: list[int] = field(default_factory=list)
    """Ranks whose traces contain these collectives; they identify the group within a mesh dimension."""
    waits_known: bool = True
    """Whether all ranks of the group were compared; otherwise the busbw is a lower bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Fraction of communication that was attributed to a layer."""

    collectives: int
    attributed: int
    comm_ns: int
    """Sum of collective durations."""
    attributed_ns: int
    unattributed_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of unattributed collectives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that made others wait, by layer and cause."""

    rank: int
    fqn: str | None
    """Layer whose work delayed the rank."""
    wait_caused_ns: int
    """Waiting time of the other ranks, summed over them."""
    cause: str | None = None
    """Cause of the delay, in words."""
    kind: str | None = None
    """``kernel``, ``host`` (nothing launched in time), ``data_loader`` (next batch not ready),
    ``communication`` (another collective), or ``unknown``."""
    collectives: int = 0
    """Number of collectives at which the rank was last for this reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank of a late set: waiting between it and the ranks outside the set, over all steps."""

    rank: int
    wait_caused_ns: int
    """Time that the ranks outside the set waited for it, summed over them."""
    wait_ns: int
    """Time that the set waited for the ranks outside."""
    late_steps: int
    """Steps in which the ranks outside waited longer for it, on average, than it waited for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRanks:
    """The set of ranks that causes most waiting, and whether there are enough steps to call it slow."""

    ranks: list[LateRank]
    """Ranks of the set, the one with the largest net cost to others first."""
    compared: int
    """Number of ranks compared."""
    steps: int
    """Number of steps in which ranks were compared."""
    late_steps: int
    """Number of steps in which all ranks of the set were late."""
    explained_frac: float
    """Fraction of all waiting that the set caused."""
    least_explained_frac: float
    """Smallest fraction of a step's waiting that the set caused."""
    chance: float
    """Upper bound of the probability of this pattern among equal ranks."""
    steps_needed: int
    """Number of steps that would settle it if the set is late in each of them."""
    steady: bool
    """Whether the set is late in a clear majority of the steps and coincidence is unlikely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWait:
    """Waiting of one rank in collectives, and of others for it: sums over the analysed steps."""

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
    """Number of collectives, each counted once for all ranks."""
    wait_ns: int
    """Time of waiting for the last rank, summed over ranks."""
    transfer_ns: int | None
    """Time from the last rank's start to the end; null if the ranks have no common interval."""
    busbw_bytes_per_s: float | None
    """Bus bandwidth of the transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossRank:
    """Collectives matched across ranks."""

    match_key: str | None
    """Key of the matches: ``comms_id``, ``seq``, ``order``, or null if nothing was matched."""
    matched: int
    """Collectives found on every loaded rank of their group."""
    unmatched: int
    """Collectives that are missing on some rank, or about which ranks disagree."""
    clock_offset_ns: dict[str, int] = field(default_factory=dict)
    """Clock (of a host, otherwise ``rank N``) -> its lead over the lowest rank's clock."""
    wait_ns: dict[str, int] = field(default_factory=dict)
    """Rank -> time that its collectives waited for the last rank."""
    stragglers: list[Straggler] = field(default_factory=list)
    """Late ranks by layer and cause, largest first; together they sum to ``wait_caused_ns``."""
    matched_by: dict[str, int] = field(default_factory=dict)
    """Match key -> number of collectives."""
    unmatched_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of unmatched collectives."""
    wait_caused_ns: dict[str, int] = field(default_factory=dict)
    """Rank -> time that other ranks waited for it; the sum equals that of ``wait_ns``."""
    late: LateRanks | None = None
    """Set of late ranks; null if no rank is waited for clearly longer than it waits itself."""
    waits_unknown_ns: int = 0
    """Time of collectives, summed over ranks, with a rank of the group that could not be compared: how
    much of it is waiting is unknown."""
    wait_caused_in_steps_ns: dict[str, list[int]] = field(default_factory=dict)
    """Waiting that each rank caused in each step, in order."""
    start_spread_ns: int | None = None
    """Median over collectives of latest start minus earliest start."""
    end_spread_ns: int | None = None
    """Median over collectives of latest end minus earliest end, which bounds the error of the aligned
    clocks."""
    groups: list[CrossRankGroup] = field(default_factory=list)
    ranks: list[RankWait] = field(default_factory=list)
    """Ranks with waiting, the largest net cost to others first."""
    summary: list[str] = field(default_factory=list)
    """Sentences about waiting between ranks; empty for a single rank."""
