"""Result of ``plan``: the best configuration of a training, the best of each other kind, why they lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.estimate import ConfigRead, EstimatedMesh, EstimatedModel, EstimatedPolicy, Fit
from fsdp2prof.results.shown import Shown


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
    """Options that were not searched: name -> value."""
    reserve_frac: float
    device_total_bytes: int
    limit_bytes: int
    """Bytes that a configuration may take: the device's memory without the headroom."""
    objective: str
    """``tokens``, ``cost`` or ``memory``."""
    price_per_gpu_hour: float | None
    currency: str | None = None
    """Currency of the price; null unless it was named."""
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
    """The configuration in short: ``dp_shard=256, batch 1 x 4, ac=op``."""
    reserved_bytes: int
    """Peak of the caching allocator."""
    total_low_bytes: int
    """Total at the low end: with what no allocator counts, and every unknown at its low end."""
    total_bytes: int
    """Total at the high end."""
    headroom_bytes: int
    """Bytes below the limit at the high end; negative: over it."""
    fit: Fit
    """Whether it leaves the headroom asked for: ``fits``, ``does_not_fit``, or ``depends``."""
    depends_on: list[str]
    """Unknowns that decide whether it fits, where it depends."""
    step_ns: int
    exposed_ns: int
    """Communication that nothing hides."""
    exposed_frac: float
    bubble_ns: int
    tokens_per_s: float
    """Tokens per second of all GPUs together."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    gpu_hours_per_billion_tokens: float
    cost_per_billion_tokens: float | None
    """Cost in the currency of the price; null without a price."""
    confirmed: bool
    """Whether the numbers are the execution engine's own; else the fast path's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFamily:
    """The best configuration of one kind of parallelism, or of one change to the winner."""

    name: str
    """Name: the kinds of parallelism, or the change: ``tp=8``, ``ac=none``."""
    best: PlanPoint
    configurations: int
    """Configurations searched in this family."""
    fitting: int
    why: str
    """Reason why it lost, with numbers; for the winner, its description."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrecision:
    """The best configuration in another precision, which changes the training's numbers: never the winner."""

    option: str
    """``reduce_dtype`` (of gradients) or ``orig_dtype`` (of shards, gradients and optimizer state)."""
    value: str
    best: PlanPoint
    configurations: int
    """Configurations scored in this precision: all that could be its best."""
    why: str
    """Difference to the winner, with numbers."""
    take: str
    """The option that plans in it: ``--fix reduce_dtype=bfloat16``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FastPathError:
    """Error of the search's own numbers against the engine's, where both are known."""

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
    """Shallow and full executions of the model that the numbers rest on."""
    complete: bool
    """False: it was interrupted, and this is the best so far."""
    error: FastPathError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The answer to ``--max``, ``--min`` or a budget."""

    question: str
    """``max batch-size``, ``max seq-len``, ``min gpus`` or ``budget``."""
    value: int | None
    """The answer; null where there is none."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The winner's settings, to paste."""

    tool: str
    """``estimate memory``, ``estimate comm``, ``estimate step``, ``torchtitan to 0.2`` (TOML),
    ``torchtitan 0.3`` (options), ``accelerate`` (YAML) or ``fully_shard`` (Python)."""
    text: str
    note: str = ""
    """What this tool cannot say of the winner."""


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
    """Families, best first; those that do not fit come last, by the memory missing."""
    changes: list[PlanFamily]
    """The winner with one option changed, and the effect."""
    precisions: list[PlanPrecision]
    """The best of all configurations in each other precision; empty where the precision is fixed."""
    pareto: list[PlanPoint]
    """Pareto front: no other configuration is both faster and smaller; the smallest first."""
    answer: PlanAnswer | None
    recipes: list[Recipe]
    search: PlanSearch
    assumptions: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Options that were given and are searched, and so not taken."""
    simplest: PlanPoint | None = None
    """The configuration with the fewest kinds of parallelism that the engine finds at most 5 % slower; null
    where that is the winner."""
    simplest_why: str = ""
    """How it differs from the winner, with numbers."""
    equal_frac: float = 0.0
    """Largest error of the search's own steps where the engine ran them: a smaller difference is none."""
    config: ConfigRead | None = None
    """How the trainer's configuration was read; null unless there was one."""
