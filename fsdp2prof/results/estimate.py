"""Results of ``estimate``: communication, checkpoints, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp2prof.results import Shown
from fsdp2prof.results.communication import LayerRow
from fsdp2prof.results.memory import LayerPeak
from fsdp2prof.results.peak import CategoryBytes, LayerBytes, LayerMemory, Remedy
from fsdp2prof.results.step import BreakdownNs
from fsdp2prof.results.trace import TraceAnalysis


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingMethod:
    """One way to build sequences from documents."""

    name: str
    """Name of the method: ``padded``, ``longest_in_batch``, ``packed`` or ``concatenated``."""
    sequences: int
    tokens: int
    """Tokens computed, padding included."""
    padding_tokens: int
    padding_frac: float
    """Padding as a part of the computed tokens."""
    cut_documents: int
    """Number of documents that continue in another sequence."""
    attention_pairs: int
    """Token pairs that causal attention computes over whole sequences."""
    useful_pairs_frac: float
    """Fraction of the computed pairs within one document, which a document mask would leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingEstimate(Shown):
    """Cost of padding for each way to build sequences from documents."""

    schema: str = "fsdp2prof.estimate.packing/1"
    seq_len: int
    batch_size: int
    documents: int
    tokens: int
    """Tokens of all documents, without truncated tokens."""
    longest: int
    """Tokens of the longest document."""
    mean: float
    truncated_documents: int
    """Number of documents longer than a sequence."""
    truncated_tokens: int
    """Tokens truncated from long documents, except where documents are concatenated."""
    methods: list[PackingMethod]
    verdict: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


COMM_ESTIMATE_SCHEMA = "fsdp2prof.estimate.comm/1"
MEMORY_ESTIMATE_SCHEMA = "fsdp2prof.estimate.memory/1"

Fit = Literal["fits", "depends", "does_not_fit"]
"""Verdict on memory; ``depends`` if the ends of the range disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedModel:
    """Model of an estimate."""

    name: str
    """Name of the model, or of the script of a recorded run."""
    parameters: int
    """Number of parameters."""
    blocks: int | None = None
    """Number of blocks; null for a recorded run."""
    groups: int | None = None
    """Number of FSDP parameter groups of a recorded run; null otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedMesh:
    """The device mesh; a size is null if a recorded run does not state it."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    """Expert-parallel ranks, taken from those of dp_shard x cp."""
    world_size: int
    dims: dict[str, int] = field(default_factory=dict)
    """A recorded run's own dimensions of FSDP, by their names in the run."""


