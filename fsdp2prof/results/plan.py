"""Result of ``plan``: the best configuration of a training, the best of each other family, and why they
lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results import Shown
from fsdp2prof.results.estimate import ConfigRead, EstimatedMesh, EstimatedModel, EstimatedPolicy, Fit


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGiven:
    """The question: cluster, batch, limits."""

    gpus: int
    hardware: str
    gpus_per_node: int
    network: str | None
    """Network; null on one node."""
    global_batch: int
    """Global batch: sequences of one optimizer step."""
    seq_len: int
    fixed: dict[str, str]
    """Fixed options: name -> value."""
    reserve_frac: float
    device_total_bytes: int
    limit_bytes: int
    """Memory limit of a configuration: the device's memory minus the reserve."""
    objective: str
    """``tokens``, ``cost`` or ``memory``."""
    price_per_gpu_hour: float | None
    currency: str | None = None
    """Currency of the price; null unless given."""
    tokens: int | None
    """Tokens of the whole training; null unless given."""
    budget_gpu_hours: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """One configuration with its memory and time."""

    family: str
    """Kinds of parallelism: ``FSDP``, ``HSDP + TP``, ..."""
    mesh: EstimatedMesh
    policy: EstimatedPolicy
    name: str
    """Short name: ``dp_shard=256, batch 1 x 4, ac=op``."""
    reserved_bytes: int
    """Peak of the caching allocator."""
    total_low_bytes: int
    """Total at the low end: including memory outside the allocator, with every unknown at its low end."""
    total_bytes: int
    """Total at the high end."""
    headroom_bytes: int
    """Bytes below the limit at the high end; negative if above it."""
    fit: Fit
    """Whether it leaves the requested reserve: ``fits``, ``does_not_fit``, or ``depends``."""
    depends_on: list[str]
    """Unknowns that decide whether it fits, if it depends."""
    step_ns: int
    exposed_ns: int
    """Exposed communication per step."""
    exposed_frac: float
    bubble_ns: int
    tokens_per_s: float
    """Tokens per second over all GPUs."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    gpu_hours_per_billion_tokens: float
    cost_per_billion_tokens: float | None
    """Cost in the currency of the price; null without a price."""
    confirmed: bool
    """Whether the numbers come from the engine; otherwise from the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFamily:
    """The best configuration of one kind of parallelism, or of one change to the winner."""

    name: str
    """Kinds of parallelism, or the change: ``tp=8``, ``ac=none``."""
    best: PlanPoint
    configurations: int
    """Configurations searched in this family."""
    fitting: int
    why: str
    """Reason why it lost, with numbers; for the winner, its description."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrecision:
    """The best configuration in another precision, which changes the training's numerics: never the
    winner."""

    option: str
    """``reduce_dtype`` (of gradients) or ``orig_dtype`` (of shards, gradients and optimizer state)."""
    value: str
    best: PlanPoint
    configurations: int
    """Number of configurations scored in this precision: all that could be its best."""
    why: str
    """Difference from the winner, with numbers."""
    take: str
    """Option that selects it: ``--fix reduce_dtype=bfloat16``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FastPathError:
    """Error of the search against the engine, for configurations that both evaluated."""

    configurations: int
    step_low_frac: float | None
    """Lowest relative error of the step before correction; null without a confirmed configuration."""
    step_high_frac: float | None
    memory_low_frac: float | None
    memory_high_frac: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSearch:
    """Size and outcome of the search."""

    configurations: int
    fitting: int
    engine_runs: int
    """Number of shallow and full executions of the model."""
    complete: bool
    """Whether the search finished; otherwise this is the best result so far."""
    error: FastPathError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The answer to ``--max``, ``--min`` or a budget."""

    question: str
    """Question: ``max batch-size``, ``max seq-len``, ``min gpus`` or ``budget``."""
    value: int | None
    """The answer; null if there is none."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The winner's settings for one tool, to paste."""

    tool: str
    """``estimate memory``, ``estimate comm``, ``estimate step``, ``torchtitan to 0.2`` (TOML),
    ``torchtitan 0.3`` (options), ``accelerate`` (YAML) or ``fully_shard`` (Python)."""
    text: str
    note: str = ""
    """Settings of the winner that this tool cannot express."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Shown):
    """Result of ``plan``: the best configuration of a training on a cluster."""

    schema: str = "fsdp2prof.plan/1"
    model: EstimatedModel
    given: PlanGiven
    verdict: list[str]
    """At most three sentences: the winner, its cost, its limit."""
    winner: PlanPoint | None
    """The best configuration; null if nothing fits."""
    families: list[PlanFamily]
    """Families, best first; those that do not fit come last, by missing memory."""
    changes: list[PlanFamily]
    """The winner with one option changed, and the effect."""
    precisions: list[PlanPrecision]
    """The best configuration in each other precision; empty if the precision is fixed."""
    pareto: list[PlanPoint]
    """Pareto front, smallest first: no other configuration is both faster and smaller."""
    answer: PlanAnswer | None
    recipes: list[Recipe]
    search: PlanSearch
    assumptions: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Given options that the plan searches itself and so ignores."""
    simplest: PlanPoint | None = None
    """Configuration with the fewest kinds of parallelism that is at most 5 % slower by the engine; null if
    that is the winner."""
    simplest_why: str = ""
    """Difference of ``simplest`` from the winner, with numbers."""
    equal_frac: float = 0.0
    """Largest error of the search's step times against the engine; smaller differences do not count."""
    config: ConfigRead | None = None
    """Interpretation of the trainer's configuration; null without one."""
