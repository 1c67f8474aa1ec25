"""Result of ``analyze trace``: the step, its communication by layer, comparison of ranks, kernels, each
rank's waiting by layer, and bandwidth by size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results import Shown
from fsdp2prof.results.communication import (
    Attribution,
    BandwidthRow,
    Communication,
    CrossRank,
    GroupRow,
    LateRow,
    LayerRow,
    LayerTotal,
    PrefetchRow,
)
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.ledger import Ledger
from fsdp2prof.results.step import (
    Focus,
    IncompleteStep,
    LayerPace,
    RankMeans,
    StepBreakdown,
    StepTimeline,
    Throughput,
    TraceTotals,
    UnrecordedStep,
)
from fsdp2prof.results.what_if import WhatIfChange


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """Kernels (host-only: operators) of one name: means per rank and step."""

    name: str | None
    """Function name without namespaces, template arguments and parameters; null: the remaining kernels."""
    kind: Literal["compute", "fsdp_copy", "memcpy"]
    count: float
    total_ns: float
    mean_ns: float
    """Mean duration of one call."""
    step_frac: float | None
    """Fraction of the step; several streams run at once, so fractions can sum to more than 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRow:
    """Compute that one line of the model or its loss asks for: means per rank and step.

    Estimated from the recorder's looks at the training's thread, and the operators around them.
    """

    line: str
    """``model.py:88 in forward()``."""
    forward_ns: float
    backward_ns: float
    """Of the autograd nodes that its operators create."""
    step_frac: float
    """Both as a fraction of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """Matrix products or attention with the same inputs, and their rates.

    Counts and times are means per rank and step.
    """

    name: str
    """Operator: ``aten::mm``, ..."""
    shapes: str
    """Shapes of the tensors: ``8192x4096 , 4096x14336``."""
    dtype: str | None
    """Dtype; null if the tensors differ or it was not recorded."""
    count: float
    total_ns: float
    mean_ns: float
    """Mean duration of one call: of its kernels on a device, of the operator on a host."""
    flops: int
    """Operations of one call; a multiply-add counts as two."""
    bytes: int | None
    """Minimum bytes moved by one call: operands read and results written once; null if the results' dtype
    is unknown."""
    flops_per_s: float
    bytes_per_s: float | None
    of_peak_flops_frac: float | None
    """Fraction of the device's peak; null without ``--hardware``, or for a dtype without a peak."""
    of_peak_bytes_frac: float | None
    roof_frac: float | None
    """``flops_per_s`` as a fraction of the roofline: the lower of the device's peak and ``flops / bytes``
    times its memory bandwidth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWait:
    """One rank's compute stream waiting for the collectives of one layer: mean per step."""

    rank: int
    fqn: str | None
    stall_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthFit:
    """Fit of a collective's time: latency plus wire bytes over a rate.

    Least squares of relative errors over the medians of at least three sizes; only if waits are known.
    """

    op: str
    process_group: str | None
    mesh_dim: str | None
    group_size: int
    sizes: int
    latency_ns: float
    bytes_per_s: float
    """Bus bandwidth that large collectives approach."""
    knee_bytes: float
    """Payload with half of that bus bandwidth; latency dominates smaller ones."""
    error_frac: float
    """Largest relative error over the sizes."""


