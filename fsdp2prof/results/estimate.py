"""Results of ``estimate``: communication, checkpoints, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp2prof.results.communication import LayerRow
from fsdp2prof.results.memory import LayerPeak
from fsdp2prof.results.peak import CategoryBytes, LayerBytes, LayerMemory, Remedy
from fsdp2prof.results.shown import Shown
from fsdp2prof.results.step import BreakdownNs
from fsdp2prof.results.trace import TraceAnalysis


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingMethod:
    """One way to make sequences of documents."""

    name: str
    """Name of the method: ``padded``, ``longest_in_batch``, ``packed`` or ``concatenated``."""
    sequences: int
    tokens: int
    """Tokens computed, padding included."""
    padding_tokens: int
    padding_frac: float
    """Padding as a part of the computed tokens."""
    cut_documents: int
    """Documents that continue in another sequence."""
    attention_pairs: int
    """Pairs of a token and one before it, or itself, that causal attention computes over whole sequences."""
    useful_pairs_frac: float
    """Fraction of the computed pairs within one document: what a document mask leaves to compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingEstimate(Shown):
    """What padding costs with each way to make sequences of documents."""

    schema: str = "fsdp2prof.estimate.packing/1"
    seq_len: int
    batch_size: int
    documents: int
    tokens: int
    """Tokens of all documents, without what was cut off."""
    longest: int
    """Tokens of the longest document."""
    mean: float
    truncated_documents: int
    """Documents longer than a sequence."""
    truncated_tokens: int
    """Tokens cut off long documents, except where documents are concatenated."""
    methods: list[PackingMethod]
    verdict: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


COMM_ESTIMATE_SCHEMA = "fsdp2prof.estimate.comm/1"
MEMORY_ESTIMATE_SCHEMA = "fsdp2prof.estimate.memory/1"

Fit = Literal["fits", "depends", "does_not_fit"]
"""``depends``: the two ends of the range decide differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedModel:
    """What an estimate is of."""

    name: str
    """Name of the model, or the script of a recorded run."""
    parameters: int
    """Elements, all parameters together."""
    blocks: int | None = None
    """Blocks of the model; null for a recorded run."""
    groups: int | None = None
    """FSDP parameter groups of a recorded run; null otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedMesh:
    """The device mesh; a size is null where a recorded run does not say it."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    """Expert-parallel ranks, out of those of dp_shard x cp."""
    world_size: int
    dims: dict[str, int] = field(default_factory=dict)
    """A recorded run's own dimensions of FSDP, by the names that it gave them."""


