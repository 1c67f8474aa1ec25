"""Result of ``analyze run``: the run and the analyses of its traces and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results import Shown
from fsdp2prof.results.finding import Finding, Scalar
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.mesh import MeshMap
from fsdp2prof.results.sharding import ShardingMap
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.trial import TrialResult

RUN_ANALYSIS_SCHEMA = "fsdp2prof.run_analysis/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Wall time of one training step, as measured by the recorder."""

    step: int
    duration_ns: int
    kind: str
    """``plain``, ``warmup``, ``traced`` or ``memory``; the last three include the cost of recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRank:
    """Recording of one rank."""

    rank: int
    state: str
    """State: ``complete``, ``partial``, ``crashed``, ``running`` (killed without notice), ``missing``, or
    ``unknown`` without a manifest."""
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
    unrecorded_step: UnrecordedStep | None = None
    """Unrecorded steps; null if every step was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Parameters with the same sharding, on one rank."""

    parameters: int
    numel: int
    """Elements of the whole parameters, without padding."""
    sharded_bytes: int | None
    """Bytes of this rank's shards in the original dtype, padding included; null for a dtype of unknown
    size."""
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
class ShardGroup(Sharded):
    """One FSDP parameter group: one all-gather, one reduce-scatter."""

    root: int
    fqn: str
    """FSDP module; the empty string is the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFamily(Sharded):
    """Parameter groups of repeated layers with the same sharding: sums over them."""

    layer: str
    """``layers.0-31``, or the single group's name; the empty string is the root, ``root1:`` one of several
    roots."""
    groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorUse:
    """Use of the hosts' processors in the captured steps; null if the system does not provide it."""

    wait_frac: float | None
    """Fraction of a step in which a training thread was ready to run but had no processor, on the rank
    that waited most."""
    others_frac: float | None
    """Fraction of all processor time used by other programs or given to other machines, on the busiest
    host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Command, hosts and outcome of a run."""

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
    options: dict[str, Scalar]
    """Options of the recorder."""
    messages: list[str]
    ranks: list[RunRank]
    shard_groups: list[ShardGroup]
    """Parameter groups of the lowest rank that has any."""
    optimizers: list[str]
    """Class and state bytes of each optimizer of the lowest rank that has any, as text."""
    unrecorded_step: UnrecordedStep | None = None
    """Unrecorded steps over all ranks; null if every step was recorded."""
    rehearsed_rank: int | None = None
    """Rank of ``world_size`` that was rehearsed; null for a real training."""
    shard_families: list[ShardFamily] = field(default_factory=list)
    """``shard_groups`` with similar layers folded."""
    training: dict[str, str] = field(default_factory=dict)
    """Settings of the training loop: micro-batches, gradient synchronizations per step, prefetch,
    optimizer options, threads; from the lowest rank that has them."""
    processors: ProcessorUse | None = None
    """Use of processors; null without captured steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAnalysis(Shown):
    """Result of ``analyze run``: the run and both analyses, each null if nothing was captured."""

    schema: str = RUN_ANALYSIS_SCHEMA
    verdict: list[str] = field(default_factory=list)
    """At most three sentences on trace and memory: the bottleneck, the largest loss, the change to try."""
    run: RunSummary
    trace: TraceAnalysis | None
    memory: MemoryAnalysis | None
    findings: list[Finding] = field(default_factory=list)
    """Findings of both analyses, most severe first."""
    advice: list[str] = field(default_factory=list)
    """Notes of both analyses."""
    warnings: list[str]
    sharding: ShardingMap | None = None
    """Rows of each parameter by rank; null without manifests, or for parts that are unknown."""
    mesh: MeshMap | None = None
    """Coordinates of the ranks in a mesh over all ranks; null if unknown."""
    trial: TrialResult | None = None
    """Settings that ``fsdp2prof try`` tried in the running job; null without a trial."""