TRACE_SCHEMA = "fsdp2prof.trace/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """One rank's trace analysis."""

    rank: int
    world_size: int | None
    device_type: str
    steps: list[StepBreakdown]
    communication: Communication
    source: str
    """Path of the trace."""
    device_name: str | None = None
    """Model of the device as the trace gives it: ``NVIDIA H100 80GB HBM3``; null if it gives none."""
    state: str | None = None
    """State in the rank's manifest: complete, partial, crashed; null without a manifest."""
    throughput: Throughput | None = None
    unrecorded_step: UnrecordedStep | None = None
    """Unrecorded steps of this rank; null without a manifest."""
    incomplete_steps: list[IncompleteStep] = field(default_factory=list)
    """Steps with missing device records; ``steps`` contains them only if requested."""

    paces: list[LayerPace] | None = None
    """Intervals between forwards of repeated layers, in a recording whose window is an arbitrary capture;
    empty without FSDP labels. Null if the windows are steps or complete passes."""

    @property
    def misses_records(self) -> bool:
        """Whether an analysed step is incomplete, so that no conclusion can be drawn."""
        analysed = {step.step for step in self.steps}
        return any(one.step in analysed for one in self.incomplete_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSyncRow:
    """Calls with which a rank's host waited for its device inside steps, by call site."""

    rank: int
    fqn: str | None
    phase: str
    call: str
    """Runtime call: ``cudaStreamSynchronize``, ..."""
    operator: str | None
    """Operator that made the call, for instance ``aten::item``; null if there is none or it is unknown."""
    count: int
    blocked_ns: int
    site: str | None = None
    """Python line with most of this time; null if no line was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSyncPlace:
    """Host waits over all ranks: means per rank and step."""

    fqn: str | None
    phase: str
    call: str
    operator: str | None
    count: float
    blocked_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceAnalysis(Shown):
    """Result of ``analyze trace``.

    ``ranks``, ``groups``, ``prefetch`` and ``host_syncs`` have every rank and step; the other fields are
    derived from them (means, layers, folded layers, sentences).
    """

    schema: str = TRACE_SCHEMA
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: the bottleneck of the step, the layer and operation with the largest loss,
    the change to try."""
    unrecorded_step: UnrecordedStep | None = None
    """Unrecorded steps over all ranks; null without a manifest or such steps, and if the host runs ahead."""
    host_runs_ahead: bool = False
    """Whether the host took less time in unrecorded steps than the device computes in a traced one: then
    its clock does not show the step time, and the device does not wait for it."""
    rehearsed: bool = False
    """Whether the run is a rehearsal: collectives moved nothing, and their durations are meaningless."""
    totals: TraceTotals = field(default_factory=TraceTotals)
    ranks: list[RankTrace]
    by_rank: list[RankMeans] = field(default_factory=list)
    """Mean step of each rank that has steps, in order of rank."""
    groups: list[GroupRow]
    by_layer: list[LayerRow] = field(default_factory=list)
    """Communication by layer, most exposed first."""
    by_layer_folded: list[LayerRow] = field(default_factory=list)
    """Communication by layer, with similar layers folded; one much worse than its siblings has its own
    row."""
    by_layer_and_kind: list[LayerRow] = field(default_factory=list)
    """Folded rows for each kind of step (models updated alternately); empty if all steps are alike."""
    layers: list[LayerTotal] = field(default_factory=list)
    """Layers in the order of their names."""
    attribution: Attribution
    cross_rank: CrossRank
    findings: list[Finding]
    advice: list[str] = field(default_factory=list)
    """Notes: the unrecorded step time, and the limits of the recording."""
    warnings: list[str]
    prefetch: list[PrefetchRow] = field(default_factory=list)
    late: list[LateRow] = field(default_factory=list)
    """Collectives by layer and cause, longest wait first, those in time last."""
    late_folded: list[LateRow] = field(default_factory=list)
    """The same rows with similar layers folded."""
    bandwidth: list[BandwidthRow] = field(default_factory=list)
    """Bandwidth by size and group, most bytes first."""
    host_syncs: list[HostSyncRow] = field(default_factory=list)
    """Host waits, longest blocked first."""
    host_sync_places: list[HostSyncPlace] = field(default_factory=list)
    """Host waits by call site, longest blocked first."""
    what_if: list[WhatIfChange] = field(default_factory=list)
    """Single changes replayed on the recording, largest gain first; empty if none were replayed."""
    timeline: StepTimeline | None = None
    """Timeline of a typical step; null if no step was analysed."""
    kernels: list[KernelRow] = field(default_factory=list)
    """The 40 kernel names with the most time, then the remainder of each kind."""
    lines: list[LineRow] = field(default_factory=list)
    """The 20 lines of model and loss that compute most; empty if the recorder saw none."""
    arrivals: list[LateRow] = field(default_factory=list)
    """Late collectives by phase, op and layer regardless of cause; the cause is that of the longest wait."""
    layer_waits: list[LayerWait] = field(default_factory=list)
    """Waiting by rank and layer."""
    bandwidth_fits: list[BandwidthFit] = field(default_factory=list)
    """Fits for collectives with three or more sizes."""
    operators: list[OperatorRow] = field(default_factory=list)
    """The 60 matrix products and attentions by shape with the most time; empty without recorded shapes."""
    peak_memory_bytes_per_s: float | None = None
    """Memory bandwidth of one device, for ``operators``; null without ``--hardware``."""
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    """Peak of one device by dtype; empty without ``--hardware``."""
    focus: Focus | None = None
    """Filter of the shown part; null shows all."""
    ledger: Ledger | None = None
    """All time of the traced steps by cause; null without steps and in a rehearsal."""
