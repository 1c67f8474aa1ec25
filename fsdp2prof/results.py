"""What analyses return: frozen dataclasses whose fields are the JSON contract.

Encoding one of these with ``msgspec.json.encode`` gives the documented JSON. Keys may be added, never
renamed; ``tests/golden`` freezes them. Times are nanoseconds, sizes bytes, rates bytes per second, fractions
0..1; ``None`` means unknown or undefined, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AtPeak",
    "Attribution",
    "BandwidthRow",
    "BreakdownNs",
    "CheckpointEstimate",
    "CommChange",
    "CommEstimate",
    "CommFigures",
    "CommRow",
    "CommTotals",
    "Communication",
    "ComparedInput",
    "CrossRank",
    "CrossRankGroup",
    "Finding",
    "GroupRow",
    "HostSyncRow",
    "LateCause",
    "LayerBytes",
    "LayerPeak",
    "LiveBlock",
    "MemoryAnalysis",
    "MemoryComparison",
    "MemoryDelta",
    "MemoryEstimate",
    "OtherPeak",
    "Peak",
    "PredictedPeak",
    "PredictedStep",
    "PrefetchRow",
    "RankMemory",
    "RankPeakChange",
    "RankTrace",
    "RunAnalysis",
    "RunComparison",
    "RunRank",
    "RunSummary",
    "SettingChange",
    "Severity",
    "ShardGroup",
    "StepBreakdown",
    "StepTime",
    "Straggler",
    "Throughput",
    "TimeChange",
    "TraceAnalysis",
]

TRACE_SCHEMA = "fsdp2prof.trace/1"
MEMORY_SCHEMA = "fsdp2prof.memory/1"
MEMORY_COMPARISON_SCHEMA = "fsdp2prof.memory_comparison/1"
RUN_ANALYSIS_SCHEMA = "fsdp2prof.run_analysis/1"
COMM_ESTIMATE_SCHEMA = "fsdp2prof.estimate.comm/1"
CHECKPOINT_ESTIMATE_SCHEMA = "fsdp2prof.estimate.checkpoint/1"
MEMORY_ESTIMATE_SCHEMA = "fsdp2prof.estimate.memory/1"
COMPARISON_SCHEMA = "fsdp2prof.compare/1"

Severity = Literal["high", "medium", "low", "info"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something worth acting on, with its evidence."""

    id: str
    severity: Severity
    fqn: str | None
    message: str
    """What is wrong and what to change, in one or two sentences."""
    evidence: dict[str, Any] = field(default_factory=dict)


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
"""Why a collective came late: the host launched it late; it queued behind another one of its process group,
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
class TraceAnalysis:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Live bytes of one layer and category at the peak."""

    fqn: str | None
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPeak:
    """One layer's own peak and growth in one phase."""

    fqn: str | None
    phase: str
    peak_bytes: int
    """Most allocated bytes, device-wide, while this layer and phase ran."""
    delta_bytes: int
    """Allocated bytes at its end minus at its start, summed over its intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The instant of the largest allocated bytes."""

    allocated_bytes: int
    reserved_bytes: int | None
    """Most bytes reserved at any time; null where there is no caching allocator."""
    step: int | None
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Sums exactly to ``allocated_bytes``."""
    by_layer: list[LayerBytes]
    """Sums exactly to ``allocated_bytes``."""
    time_ns: int | None = None
    """Host time of the peak; null where the recording has no times."""
    largest_blocks: list[LiveBlock] = field(default_factory=list)
    """The ten largest allocations alive at the peak, largest first."""
    others: list[OtherPeak] = field(default_factory=list)
    """The highest totals elsewhere, one a (phase, fqn), highest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtPeak:
    """What the trace of the same run shows at the peak."""

    match: Literal["clock", "place"]
    """``clock``: the trace covers that instant; ``place``: the same place of a traced step stands for it."""
    step: int | None
    """Traced step that was looked at."""
    operator: str | None
    """Innermost operator on the host."""
    launched: str | None
    """Device activity whose launch came last; null on a CPU."""
    running: list[str]
    """Device activities and collectives in flight: a kernel's name, or ``all_gather layers.3``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """One allocation alive at an instant."""

    bytes: int
    category: str
    fqn: str | None
    phase: str
    """Phase that allocated it."""
    step: int | None
    """Step that allocated it; null if it was there before the history began."""
    op: str | None
    age_ns: int | None
    """Time since it was allocated; null if unknown."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPeak:
    """The highest total while one layer ran in one phase, and the step that had it."""

    allocated_bytes: int
    step: int | None
    phase: str
    fqn: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpan:
    """A stretch of one phase of one step."""

    start_ns: int
    end_ns: int
    step: int | None
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One device's memory analysis."""

    rank: int
    device: str
    source: str
    """``cuda_snapshot``, ``storage_count``, ``kineto`` or ``estimate``."""
    peak: Peak
    layers: list[LayerPeak]
    fragmentation: dict[str, Any]
    oom: dict[str, Any] | None
    truncated: bool
    timeline: dict[str, list[int]] = field(default_factory=dict)
    """Down-sampled allocated bytes by category over time, for plots: ``time_ns`` plus one list a category."""
    phase_spans: list[PhaseSpan] = field(default_factory=list)
    """When forward, backward and optimizer ran, on the clock of ``timeline``."""
    at_peak: AtPeak | None = None
    """From the rank's trace; null where there is none that has the peak's place, and for all but the fullest
    rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAnalysis:
    """Result of ``analyze memory``."""

    schema: str = MEMORY_SCHEMA
    ranks: list[RankMemory]
    findings: list[Finding]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDelta:
    """What one category, layer or place in the program holds at the peak of two recordings."""

    before_bytes: int
    after_bytes: int
    delta_bytes: int
    category: str | None = None
    fqn: str | None = None
    op: str | None = None
    stack: list[str] = field(default_factory=list)
    """Frames, innermost first; empty except by stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryComparison:
    """Two recordings at their peaks; each list sums to ``delta_bytes`` and starts with the largest change."""

    schema: str = MEMORY_COMPARISON_SCHEMA
    before: Peak
    after: Peak
    delta_bytes: int
    by_category: list[MemoryDelta]
    by_layer: list[MemoryDelta]
    by_stack: list[MemoryDelta]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Wall time of one training step, as the recorder saw it."""

    step: int
    duration_ns: int
    kind: str
    """``plain``, ``warmup``, ``traced`` or ``memory``: the last three pay for being recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRank:
    """What one rank of a run left behind."""

    rank: int
    state: str
    """``complete``, ``partial``, ``crashed``, ``running`` (killed unheard) or ``missing``."""
    host: str
    device: str
    """``cpu``, or the device's name."""
    steps: list[StepTime]
    traced_steps: list[int]
    memory_steps: list[int]
    has_trace: bool
    has_memory: bool
    error: str | None
    messages: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """One FSDP parameter group as it was set up: one all-gather, one reduce-scatter."""

    root: int
    fqn: str
    """FSDP module; the empty string is the root."""
    parameters: int
    numel: int
    """Elements of the whole parameters, without padding."""
    sharded_bytes: int | None
    """This rank's shard in the original dtype, padding included; null for a dtype of unknown size."""
    padding_bytes: int | None
    """Part of ``sharded_bytes`` that is padding."""
    dtype: str
    """Original dtype; several are joined with commas."""
    param_dtype: str | None
    reduce_dtype: str | None
    mesh: str
    """Mesh dimensions as text: ``dp_replicate=2, dp_shard=8``."""
    reshard_after_forward: bool | int
    offload: bool
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What was run, where, and how it ended."""

    path: str
    command: list[str]
    state: str
    exit_code: int | None
    started_at: str
    finished_at: str | None
    hosts: list[str]
    world_size: int | None
    versions: dict[str, str]
    environment: dict[str, str]
    options: dict[str, Any]
    messages: list[str]
    ranks: list[RunRank]
    shard_groups: list[ShardGroup]
    """Of the lowest rank that has any."""
    optimizers: list[str]
    """Class and state bytes of each optimizer of the lowest rank that has any, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAnalysis:
    """Result of ``analyze run``: the run and both analyses, each null where nothing was captured."""

    schema: str = RUN_ANALYSIS_SCHEMA
    run: RunSummary
    trace: TraceAnalysis | None
    memory: MemoryAnalysis | None
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRow:
    """Collectives of one (fqn, phase, op, mesh dimension, dtype) that one rank does in one training step.

    The keys it shares with :class:`GroupRow` mean the same, so that an estimate and a recording compare.
    """

    root: int
    """Index of the model: 0, or 1 for the extra one; of a recorded run, of the root module."""
    fqn: str | None
    """FSDP module; the empty string is the root, null belongs to no layer (gradient clipping)."""
    phase: str
    op: str
    process_group: str | None
    """Of a recorded run; null in a prediction from specifications."""
    mesh_dim: str | None
    dtype: str
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTotals:
    """One kind of collective summed over a step."""

    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommEstimate:
    """Result of ``estimate comm``: what one rank sends in a steady training step."""

    schema: str = COMM_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    groups: list[CommRow]
    per_step: dict[str, CommTotals]
    """Op -> sum over ``groups``."""
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEstimate:
    """Result of ``estimate checkpoint``: bytes of a distributed checkpoint and the time to write it."""

    schema: str = CHECKPOINT_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    writers: int
    """Ranks that write a shard file: those of one replica."""
    files: int
    """``__RANK_0.distcp`` of each writer plus ``.metadata``."""
    parameter_bytes: int
    """All parameters, once, in their original dtype."""
    optimizer_bytes: int
    """All optimizer state, once."""
    sharded_bytes: int
    """All shard files together: tensors only."""
    rank_bytes_max: int
    """Largest shard file's tensors."""
    rank_bytes_min: int
    full_parameter_bytes: int
    """A full state dict of the model gathered on one rank."""
    full_bytes: int
    """A full state dict of model and optimizer gathered on one rank."""
    sharded_seconds: float | None
    """Writing the largest shard at the given bandwidth per writer; null without one."""
    full_seconds: float | None
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPeak:
    """The most memory a predicted run holds on one device."""

    reserved_bytes: int
    """Most bytes the caching allocator takes from the device, like ``torch.cuda.max_memory_reserved``."""
    active_bytes: int
    """Most bytes allocated at one instant; the rest of the peak describes that instant."""
    step: int | None
    """1 is the first step, without optimizer state before its end; 0 the construction."""
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Sums exactly to ``active_bytes``."""
    by_layer: list[LayerBytes]
    """Sums exactly to ``active_bytes``."""
    streams: dict[str, int]
    """Reserved bytes of each stream's pool when the reserved peak is reached; sums to ``reserved_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Peaks of one predicted training step."""

    step: int
    reserved_bytes: int
    active_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Result of ``estimate memory``: what one rank's device will hold."""

    schema: str = MEMORY_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    peak: PredictedPeak
    steps: list[PredictedStep]
    """The first step and a steady one."""
    layers: list[LayerPeak]
    host_bytes: int
    """Memory of the host that this rank's offloaded parameters, gradients and optimizer state take."""
    outside_allocator_bytes: dict[str, int]
    """``low`` and ``high``: context, kernels and communicators, which no allocator counts."""
    device_total_bytes: int | None
    """Memory of the device; null unless the hardware was given."""
    fits: bool | None
    """Null unless the hardware was given."""
    headroom_bytes: int | None
    """Device memory left above the reserved peak and the high end outside of it; negative: missing."""
    advice: list[str]
    """What to change, when it does not fit."""
    assumptions: list[str]


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
    """A part of the step on both sides, each a mean over its ranks and steps."""

    part: str
    """``step``, or a key of :class:`BreakdownNs`."""
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
class RunComparison:
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
    communication: list[CommChange]
    """Largest growth of exposed time first; where no times are known, largest change in bytes first."""
    communication_equal: bool | None
    """Whether every row is; null unless both sides know their collectives."""
    peaks: list[RankPeakChange]
    """Largest growth first."""
    memory: MemoryComparison | None
    """Of the rank whose peak grew most; ``by_stack`` is empty. Null unless both sides know their memory."""
    warnings: list[str]
