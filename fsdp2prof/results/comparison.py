"""Results of ``compare``: two runs, traces, recordings or estimates, or a run against a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results import Shown
from fsdp2prof.results.peak import Peak
from fsdp2prof.results.run import ProcessorUse
from fsdp2prof.results.step import StepTimeline, UnrecordedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDelta:
    """Bytes of one category, layer or line at the peaks of two recordings."""

    before_bytes: int
    after_bytes: int
    delta_bytes: int
    category: str | None = None
    fqn: str | None = None
    op: str | None = None
    stack: list[str] = field(default_factory=list)
    """Stack frames, innermost first; empty except in rows by stack."""
    place: str | None = None
    """Line of the model or script that allocated; null except in rows by stack and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemoryDelta:
    """Bytes of one layer at both peaks, or of several layers with equal bytes before and equal bytes
    after."""

    name: str
    """Label: ``layers.0``, ``layers.0-31``, ``(root)``, ``(no layer)``."""
    fqns: list[str | None]
    before_bytes: int
    """Bytes of all layers of this row."""
    after_bytes: int
    delta_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryComparison(Shown):
    """Two recordings at their peaks; each list sums to ``delta_bytes`` and starts with the largest change."""

    schema: str = "fsdp2prof.memory_comparison/1"
    before: Peak
    after: Peak
    delta_bytes: int
    by_category: list[MemoryDelta]
    by_layer: list[MemoryDelta]
    by_stack: list[MemoryDelta]
    """Changes by operator and whole stack; empty if results and not recordings are compared."""
    by_layer_folded: list[LayerMemoryDelta] = field(default_factory=list)
    """``by_layer`` with layers of equal bytes, whose names differ in one number, folded."""
    by_place: list[MemoryDelta] = field(default_factory=list)
    """``by_stack`` summed by operator and line of the program."""
    before_path: str = ""
    """Path of the recording; empty if results are compared."""
    after_path: str = ""
    verdict: list[str] = field(default_factory=list)
    """Sentences: the change of the peak, the kinds and layers that changed most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpread:
    """Step durations of one side and their spread."""

    measured_on: Literal["unrecorded", "traced", "layers"]
    """Steps measured: unrecorded ones if both sides have some, otherwise windows of traced steps, or
    intervals between forwards of repeated layers in a recording without step marks."""
    steps: int
    typical_ns: float
    """Step time: median of unrecorded steps, or mean of traced ones."""
    low_ns: float
    """Lower end of the spread: lower quartile of unrecorded steps, or the shortest traced step."""
    high_ns: float
    """Upper end of the spread: upper quartile of unrecorded steps, or the longest traced step."""


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
    """Number of step windows over all ranks, of which times are means."""
    step_min_ns: int | None
    """Duration of the shortest window; a difference within the spread of one side is not a change."""
    step_max_ns: int | None
    spread: StepSpread | None = None
    """Step time in the kind of steps that both sides have; null if one side has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeChange:
    """A part of the step on both sides, each a mean over ranks and steps unless stated otherwise."""

    part: str
    """``step``, ``unrecorded_step``, or a key of :class:`BreakdownNs`."""
    before_ns: float
    after_ns: float
    delta_ns: float
    delta_frac: float | None
    """Change as a fraction of the value before; null where that is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFigures:
    """Collectives of one layer, phase and op: means per rank and step, exact integers where possible."""

    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float | None
    """Times and bandwidth; null for an estimate."""
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
    """Collectives of that side; null if it has none."""
    after: CommFigures | None
    delta: CommFigures
    equal: bool
    """Whether count, payload and wire bytes are known and exactly equal; a broadcast has no wire bytes."""
    before_dtypes: list[str]
    after_dtypes: list[str]
    before_group_sizes: list[int]
    after_group_sizes: list[int]
    layers: int = 1
    """Number of layers folded into this row, which is their sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPeakChange:
    """Peak memory of one rank on both sides, or of the rank with the highest peak if the sides share none."""

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
    """A setting that differs; null is absent."""

    name: str
    before: str | None
    after: str | None
    settings: int = 1
    """Number of settings folded into this row, all with the same change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison(Shown):
    """Result of ``compare``: what changed from one run, trace, recording or estimate to another."""

    schema: str = "fsdp2prof.compare/1"
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: the change of the step and whether it exceeds the spread, its largest part,
    memory."""
    before: ComparedInput
    after: ComparedInput
    settings: list[SettingChange]
    """Settings that differ between two runs."""
    settings_folded: list[SettingChange] = field(default_factory=list)
    """Settings that differ, with equal changes of repeated layers folded."""
    step: TimeChange | None
    """Change of the mean traced step; null, with an empty breakdown, unless both sides have a trace."""
    breakdown: list[TimeChange]
    """Parts of the step; their changes sum to the step's."""
    exposed: TimeChange | None = None
    """Change of exposed communication, over all kinds."""
    beyond_spread: bool | None = None
    """Whether the spreads of the two sides do not overlap; null if a side has fewer than three steps."""
    unrecorded_step: TimeChange | None
    """Change of the median unrecorded step over all ranks; null unless both sides are runs with unrecorded
    steps."""
    layer_pace: TimeChange | None = None
    """Change of the median time from one forward of repeated layers to the next (``part``: their name);
    null unless a side has no step marks, in which case ``step`` is null."""
    machine_changed: str | None = None
    """Difference in the use of the hosts' processors, as a clause; null if there is none, or if it is
    unknown."""
    communication: list[CommChange]
    """Layers, largest growth of exposed time first; without times, largest change in bytes first."""
    communication_folded: list[CommChange] = field(default_factory=list)
    """Layers, with similar ones folded; one that changed much more than its siblings has its own row."""
    communication_differing: list[CommChange] = field(default_factory=list)
    """Layers whose counts or bytes differ, with similar ones folded."""
    communication_equal: bool | None
    """Whether counts and bytes of every layer are equal; null unless both sides have collectives."""
    peaks: list[RankPeakChange]
    """Peaks by rank, largest growth first."""
    memory: MemoryComparison | None
    """Contents of the peak that grew most; ``by_stack`` is empty. Null unless both sides have memory."""
    equalities: list[str] = field(default_factory=list)
    """Quantities that are exactly equal on both sides, in words."""
    warnings: list[str]
    before_timeline: StepTimeline | None = None
    """Timeline of a typical step of that side; null if it has no trace."""
    after_timeline: StepTimeline | None = None


