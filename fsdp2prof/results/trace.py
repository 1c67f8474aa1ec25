"""Result of ``analyze trace``: the step, its communication by layer, and the ranks against each other.

What a trace says of its kernels, of each rank's waiting by layer, and of how bandwidth grows with size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
from fsdp2prof.results.shown import Shown
from fsdp2prof.results.step import (
    IncompleteStep,
    LayerPace,
    RankMeans,
    StepBreakdown,
    Throughput,
    TraceTotals,
    UnrecordedStep,
)
from fsdp2prof.results.timeline import Focus, StepTimeline
from fsdp2prof.results.what_if import WhatIfChange


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """Kernels (host-only: operators) of one name: means per rank and step."""

    name: str | None
    """Of the function, without namespaces, template arguments and parameters; null: the rest."""
    kind: Literal["compute", "fsdp_copy", "memcpy"]
    count: float
    total_ns: float
    mean_ns: float
    """Of one of them."""
    step_frac: float | None
    """Of the step; several streams may run at once, so these need not sum to less than 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """Matrix products or attention of the same inputs, with their rates.

    Counts and times are means per rank and step.
    """

    name: str
    """Operator: ``aten::mm``, ..."""
    shapes: str
    """Of its tensors: ``8192x4096 , 4096x14336``."""
    dtype: str | None
    """Null where its tensors differ or it is not recorded."""
    count: float
    total_ns: float
    mean_ns: float
    """Of one call: its kernels' on a device, on a host its own."""
    flops: int
    """Of one call; a multiply-add is two."""
    bytes: int | None
    """Least that one call moves: operands read and results written once; null where the results' dtype is not
    known."""
    flops_per_s: float
    bytes_per_s: float | None
    of_peak_flops_frac: float | None
    """Null without ``--hardware``, or in a dtype that it has no peak of."""
    of_peak_bytes_frac: float | None
    roof_frac: float | None
    """``flops_per_s`` over what the device could reach at this intensity: the least of its peak and of
    ``flops / bytes`` times its memory's bandwidth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWait:
    """One rank's compute stream waiting for the collectives of one layer: mean per step."""

    rank: int
    fqn: str | None
    stall_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthFit:
    """Time of a collective as latency plus wire bytes over a rate, fitted over the sizes that ran.

    Least squares of relative errors over the medians of at least three sizes; only where waits are known.
    """

    op: str
    process_group: str | None
    mesh_dim: str | None
    group_size: int
    sizes: int
    latency_ns: float
    bytes_per_s: float
    """Busbw that large ones approach."""
    knee_bytes: float
    """Payload whose busbw is half of that: below it latency decides."""
    error_frac: float
    """Largest relative error of a size's time."""


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
    """File it came from."""
    state: str | None = None
    """The recorder's word on this rank: complete, partial, crashed; null for foreign traces."""
    throughput: Throughput | None = None
    unrecorded_step: UnrecordedStep | None = None
    """Of this rank; null for foreign traces."""
    incomplete_steps: list[IncompleteStep] = field(default_factory=list)
    """Steps that miss records of the device; ``steps`` holds them only where they were asked for."""

    paces: list[LayerPace] | None = None
    """Of layers in a recording whose window is the capture, cut anywhere; empty without FSDP labels. Null
    where the windows are steps or complete passes."""

    @property
    def misses_records(self) -> bool:
        """Whether an analysed step is incomplete, so that nothing may be concluded from it."""
        analysed = {step.step for step in self.steps}
        return any(one.step in analysed for one in self.incomplete_steps)


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
    site: str | None = None
    """Python line at which most of this time was spent; null where none was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSyncPlace:
    """The same over all ranks: means per rank and step."""

    fqn: str | None
    phase: str
    call: str
    operator: str | None
    count: float
    blocked_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceAnalysis(Shown):
    """Result of ``analyze trace``.

    ``ranks``, ``groups``, ``prefetch`` and ``host_syncs`` hold each rank and step; what is made of them for
    people (means, layers, repeated layers folded, sentences) is beside them.
    """

    schema: str = TRACE_SCHEMA
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: what bounds the step, the most expensive layer and operation, what to try."""
    unrecorded_step: UnrecordedStep | None = None
    """Over all ranks of the run; null for foreign traces, runs without such steps, and a host that runs
    ahead."""
    host_runs_ahead: bool = False
    """In unrecorded steps the host took less time than the device computes in a traced one: its clock does
    not show how long a step takes, and the device does not wait for it."""
    rehearsed: bool = False
    """Recorded by ``rehearse``: collectives moved nothing, and how long they took means nothing."""
    totals: TraceTotals = field(default_factory=TraceTotals)
    ranks: list[RankTrace]
    by_rank: list[RankMeans] = field(default_factory=list)
    """Ranks that have steps, in order."""
    groups: list[GroupRow]
    by_layer: list[LayerRow] = field(default_factory=list)
    """Worst exposed first."""
    by_layer_folded: list[LayerRow] = field(default_factory=list)
    """The same with alike layers folded; one much worse than its siblings keeps a row of its own."""
    by_layer_and_kind: list[LayerRow] = field(default_factory=list)
    """Folded rows of each kind of steps apart (models updated in turns); empty where all steps are alike."""
    layers: list[LayerTotal] = field(default_factory=list)
    """In the order of their names."""
    attribution: Attribution
    cross_rank: CrossRank
    findings: list[Finding]
    advice: list[str] = field(default_factory=list)
    """Notes: how long an unrecorded step takes, and what the recording cannot show."""
    warnings: list[str]
    prefetch: list[PrefetchRow] = field(default_factory=list)
    late: list[LateRow] = field(default_factory=list)
    """Longest wait first, those in time last."""
    late_folded: list[LateRow] = field(default_factory=list)
    """The same with alike layers folded."""
    bandwidth: list[BandwidthRow] = field(default_factory=list)
    """Most bytes first."""
    host_syncs: list[HostSyncRow] = field(default_factory=list)
    """The longest blocked first."""
    host_sync_places: list[HostSyncPlace] = field(default_factory=list)
    """The longest blocked first."""
    what_if: list[WhatIfChange] = field(default_factory=list)
    """Single changes, tried on the recording, the most gained first; empty where none were."""
    timeline: StepTimeline | None = None
    """One typical step; null where no step was analysed."""
    kernels: list[KernelRow] = field(default_factory=list)
    """The 40 names with the most time, then the remainder of each kind."""
    arrivals: list[LateRow] = field(default_factory=list)
    """The same whatever the cause, by phase, op and layer; the cause is that of the longest wait."""
    layer_waits: list[LayerWait] = field(default_factory=list)
    """By rank and layer."""
    bandwidth_fits: list[BandwidthFit] = field(default_factory=list)
    """Of collectives that ran in three sizes or more."""
    operators: list[OperatorRow] = field(default_factory=list)
    """The 60 products and attentions by shape that take longest; empty without recorded shapes."""
    peak_memory_bytes_per_s: float | None = None
    """Of one device, for ``operators``; null without ``--hardware``."""
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    """The same by dtype; empty without ``--hardware``."""
    focus: Focus | None = None
    """What is left of all that was analysed; null is all of it."""
    ledger: Ledger | None = None
    """Where all time of the traced steps went, by cause; null without steps and in a rehearsal."""
