"""Results of ``compare``: two runs, traces, recordings or estimates, or a run against a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.peak import Peak
from fsdp2prof.results.run import ProcessorUse
from fsdp2prof.results.shown import Shown
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.timeline import StepTimeline


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
    place: str | None = None
    """The line of the model or script that asked; null except by stack and place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemoryDelta:
    """What one layer holds at both peaks, or several that hold the same before and the same after."""

    name: str
    """For people: ``layers.0``, ``layers.0-31``, ``(root)``, ``(no layer)``."""
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
    """By operator and whole stack; empty where two results are compared and not two recordings."""
    by_layer_folded: list[LayerMemoryDelta] = field(default_factory=list)
    """``by_layer`` with layers whose names differ in one number folded, where they hold the same."""
    by_place: list[MemoryDelta] = field(default_factory=list)
    """``by_stack`` summed by operator and line of the program."""
    before_path: str = ""
    """What was compared; empty where two results are, and not two recordings."""
    after_path: str = ""
    verdict: list[str] = field(default_factory=list)
    """How much the peak changed, which kinds and layers changed most, and where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpread:
    """How long the steps of one side take, and how far they lie apart."""

    measured_on: Literal["unrecorded", "traced", "layers"]
    """Unrecorded steps where both sides have some, else the windows of traced ones; intervals between
    forwards of repeated layers where a recording has no step marks."""
    steps: int
    typical_ns: float
    """Step time: median of the unrecorded steps; mean of the traced ones."""
    low_ns: float
    """Shortest typical step: lower quartile of the unrecorded steps; the shortest of the traced ones."""
    high_ns: float
    """Longest typical step: upper quartile of the unrecorded steps; the longest of the traced ones."""


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
    """Shortest of them: a difference within the spread of one side is not a change."""
    step_max_ns: int | None
    spread: StepSpread | None = None
    """Step time of the steps that both sides have; null where one of them has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeChange:
    """A part of the step on both sides, each a mean over its ranks and steps unless said otherwise."""

    part: str
    """``step``, ``unrecorded_step``, or a key of :class:`BreakdownNs`."""
    before_ns: float
    after_ns: float
    delta_ns: float
    delta_frac: float | None
    """Change as a fraction of the value before; null where that is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFigures:
    """Collectives of one layer, phase and op: means per rank and step, exact integers where they are some."""

    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float | None
    """Times and bandwidth; null in an estimate."""
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
    """Collectives of that side; null where it has none."""
    after: CommFigures | None
    delta: CommFigures
    equal: bool
    """Whether count, payload and wire bytes are known and exactly the same; a broadcast has no wire bytes."""
    before_dtypes: list[str]
    after_dtypes: list[str]
    before_group_sizes: list[int]
    after_group_sizes: list[int]
    layers: int = 1
    """Layers folded into this row, of which it is the sum."""


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
    """A setting that differs; null is absent."""

    name: str
    before: str | None
    after: str | None
    settings: int = 1
    """Settings folded into this row, all changed alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison(Shown):
    """Result of ``compare``: what changed from one run, trace, recording or estimate to another."""

    schema: str = "fsdp2prof.compare/1"
    verdict: list[str] = field(default_factory=list)
    """At most three sentences: the step and whether its change exceeds the spread, its largest part,
    memory."""
    before: ComparedInput
    after: ComparedInput
    settings: list[SettingChange]
    """Settings that differ between two runs."""
    settings_folded: list[SettingChange] = field(default_factory=list)
    """Settings that differ, those of repeated layers that changed alike folded."""
    step: TimeChange | None
    """Null, with an empty breakdown, unless both sides have a trace."""
    breakdown: list[TimeChange]
    """Parts of the step; their changes sum to the step's."""
    exposed: TimeChange | None = None
    """Change of exposed communication, all kinds together."""
    beyond_spread: bool | None = None
    """Whether the spreads of the two sides do not overlap; null where a side knows fewer than three steps."""
    unrecorded_step: TimeChange | None
    """Median wall time of the steps that pay for no recording, over all ranks; null unless both sides are
    runs that have some."""
    layer_pace: TimeChange | None = None
    """Median time from one forward of repeated layers to the next one's (``part``: their name); null unless a
    side has no step marks. Then ``step`` is null."""
    machine_changed: str | None = None
    """How the hosts' processors were used otherwise, as a clause; null where they were not, or unknown."""
    communication: list[CommChange]
    """Layers, largest growth of exposed time first; where no times are known, largest change in bytes
    first."""
    communication_folded: list[CommChange] = field(default_factory=list)
    """Layers, alike ones folded; one that changed much more than its siblings keeps a row of its own."""
    communication_differing: list[CommChange] = field(default_factory=list)
    """Layers whose counts or bytes differ, alike ones folded."""
    communication_equal: bool | None
    """Whether counts and bytes of every layer are equal; null unless both sides have collectives."""
    peaks: list[RankPeakChange]
    """Peaks by rank, largest growth first."""
    memory: MemoryComparison | None
    """Contents of the peak that grew most; ``by_stack`` is empty. Null unless both sides have memory."""
    equalities: list[str] = field(default_factory=list)
    """Quantities that are equal to the byte on both sides, in words."""
    warnings: list[str]
    before_timeline: StepTimeline | None = None
    """A typical step of that side; null where it has no trace."""
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
    """The highest peak of all ranks."""

    rank: int
    allocated_bytes: int
    reserved_bytes: int | None
    categories: dict[str, int]
    """Bytes by category; they sum to ``allocated_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline(Shown):
    """Sums of a run that ``compare --write-baseline`` keeps; no larger for more layers or ranks."""

    schema: str = BASELINE_SCHEMA
    kind: str
    """``run``, ``trace`` or ``memory``."""
    world_size: int | None
    devices: list[str]
    traced_ranks: int
    windows: int
    """Traced steps of all ranks that the sums cover."""
    step_ns: int | None
    """Duration of the traced steps, summed; null without any."""
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
