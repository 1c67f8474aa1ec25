"""Collectives of a trace: by layer, in time or late, their rates, what could not be placed, and ranks
matched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """A rank's communication over the analysed window."""

    total_ns: int
    """Union of the rank's collectives, not a sum."""
    exposed_ns: int
    overlap_frac: float | None
    """Overlap: 1 - exposed / total; null where there is no communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """Collectives of one (rank, step, fqn, phase, op, process group, dtype), summed."""

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
    """Collectives of one layer, phase, op, group and dtype: means per rank and step, bytes and counts too.

    Of repeated layers folded into one row, sums over them.
    """

    fqn: str | None
    """FSDP module, ``layers.0-31`` for folded ones; the empty string is the root, null is unattributed."""
    layers: int
    """Layers folded into this row."""
    phase: str
    op: str
    group: str | None
    """Mesh dimension, or the process group's name where no mesh is known."""
    dtype: str | None
    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float
    exposed_ns: float
    stall_ns: float | None
    overlap_frac: float | None
    busbw_bytes_per_s: float | None
    """Bus bandwidth: wire bytes over the time they took."""
    steps: list[int] = field(default_factory=list)
    """The steps of one kind that the row is a mean of; empty: of all steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotal:
    """All collectives of one layer: means per rank and step."""

    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    total_ns: float
    """Communication time, summed over the layer's collectives."""
    exposed_ns: float


LateCause = Literal["launch", "communicator", "stream", "transfer", "peer", "transfer_or_peer"]
"""Why a collective came late: it began too late to hide; it queued behind another one of its process group,
or behind other work of its stream; its transfer was slower than the median of its kind; a peer came late; one
of the last two, which the trace of one rank alone does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRow:
    """One collective that the compute stream waits for: was it there in time?"""

    rank: int
    step: int
    fqn: str | None
    phase: str
    op: str
    process_group: str | None
    issued_before_ns: int
    """From its launch to when it was needed; negative if it was needed before it was launched."""
    finished_before_ns: int
    """From its end to when it was needed; negative if it came late."""
    stall_ns: int
    """How long the compute stream waited for it."""
    late_ns: dict[LateCause, int]
    """The stall by cause; the parts sum to it."""
    cause: LateCause | None
    """The largest cause; null if the collective was in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRow:
    """Collectives of one layer, phase and op that were late for one main cause, or in time."""

    fqn: str | None
    """FSDP module, ``layers.0-31`` for folded ones; the empty string is the root, null is unattributed."""
    layers: int
    """Layers folded into this row."""
    phase: str
    op: str
    cause: LateCause | None
    """Main cause of the lateness; null where they were in time."""
    count: float
    """Collectives, mean per rank and step."""
    issued_before_ns: float
    """Median."""
    finished_before_ns: float
    """Median of when they ended, relative to when they were needed; negative: late."""
    stall_ns: float
    """Stall, mean per rank and step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthRow:
    """Rates of all collectives of one (op, process group, dtype, payload), over steps and ranks."""

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
    """Bus bandwidth: median of wire bytes over transfer, without the wait for the last rank where ranks were
    compared."""
    best_busbw_bytes_per_s: float | None
    """Best bus bandwidth of a single collective of this row."""
    of_best_frac: float | None
    """The median over the best busbw of this op in this process group, at any size; null where waits are
    not known."""
    of_peak_frac: float | None = None
    """The median over the hardware's peak, where that and the waits are known."""
    ranks: list[int] = field(default_factory=list)
    """Ranks whose traces hold these collectives; they identify the group among those of a mesh dimension."""
    waits_known: bool = True
    """Whether the busbw is of collectives in which all ranks of the group were compared; else it is a lower
    bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """How much communication landed on a layer."""

    collectives: int
    attributed: int
    comm_ns: int
    """Sum of collective durations."""
    attributed_ns: int
    unattributed_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of collectives."""


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