class EstimatedPolicy(dict[str, Any]):
    """How the run trains: every option of ``PolicySpec``, which declares and documents them, by name.

    Values are also attributes. None also means that the recorded run does not state the option.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a policy has no option {name!r}") from None


def decoding_hook(kind: type, value: Any) -> Any:
    """Make a policy of its JSON: what ``msgspec`` needs as ``dec_hook`` to read an estimate."""
    if kind is EstimatedPolicy and isinstance(value, dict):
        return EstimatedPolicy(value)
    raise TypeError(f"a {kind.__name__} of {type(value).__name__}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigRow:
    """One key of a trainer's configuration and the option that it became."""

    key: str
    """As the trainer names it; tables are joined by dots."""
    value: str
    option: str
    became: str
    """Value of the option."""
    source: str
    """The file that gives it, or the line of the trainer's code that holds its default."""
    given: bool
    """Whether a file gives the value; else it is the trainer's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigRead:
    """How a trainer's configuration was read."""

    format: str
    files: list[str]
    stack: str
    """Software stack that is assumed where no file names one."""
    rows: list[ConfigRow]
    without_effect: list[str]
    """Keys that change no estimate: logging, data sets, learning rates."""
    not_known: list[str]
    """Keys that the reader does not know, of a fork or another version; they had no effect."""
    notes: list[str]
    """Contradictions, sections without effect, and unmodelled features."""
    open: list[str]
    """Assumptions that no file confirms and the answer rests on."""


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
    """Process group of a recorded run; null in a prediction from specifications."""
    mesh_dim: str | None
    dtype: str
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int
    layers: int = 1
    """Layers folded into this row, of which it is the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTotals:
    """One kind of collective summed over a step."""

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    wire_frac: float | None = None
    """Wire bytes as a part of all; null where nothing is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """One synchronisation of trained weights with inference engines."""

    engines: int
    """Copies of the model that serve; 0: on the training's own devices."""
    engine_tp: int
    """Tensor-parallel ranks of an engine."""
    dtype: str
    """What engines hold."""
    per: str
    """What is gathered at once: ``parameter``, ``layer`` (an FSDP unit) or ``whole``."""
    gathers: int
    """All-gathers that every training rank takes part in."""
    gather_payload_bytes: int
    gather_wire_bytes: int
    """Bytes sent by one training rank to gather."""
    broadcasts: int
    """Tensors that the first training rank sends to all ranks of all engines."""
    sent_bytes: int
    """Bytes that the first training rank sends, each tensor once."""
    received_bytes: int
    """Bytes received by all ranks of all engines together; each receives every tensor whole."""
    kept_bytes: int
    """Bytes kept by one rank of an engine, its tensor-parallel part."""
    buffer_bytes: int
    """Most bytes that a training rank holds gathered at once, including the cast copy of one tensor."""
    bandwidth_bytes_per_s: int | None = None
    """Bytes that one rank sends per second; null unless given."""
    gather_seconds: float | None = None
    """Time at that rate, without latency."""
    send_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommEstimate(Shown):
    """Result of ``estimate comm``: what one rank sends in a steady training step."""

    schema: str = COMM_ESTIMATE_SCHEMA
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    groups: list[CommRow]
    per_step: dict[str, CommTotals]
    """Op -> sum over ``groups``."""
    assumptions: list[str]
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: how much is sent, the largest part, a change that sends less."""
    total: CommTotals = field(default_factory=CommTotals)
    """Sum over ``per_step``."""
    groups_folded: list[CommRow] = field(default_factory=list)
    """``groups`` with repeated layers that send the same folded, as ``layers.0-31``."""
    advice: list[str] = field(default_factory=list)
    """Changes that send less, most bytes first."""
    weight_sync: WeightSync | None = None
    """Transfer of the weights to inference engines, outside the step; null unless asked for."""
    config: ConfigRead | None = None
    """How the trainer's configuration was read; null unless there was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEstimate(Shown):
    """Result of ``estimate checkpoint``: bytes of a distributed checkpoint and the time to write it."""

    schema: str = "fsdp2prof.estimate.checkpoint/1"
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    writers: int
    """Ranks that write a shard file: those of one replica."""
    files: int
    """``__RANK_0.distcp`` of each writer plus ``.metadata``."""
    parameter_bytes: int
    """Bytes of all parameters, once, in their original dtype."""
    optimizer_bytes: int
    """Bytes of all optimizer state, once."""
    sharded_bytes: int
    """Bytes of all shard files together: tensors only."""
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
    """Sentences: what is written, by which ranks, and how long it takes where the bandwidth is known."""
    bandwidth_bytes_per_s: int | None = None
    """Bandwidth that one writing rank sustains; null unless given."""
    config: ConfigRead | None = None
    """How the trainer's configuration was read; null unless there was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePart:
    """One part of the device memory that no allocator counts, as a range."""

    name: str
    low: int
    high: int
    source: str
    """Source of the range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideAllocator:
    """Device memory that no allocator counts (context, kernels, communicators): a range."""

    low: int
    high: int
    parts: list[OutsidePart] = field(default_factory=list)
    """Parts of the range; they sum to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """A property of the run that was not given or cannot be known, with its effect on the estimate."""

    name: str
    low_bytes: int
    """Bytes by which the reserved peak may be lower than predicted; zero or negative."""
    high_bytes: int
    """Bytes by which it may be higher; zero or positive."""
    why: str
    """One sentence: the unknown, and the information that would settle it."""


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
    """Bytes by category; they sum exactly to ``active_bytes``."""
    by_layer: list[LayerBytes]
    """Bytes by layer; they sum exactly to ``active_bytes``."""
    streams: dict[str, int]
    """Reserved bytes of each stream's pool when the reserved peak is reached; sums to ``reserved_bytes``."""
    by_category: list[CategoryBytes] = field(default_factory=list)
    """Bytes by category with fractions, as in :class:`Peak`."""
    layers: list[LayerMemory] = field(default_factory=list)
    layers_folded: list[LayerMemory] = field(default_factory=list)

    @property
    def allocated_bytes(self) -> int:
        """``active_bytes``, as a recorded peak calls them."""
        return self.active_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Peaks of one predicted training step."""

    step: int
    reserved_bytes: int
    active_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedChange:
    """A change to a run that does not fit, and what an estimate of the changed run says."""

    changes: list[str]
    """Options as people write them; several are made together."""
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    reserved_bytes: int
    headroom_bytes: int
    """Device memory left, as the estimate's own; negative: missing."""
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(Shown):
    """Result of ``estimate memory``: what one rank's device will hold."""

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
    """Whether it fits; null unless the hardware was given, and where it depends: ``fit`` says on what."""
    headroom_bytes: int | None
    """Device memory left above the high ends of the reserved peak and outside of it; negative: missing."""
    advice: list[str]
    """Changes to make when it does not fit."""
    assumptions: list[str]
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: how much, whether it fits, its largest part or what to change."""
    device: str | None = None
    """Name of the hardware; null unless it was given."""
    fit: Fit | None = None
    """``fits``, ``does_not_fit`` or ``depends``; null unless the hardware was given."""
    headroom_high_bytes: int | None = None
    """Device memory left above the low ends of the peak and outside the allocator."""
    reserved_low_bytes: int | None = None
    """Least reserved peak, with all unknowns at their low end."""
    reserved_high_bytes: int | None = None
    active_low_bytes: int | None = None
    """Least bytes in use at the peak; null where a measured peak takes the range's place."""
    active_high_bytes: int | None = None
    unknowns: list[Unknown] = field(default_factory=list)
    """Unknowns at the ends of the range, the widest first; empty: the peak is not a range."""
    depends_on: list[str] = field(default_factory=list)
    """Unknowns that decide whether it fits, and by how much."""
    remedies: list[Remedy] = field(default_factory=list)
    """Changes left to make with the bytes that each takes off the peak at most, most bytes first."""
    tried: list[TriedChange] = field(default_factory=list)
    """Changes that were estimated because this may not fit, in the order of the trials."""
    config: ConfigRead | None = None
    """How the trainer's configuration was read; null unless there was one."""


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
    """Peak rate of one accelerator in the dtype that the model computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """The step under the kindest and the harshest of the inputs that are not known."""

    low_ns: int
    high_ns: int
    unknown: list[str]
    """Unknowns that are varied, and their limits."""
    simulated_low_ns: int | None = None
    """The step under the kindest inputs, before the margin of published runs; null if not simulated."""
    simulated_high_ns: int | None = None
    """The step under the harshest inputs, before the margin of published runs; null if not simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate(Shown):
    """Result of ``estimate step``: the predicted training step of one rank."""

    schema: str = STEP_ESTIMATE_SCHEMA
    model: EstimatedModel
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    hardware: HardwareUse
    verdict: list[str]
    """At most three sentences: how long, what bounds it, the most exposed communication."""
    step_ns: int
    tokens_per_step: int
    """Tokens of a step, all ranks together."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    """Model FLOPs utilization: products and attention of one forward and backward, causal attention counted
    once, over the peak."""
    hfu: float | None
    """Hardware FLOPs utilization: as ``mfu``, including recomputation."""
    breakdown_ns: BreakdownNs
    """Time by activity; sums to the step of the simulated stage, without the pipeline's bubble."""
    bubble_ns: int
    """Time that a pipeline stage waits for the others; 0 without a pipeline."""
    kernels_ns: dict[str, int]
    """Kernel time by what bounds it: ``matmul``, ``attention``, ``memory`` (bandwidth), ``launch``."""
    bound_by: str
    """``compute``, ``memory_bandwidth``, ``nvlink``, ``pcie``, ``gloo``, ``network`` or ``host``: the largest
    part."""
    by_layer: list[LayerRow]
    """Layers, worst exposed first."""
    trace: TraceAnalysis
    """The predicted step as ``analyze trace`` sees it: idle causes, lateness, bandwidth, layers folded."""
    range: StepRange
    assumptions: list[str]
    config: ConfigRead | None = None
    """How the trainer's configuration was read; null unless there was one."""