class EstimatedPolicy(dict[str, Any]):
    """Policy of the estimate: every option of ``PolicySpec``, which declares and documents them, by name.

    Values are also attributes. None can also mean that the recorded run does not state the option.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a policy has no option {name!r}") from None


def decoding_hook(kind: type, value: Any) -> Any:
    """Build a policy from its JSON, as ``msgspec``'s ``dec_hook``."""
    if kind is EstimatedPolicy and isinstance(value, dict):
        return EstimatedPolicy(value)
    raise TypeError(f"a {kind.__name__} of {type(value).__name__}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigRow:
    """One key of a trainer's configuration and the corresponding option."""

    key: str
    """Key as the trainer names it, with tables joined by dots."""
    value: str
    option: str
    became: str
    """Value of the option."""
    source: str
    """File that gives the value, or line of the trainer's code with its default."""
    given: bool
    """Whether a file gives the value; otherwise it is the trainer's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigRead:
    """Interpretation of a trainer's configuration."""

    format: str
    files: list[str]
    stack: str
    """Software stack that is assumed if no file names one."""
    rows: list[ConfigRow]
    without_effect: list[str]
    """Keys without effect on an estimate: logging, data sets, learning rates."""
    not_known: list[str]
    """Keys unknown to the reader, from a fork or another version; they had no effect."""
    misspelt: dict[str, str]
    """Of the unknown keys those that resemble a key that no file gives -> that key."""
    notes: list[str]
    """Contradictions, sections without effect, and unmodelled features."""
    open: list[str]
    """Assumptions of the estimate that no file confirms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRow:
    """Collectives of one (fqn, phase, op, mesh dimension, dtype) of one rank in one training step.

    Keys shared with :class:`GroupRow` have the same meaning, so an estimate and a recording can be
    compared.
    """

    root: int
    """Index of the model: 0, or 1 for the extra model; for a recorded run, of the root module."""
    fqn: str | None
    """FSDP module; the empty string is the root, null belongs to no layer (gradient clipping)."""
    phase: str
    op: str
    process_group: str | None
    """Process group of a recorded run; null in a prediction from specifications."""
    mesh_dim: str | None
    dtype: str
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int
    layers: int = 1
    """Number of layers folded into this row, which is their sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTotals:
    """One kind of collective summed over a step."""

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    wire_frac: float | None = None
    """Fraction of all wire bytes; null without communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """One transfer of trained weights to inference engines."""

    engines: int
    """Number of inference engines; 0: on the training's own devices."""
    engine_tp: int
    """Tensor-parallel ranks per engine."""
    dtype: str
    """Dtype of the weights in the engines."""
    per: str
    """Unit of the all-gathers: ``parameter``, ``layer`` (an FSDP unit) or ``whole``."""
    gathers: int
    """Number of all-gathers, in which every training rank takes part."""
    gather_payload_bytes: int
    gather_wire_bytes: int
    """Bytes sent by one training rank to gather."""
    broadcasts: int
    """Number of tensors that the first training rank broadcasts to all ranks of all engines."""
    sent_bytes: int
    """Bytes that the first training rank sends, counting each tensor once."""
    received_bytes: int
    """Bytes received by all ranks of all engines; each receives every tensor whole."""
    kept_bytes: int
    """Bytes stored by one rank of an engine, its tensor-parallel part."""
    buffer_bytes: int
    """Most gathered bytes that a training rank holds at once, including the cast copy of one tensor."""
    bandwidth_bytes_per_s: int | None = None
    """Bytes per second that one rank sends; null unless given."""
    gather_seconds: float | None = None
    """Time at that rate, without latency."""
    send_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommEstimate(Shown):
    """Result of ``estimate comm``: communication of one rank in a steady training step."""

    schema: str = COMM_ESTIMATE_SCHEMA
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    groups: list[CommRow]
    per_step: dict[str, CommTotals]
    """Op -> sum over ``groups``."""
    assumptions: list[str]
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: total traffic, its largest part, a change that sends less."""
    total: CommTotals = field(default_factory=CommTotals)
    """Sum over ``per_step``."""
    groups_folded: list[CommRow] = field(default_factory=list)
    """``groups`` with repeated layers that send the same folded, as ``layers.0-31``."""
    advice: list[str] = field(default_factory=list)
    """Changes that send less, most bytes first."""
    weight_sync: WeightSync | None = None
    """Transfer of the weights to inference engines, outside the step; null unless requested."""
    config: ConfigRead | None = None
    """Interpretation of the trainer's configuration; null without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEstimate(Shown):
    """Result of ``estimate checkpoint``: size of a distributed checkpoint and the time to write it."""

    schema: str = "fsdp2prof.estimate.checkpoint/1"
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    writers: int
    """Number of ranks that write a shard file: those of one replica."""
    files: int
    """Number of files: ``__RANK_0.distcp`` of each writer plus ``.metadata``."""
    parameter_bytes: int
    """Bytes of all parameters, counted once, in their original dtype."""
    optimizer_bytes: int
    """Bytes of all optimizer state, counted once."""
    sharded_bytes: int
    """Tensor bytes of all shard files."""
    rank_bytes_max: int
    """Tensor bytes of the largest shard file."""
    rank_bytes_min: int
    full_parameter_bytes: int
    """Bytes of a full state dict of the model gathered on one rank."""
    full_bytes: int
    """Bytes of a full state dict of model and optimizer gathered on one rank."""
    sharded_seconds: float | None
    """Time to write the largest shard at the given bandwidth per writer; null without one."""
    full_seconds: float | None
    assumptions: list[str]
    verdict: list[str] = field(default_factory=list)
    """Sentences: files, writers, and the time if the bandwidth is known."""
    bandwidth_bytes_per_s: int | None = None
    """Bandwidth of one writing rank; null unless given."""
    config: ConfigRead | None = None
    """Interpretation of the trainer's configuration; null without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePart:
    """One part of the device memory outside the allocator, as a range."""

    name: str
    low: int
    high: int
    source: str
    """Source of the range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideAllocator:
    """Device memory outside the allocator (context, kernels, communicators), as a range."""

    low: int
    high: int
    parts: list[OutsidePart] = field(default_factory=list)
    """Parts of the range; they sum to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """An unknown property of the run and its effect on the estimate."""

    name: str
    low_bytes: int
    """Bytes by which the reserved peak may be lower than predicted, zero or negative."""
    high_bytes: int
    """Bytes by which the reserved peak may be higher than predicted, zero or positive."""
    why: str
    """One sentence: the unknown, and the information that would determine it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPeak:
    """Peak memory of a predicted run on one device."""

    reserved_bytes: int
    """Peak of reserved memory, like ``torch.cuda.max_memory_reserved``."""
    active_bytes: int
    """Most bytes allocated at one instant; the other fields describe that instant."""
    step: int | None
    """Step of the peak: 1 is the first step, without optimizer state before its end; 0 is construction."""
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Bytes by category; they sum exactly to ``active_bytes``."""
    by_layer: list[LayerBytes]
    """Bytes by layer; they sum exactly to ``active_bytes``."""
    streams: dict[str, int]
    """Reserved bytes of each stream's pool at the reserved peak; sums to ``reserved_bytes``."""
    by_category: list[CategoryBytes] = field(default_factory=list)
    """Bytes by category with fractions, as in :class:`Peak`."""
    layers: list[LayerMemory] = field(default_factory=list)
    layers_folded: list[LayerMemory] = field(default_factory=list)

    @property
    def allocated_bytes(self) -> int:
        """``active_bytes``, under the name used for recorded peaks."""
        return self.active_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Peaks of one predicted training step."""

    step: int
    reserved_bytes: int
    active_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedChange:
    """A change to a run that may not fit, with the estimate of the changed run."""

    changes: list[str]
    """Combined options, as on the command line."""
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    reserved_bytes: int
    headroom_bytes: int
    """Device memory left; negative if missing."""
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(Shown):
    """Result of ``estimate memory``: memory of one rank's device."""

    schema: str = MEMORY_ESTIMATE_SCHEMA
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    peak: PredictedPeak
    steps: list[PredictedStep]
    """The first step and a steady one."""
    layers: list[LayerPeak]
    host_bytes: int
    """Host memory for this rank's offloaded parameters, gradients and optimizer state."""
    outside_allocator_bytes: OutsideAllocator
    device_total_bytes: int | None
    """Memory of the device; null unless the hardware was given."""
    fits: bool | None
    """Whether it fits; null unless the hardware was given, or if it depends (``fit`` says on what)."""
    headroom_bytes: int | None
    """Device memory left with the reserved peak and memory outside it at their highest; negative if
    missing."""
    advice: list[str]
    """Changes to make if it does not fit."""
    assumptions: list[str]
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: the peak, whether it fits, its largest part or the change to make."""
    device: str | None = None
    """Name of the hardware; null unless it was given."""
    fit: Fit | None = None
    """``fits``, ``does_not_fit`` or ``depends``; null unless the hardware was given."""
    headroom_high_bytes: int | None = None
    """Device memory left with the peak and memory outside the allocator at their lowest."""
    reserved_low_bytes: int | None = None
    """Lowest reserved peak, with all unknowns at their low end."""
    reserved_high_bytes: int | None = None
    active_low_bytes: int | None = None
    """Lowest bytes in use at the peak; null if a measured peak replaces the range."""
    active_high_bytes: int | None = None
    unknowns: list[Unknown] = field(default_factory=list)
    """Unknowns at the ends of the range, widest first; empty if the peak is not a range."""
    depends_on: list[str] = field(default_factory=list)
    """Unknowns that decide whether it fits, with their bytes."""
    remedies: list[Remedy] = field(default_factory=list)
    """Available changes with an upper bound of their savings, largest first."""
    tried: list[TriedChange] = field(default_factory=list)
    """Changes that were estimated because the run may not fit, in the order of the trials."""
    config: ConfigRead | None = None
    """Interpretation of the trainer's configuration; null without one."""


STEP_ESTIMATE_SCHEMA = "fsdp2prof.estimate.step/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareUse:
    """Accelerators, and the network between nodes."""

    name: str
    gpus_per_node: int
    nodes: int
    network: str | None
    """Network between nodes; null on one node."""
    peak_flops_per_s: int | None
    """Peak rate of one accelerator in the compute dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """The step with unknown inputs at their most and least favourable values."""

    low_ns: int
    high_ns: int
    unknown: list[str]
    """Varied unknowns and their limits."""
    simulated_low_ns: int | None = None
    """Step with the most favourable inputs, before the margin of published runs; null if not simulated."""
    simulated_high_ns: int | None = None
    """Step with the least favourable inputs, before the margin of published runs; null if not simulated."""
    published_ns: int | None = None
    """Step by the median of published over predicted ones; null of runs whose predictions are not biased."""
    published_of: str | None = None
    """Which published ones these are: of mixtures of experts, or of dense models on an accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate(Shown):
    """Result of ``estimate step``: the predicted training step of one rank."""

    schema: str = STEP_ESTIMATE_SCHEMA
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    hardware: HardwareUse
    verdict: list[str]
    """Sentences: step time, what published ones add to it, bottleneck, most exposed communication."""
    step_ns: int
    tokens_per_step: int
    """Tokens per step over all ranks."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    """Model FLOPs utilization: matrix products and attention of one forward and backward, causal attention
    counted once, gradients of frozen weights not at all, as a fraction of the peak."""
    hfu: float | None
    """Hardware FLOPs utilization: as ``mfu``, including recomputation."""
    breakdown_ns: BreakdownNs
    """Time by activity; sums to the step of the simulated stage, without the pipeline's bubble."""
    bubble_ns: int
    """Time that a pipeline stage waits for the others; 0 without a pipeline."""
    kernels_ns: dict[str, int]
    """Kernel time by what bounds it: ``matmul``, ``attention``, ``memory`` (bandwidth), ``launch``."""
    bound_by: str
    """Largest part: ``compute``, ``memory_bandwidth``, ``nvlink``, ``pcie``, ``gloo``, ``network`` or
    ``host``."""
    by_layer: list[LayerRow]
    """Communication by layer, most exposed first."""
    trace: TraceAnalysis
    """Analysis of the predicted step by ``analyze trace``: idle causes, delays, bandwidth, folded layers."""
    range: StepRange
    assumptions: list[str]
    config: ConfigRead | None = None
    """Interpretation of the trainer's configuration; null without one."""
