"""Results of ``check``: of a run, ``balance``, ``parity`` and ``env``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRow:
    """One tensor of one step, on the rank where it differs most."""

    step: int
    """Step number; -1 is before the first."""
    kind: str
    """``batch``, ``loss``, ``gradient`` or ``parameter``; in the order in which a step makes them."""
    name: str
    rank: int
    dtype: str
    """The lowest precision that it passed through, which sets the tolerance."""
    error: float | None
    """Norm of the difference; null where one side has no such tensor, or it is not finite."""
    norm: float | None
    """Norm of the plain tensor; null where it has none."""
    relative_error: float | None
    """Error over the norm, or over a small part of that of all tensors of its kind where that is more."""
    ratio: float | None
    """By how much the plain one would have to be multiplied to come closest."""
    tolerance: float
    """Largest relative error taken for rounding."""
    state: str
    """``equal``, ``close``, ``differs`` or ``missing`` (one side has it alone)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityStep:
    """One step on both sides."""

    step: int
    plain_loss: float | None
    """Mean over ranks and micro-batches; null where not finite."""
    sharded_loss: float | None
    worst_gradient: str | None
    worst_gradient_error: float | None
    """Relative."""
    worst_parameter: str | None
    worst_parameter_error: float | None
    differing: int
    """Tensors that differ or are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCheck(Shown):
    """Whether a model trains under ``fully_shard`` as it does alone."""

    schema: str = "fsdp2prof.check.parity/1"
    passed: bool
    verdict: list[str]
    model: str
    mesh: str
    world_size: int
    micro_batches: int
    tolerances: dict[str, float]
    """Dtype -> relative error that is still taken for rounding."""
    first: ParityRow | None
    """The first tensor that differs; null where none does."""
    hint: str | None
    """What commonly makes such a difference."""
    steps: list[ParityStep]
    rows: list[ParityRow]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One thing that was checked."""

    name: str
    state: str
    """``ok``, ``failed``, or ``unknown`` where the run does not say."""
    checked: int
    """Ranks, groups, parameters or variables that it was checked for."""
    said: str
    """What was found, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshardedRow:
    """A tensor that every rank holds whole."""

    kind: str
    """``parameter`` or ``buffer`` of a root module, ``optimizer`` for what an optimizer alone holds."""
    root: int
    fqn: str
    dtype: str
    shape: list[int]
    bytes: int
    excess_bytes: int
    """Bytes of each rank that sharding it like the rest would save."""
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck(Shown):
    """Whether a run is sharded as its mesh says, and known mistakes in its setup."""

    schema: str = "fsdp2prof.check/1"
    passed: bool
    """Whether nothing of severity ``high`` was found."""
    verdict: list[str]
    world_size: int
    ranks: list[int]
    """Ranks that left a manifest with parameter groups."""
    checks: list[CheckRow]
    findings: list[Finding]
    """Findings, the most severe first."""
    unsharded: list[UnshardedRow]
    """Tensors of the lowest rank that are not sharded, the largest first."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedRank:
    """One rank."""

    rank: int
    local_rank: int
    host: str
    device: str
    backend: str
    init_ns: int
    """Time to create the process group."""
    clock_offset_ns: int | None
    """Clock offset against rank 0; null for rank 0."""
    clock_uncertainty_ns: int | None
    disk_free_bytes: int | None
    disk_write_bytes_per_s: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedGather:
    """All-gathers of one size over all ranks; of the slowest rank."""

    payload_bytes: int
    median_ns: int
    bus_bytes_per_s: int
    """As nccl-tests defines it: (n-1)/n of the payload, over the time."""
    expected_bytes_per_s: int | None
    """Usual busbw of large all-gathers on the named hardware; null without hardware."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedTransport:
    """Transport that NCCL uses between two nodes, or between the ranks of one."""

    source: str
    target: str
    """Hosts."""
    transport: str
    """Transport as NCCL names it: ``P2P/CUMEM``, ``NET/IB/0/GDRDMA``, ``SHM``."""
    pairs: int
    """Pairs of ranks and channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentCheck(Shown):
    """Whether a launch command gives ranks that can train together."""

    schema: str = "fsdp2prof.check.env/1"
    passed: bool
    verdict: list[str]
    command: list[str]
    world_size: int
    hosts: list[str]
    versions: dict[str, str]
    """Versions on the lowest rank."""
    checks: list[CheckRow]
    findings: list[Finding]
    ranks: list[ProbedRank]
    gathers: list[ProbedGather]
    transports: list[ProbedTransport]
    """Transports; empty without NCCL."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedRank:
    """One rank's mean over the steps that all ranks have."""

    rank: int
    busy_ns: float
    """What of a step is not waiting for communication: this rank's own work."""
    behind_ns: float
    """``busy_ns`` more than the mean of the ranks; negative is less."""
    slowest_steps: int
    """Steps in which no rank had more work."""
    tokens: float | None
    """Tokens of this rank's documents per step; null without lengths."""
    computed_tokens: float | None
    """Tokens per step including padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedStep:
    """One step over all ranks."""

    step: int
    duration_ns: float
    """Mean work of the ranks."""
    mean_busy_ns: float
    max_busy_ns: int
    lost_ns: float
    """``max_busy_ns`` less ``mean_busy_ns``: what the step would gain at most if all had the same work."""
    slowest_rank: int
    mean_tokens: float | None
    """Mean tokens that a rank computes, padding included; null where the lengths do not reach."""
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBalance:
    """What the lengths of the documents say of the steps."""

    documents: int
    """Documents in the file."""
    steps: int
    """Measured steps that the file covers."""
    tokens: int
    """Tokens of these steps' documents, all ranks together."""
    computed_tokens: int
    """Tokens of these steps including padding, all ranks together."""
    padding_frac: float
    """Padding as a part of the computed tokens."""
    padding_ns: float
    """Mean time of a step that padding costs if work grows with the tokens: the most that packing gains."""
    imbalance_frac: float
    """Mean over the steps of the most tokens that a rank computes over the mean of the ranks, less 1."""
    explained_frac: float | None
    """Part of the variance of busy time between the ranks of a step that goes with their tokens (r squared);
    null where either does not vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceCheck(Shown):
    """How evenly the work lies on the ranks of a recorded run."""

    schema: str = "fsdp2prof.check.balance/1"
    passed: bool
    """Whether nothing of severity ``high`` was found."""
    verdict: list[str]
    path: str
    measured_on: Literal["watched", "traced"]
    """Every step's lines (``record --watch``), or the traced steps."""
    step_ns: float
    """Mean."""
    busy_ns: float
    """Mean over ranks and steps."""
    lost_ns: float
    """Mean over the steps of what the slowest rank has more to do than the mean."""
    lost_frac: float
    """``lost_ns`` over ``step_ns``."""
    constant_ns: float
    """Part of ``lost_ns`` that one rank has more in the mean of all steps."""
    varying_ns: float
    """Part of ``lost_ns`` that remains: the slowest rank changes from step to step."""
    tokens: TokenBalance | None
    """Tokens by the file of lengths; null without one."""
    findings: list[Finding]
    ranks: list[BalancedRank]
    """Ranks, those with the most work first."""
    steps: list[BalancedStep]
    """In order."""
    assumptions: list[str]
    warnings: list[str]