BASELINE_SCHEMA = "fsdp2prof.baseline/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineCollectives:
    """Collectives of one phase and op: sums over layers, ranks and steps; null is unknown."""

    phase: str
    op: str
    count: int
    payload_bytes: int | None
    wire_bytes: int | None
    total_ns: int | None
    exposed_ns: int | None
    stall_ns: int | None
    dtypes: list[str]
    group_sizes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselinePeak:
    """Highest peak of all ranks."""

    rank: int
    allocated_bytes: int
    reserved_bytes: int | None
    categories: dict[str, int]
    """Bytes by category; they sum to ``allocated_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline(Shown):
    """Sums of a run written by ``compare --write-baseline``; their size does not depend on layers or
    ranks."""

    schema: str = BASELINE_SCHEMA
    kind: str
    """``run``, ``trace`` or ``memory``."""
    world_size: int | None
    devices: list[str]
    traced_ranks: int
    windows: int
    """Number of traced steps of all ranks in the sums."""
    step_ns: int | None
    """Total duration of the traced steps; null without any."""
    breakdown_ns: dict[str, int]
    """Part of :class:`BreakdownNs` -> sum; they add up to ``step_ns``."""
    spread: StepSpread | None
    """Spread of the traced steps."""
    unrecorded_step: UnrecordedStep | None
    collectives: list[BaselineCollectives] | None
    """Sums by phase and operation; null without traced steps."""
    peak: BaselinePeak | None
    settings: dict[str, str] = field(default_factory=dict)
    """Command, world size, device, optimizer, training loop and versions of a run."""
    processors: ProcessorUse | None = None
    """Processor time of the recorded hosts; null unknown."""
