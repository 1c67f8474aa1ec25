"""Result of ``analyze run``: the run and both analyses."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.finding import Finding, Scalar
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.mesh import MeshMap
from fsdp2prof.results.sharding import ShardingMap
from fsdp2prof.results.shown import Shown
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.trial import TrialResult

RUN_ANALYSIS_SCHEMA = "fsdp2prof.run_analysis/1"


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
    """State: ``complete``, ``partial``, ``crashed``, ``running`` (killed without notice), ``missing``, or
    ``unknown`` where no recorder described the run."""
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
    """Unrecorded steps; null where every step was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Parameters that are sharded alike, on one rank."""

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
class ShardGroup(Sharded):
    """One FSDP parameter group as it was set up: one all-gather, one reduce-scatter."""

    root: int
    fqn: str
    """FSDP module; the empty string is the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFamily(Sharded):
    """Parameter groups of repeated layers that are sharded alike: sums over them."""

    layer: str
    """``layers.0-31``, or the one group's name; the empty string is the root, ``root1:`` that of several."""
    groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorUse:
    """How the captured steps shared their hosts' processors; null where the system does not say."""

    wait_frac: float | None
    """Fraction of a step in which a training thread could run but had no processor, on the rank that waited
    most."""
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
    """Unrecorded steps over all ranks; null where every step was recorded."""
    rehearsed_rank: int | None = None
    """The rank of ``world_size`` that one process stood for; null where the training ran."""
    shard_families: list[ShardFamily] = field(default_factory=list)
    """``shard_groups`` with alike layers folded."""
    training: dict[str, str] = field(default_factory=dict)
    """Settings of the training loop that the recorder saw: micro-batches, gradient synchronisations of a
    step, prefetch, the optimizer's options, threads. Of the lowest rank that has them."""
    processors: ProcessorUse | None = None
    """Use of processors; null without captured steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAnalysis(Shown):
    """Result of ``analyze run``: the run and both analyses, each null where nothing was captured."""

    schema: str = RUN_ANALYSIS_SCHEMA
    verdict: list[str] = field(default_factory=list)
    """At most three sentences on trace and memory: what bounds the run, the most expensive place, what to
    try."""
    run: RunSummary
    trace: TraceAnalysis | None
    memory: MemoryAnalysis | None
    findings: list[Finding] = field(default_factory=list)
    """Findings of both analyses, the most severe first."""
    advice: list[str] = field(default_factory=list)
    """Notes of both analyses."""
    warnings: list[str]
    sharding: ShardingMap | None = None
    """Rows of each parameter by rank; null without a recorder's manifests, or of parts that are not known."""
    mesh: MeshMap | None = None
    """Coordinates of the ranks in a mesh over all of them; null where it is not known."""
    trial: TrialResult | None = None
    """Other settings that were tried in the running job; null without a trial."""
