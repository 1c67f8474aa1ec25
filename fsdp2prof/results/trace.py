"""Result of ``analyze trace``: the step, its communication by layer, and the ranks against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown

__all__ = [
    "TRACE_SCHEMA",
    "Attribution",
    "BandwidthRow",
    "BreakdownNs",
    "Communication",
    "CrossRank",
    "CrossRankGroup",
    "GroupRow",
    "HostSyncRow",
    "LateCause",
    "PrefetchRow",
    "RankTrace",
    "StepBreakdown",
    "Straggler",
    "Throughput",
    "TraceAnalysis",
]

TRACE_SCHEMA = "fsdp2prof.trace/1"


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
    """On the trace's own clock."""
    idle_ns: dict[str, int] = field(default_factory=dict)
    """Why nothing ran: cause -> time; sums to ``breakdown_ns.idle``. ``host_bound`` (nothing was launched in
    time), ``device_sync`` and ``memcpy`` (the host had been waiting for the device, or for a copy),
    ``communication`` (the caller was blocked while no transfer ran), ``queued`` (launched, not yet started),
    ``profiler``, ``unknown`` (its launch is not in the file)."""
    flops: int | None = None
    """Floating-point operations of matrix products and attention, recomputation included; null without
    recorded shapes, or with operators whose shapes do not tell (convolutions)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """A rank's communication over the analysed window."""

    total_ns: int
    """Union of the rank's collectives, not a sum."""
    exposed_ns: int
    overlap_frac: float | None
    """1 - exposed / total; null where there is no communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Speed of one rank's training; null is unknown."""

    step_ns: int
    """Median duration of its steps."""
    tokens_per_s: float | None
    """Tokens of a step, all ranks together, over its duration."""
    flops_per_s: float | None
    """This rank's recorded operations over their steps' durations."""
    mfu: float | None
    """``flops_per_s`` over the device's peak; recomputed operations count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """One rank's trace analysis."""

    rank: int
    world_size: int | None
    device_type: str
    steps: list[StepBreakdown]
    communication: Communication
    source: str
    """File it came from."""
    state: str | None = None
    """The recorder's word on this rank: complete, partial, crashed; null for foreign traces."""
    throughput: Throughput | None = None


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


LateCause = Literal["launch", "communicator", "stream", "transfer", "peer"]
"""Why a collective came late: it began too late to hide; it queued behind another one of its process group,
or behind other work of its stream; its transfer was slower than the median of its kind; a peer came late."""


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
    """The stall by cause; sums to it."""
    cause: LateCause | None
    """The largest of them; null if it was in time."""


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
    """Median of payload over duration."""
    busbw_bytes_per_s: float | None
    """Median of wire bytes over transfer: without the wait for the last rank, where ranks were compared."""
    best_busbw_bytes_per_s: float | None
    """Best single one of this row."""
    of_best_frac: float | None
    """The median over the best busbw of this op in this process group, at any size."""
    of_peak_frac: float | None = None
    """The median over the hardware's peak, where that is known."""


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
    """Layer whose work made it late."""
    wait_caused_ns: int
    """Waiting of the other ranks, summed over them."""
    cause: str | None = None
    """The work, in words."""
    kind: str | None = None
    """``kernel``, ``host`` (nothing launched in time), ``communication`` (another one), or ``unknown``."""
    collectives: int = 0
    """Collectives it came last to, for this reason."""


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
    """Of the transfer."""


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
    """The costliest, worst first; all of them together are ``wait_caused_ns``."""
    matched_by: dict[str, int] = field(default_factory=dict)
    """Match key -> collectives."""
    unmatched_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> collectives."""
    wait_caused_ns: dict[str, int] = field(default_factory=dict)
    """Rank -> waiting of the others for it; sums to the sum of ``wait_ns``."""
    start_spread_ns: int | None = None
    """Median over collectives of latest start minus earliest."""
    end_spread_ns: int | None = None
    """The same of the ends, which should agree: what the clocks' alignment is worth."""
    groups: list[CrossRankGroup] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSyncRow:
    """Calls by which a rank's host waited for its device inside its steps, by where they were made."""

    rank: int
    fqn: str | None
    phase: str
    call: str
    """Runtime call: ``cudaStreamSynchronize``, ..."""
    operator: str | None
    """Operator that made it, ``aten::item`` for instance; null when none did or the trace does not say."""
    count: int
    blocked_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceAnalysis(Shown):
    """Result of ``analyze trace``."""

    schema: str = TRACE_SCHEMA
    ranks: list[RankTrace]
    groups: list[GroupRow]
    attribution: Attribution
    cross_rank: CrossRank
    findings: list[Finding]
    warnings: list[str]
    prefetch: list[PrefetchRow] = field(default_factory=list)
    bandwidth: list[BandwidthRow] = field(default_factory=list)
    host_syncs: list[HostSyncRow] = field(default_factory=list)
    """The longest blocked first."""
