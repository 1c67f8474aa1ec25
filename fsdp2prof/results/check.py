"""Results of ``check run``, ``check balance``, ``check parity`` and ``check env``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp2prof.results import Shown
from fsdp2prof.results.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRow:
    """Comparison of one tensor in one step, on the rank where it differs most."""

    step: int
    """Step number; -1 is before the first step."""
    kind: str
    """``batch``, ``loss``, ``gradient`` or ``parameter``, in the order of a step."""
    name: str
    rank: int
    dtype: str
    """Lowest precision in the tensor's computation, which sets the tolerance."""
    error: float | None
    """Norm of the difference; null if the tensor is missing on one side or is not finite."""
    norm: float | None
    """Norm of the unsharded tensor; null if it is missing."""
    relative_error: float | None
    """Error relative to the norm, or to a small part of the norm of all tensors of its kind, whichever is
    larger."""
    ratio: float | None
    """Best-fitting ratio of the sharded to the unsharded tensor."""
    tolerance: float
    """Largest relative error that rounding explains."""
    state: str
    """``equal``, ``close``, ``differs`` or ``missing`` (exists on one side only)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityStep:
    """One step on both sides."""

    step: int
    plain_loss: float | None
    """Mean loss over ranks and micro-batches; null if not finite."""
    sharded_loss: float | None
    worst_gradient: str | None
    worst_gradient_error: float | None
    """Largest relative error of a gradient."""
    worst_parameter: str | None
    worst_parameter_error: float | None
    differing: int
    """Number of tensors that differ or are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCheck(Shown):
    """Comparison of a model's training under ``fully_shard`` with unsharded training."""

    schema: str = "fsdp2prof.check.parity/1"
    passed: bool
    verdict: list[str]
    model: str
    mesh: str
    world_size: int
    micro_batches: int
    tolerances: dict[str, float]
    """Dtype -> relative error that rounding explains."""
    first: ParityRow | None
    """First tensor that differs; null if none does."""
    hint: str | None
    """Common cause of such a difference; null if there are several."""
    steps: list[ParityStep]
    rows: list[ParityRow]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One check of a run or environment."""

    name: str
    state: str
    """``ok``, ``failed``, or ``unknown`` if the run lacks the data."""
    checked: int
    """Number of ranks, groups, parameters or variables checked."""
    said: str
    """Outcome in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnshardedRow:
    """A tensor that every rank holds whole."""

    kind: str
    """``parameter`` or ``buffer`` of a root module, or ``optimizer`` for a tensor that only an optimizer
    holds."""
    root: int
    fqn: str
    dtype: str
    shape: list[int]
    bytes: int
    excess_bytes: int
    """Bytes per rank that sharding the tensor would save."""
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck(Shown):
    """Whether a run is sharded as its mesh requires, and known mistakes in its setup."""

    schema: str = "fsdp2prof.check/1"
    passed: bool
    """Whether there is no finding of severity ``high``."""
    verdict: list[str]
    world_size: int
    ranks: list[int]
    """Ranks whose manifest has parameter groups."""
    checks: list[CheckRow]
    findings: list[Finding]
    """Findings, most severe first."""
    unsharded: list[UnshardedRow]
    """Unsharded tensors of the lowest rank, largest first."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedRank:
    """One rank of a probed environment."""

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
    """All-gathers of one size over all ranks; times of the slowest rank."""

    payload_bytes: int
    median_ns: int
    bus_bytes_per_s: int
    """Bus bandwidth as nccl-tests defines it: (n-1)/n of the payload over the time."""
    expected_bytes_per_s: int | None
    """Usual bus bandwidth of large all-gathers on the named hardware; null without hardware."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedTransport:
    """Transport that NCCL uses between two nodes, or between ranks of one node."""

    source: str
    target: str
    """Host of the other rank."""
    transport: str
    """Transport as NCCL names it: ``P2P/CUMEM``, ``NET/IB/0/GDRDMA``, ``SHM``."""
    pairs: int
    """Number of pairs of ranks and channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentCheck(Shown):
    """Whether the ranks of a launch command can train together."""

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
    """Transports by pair of nodes; empty without NCCL."""
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedRank:
    """Mean of one rank over the steps that all ranks have."""

    rank: int
    busy_ns: float
    """Step time without waiting for communication: the rank's own work."""
    behind_ns: float
    """``busy_ns`` minus the mean of the ranks."""
    slowest_steps: int
    """Number of steps in which no rank had more work."""
    tokens: float | None
    """Tokens of this rank's documents per step; null without lengths."""
    computed_tokens: float | None
    """Tokens per step including padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedStep:
    """One step over all ranks."""

    step: int
    duration_ns: float
    """Mean step duration over the ranks."""
    mean_busy_ns: float
    max_busy_ns: int
    lost_ns: float
    """``max_busy_ns`` minus ``mean_busy_ns``: the most that perfect balance could gain."""
    slowest_rank: int
    mean_tokens: float | None
    """Mean tokens computed by a rank, padding included; null if the lengths do not cover the step."""
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBalance:
    """Statistics of the document lengths over the measured steps."""

    documents: int
    """Number of documents in the file."""
    steps: int
    """Number of measured steps that the file covers."""
    tokens: int
    """Tokens of these steps' documents over all ranks."""
    computed_tokens: int
    """Tokens of these steps over all ranks, padding included."""
    padding_frac: float
    """Padding as a fraction of the computed tokens."""
    padding_ns: float
    """Mean time of a step that padding costs if work is proportional to tokens: the most that packing
    gains."""
    imbalance_frac: float
    """Mean over the steps of (most tokens of a rank / mean tokens of the ranks) - 1."""
    explained_frac: float | None
    """Fraction of the variance of busy time between ranks of a step that tokens explain (r squared); null
    if either does not vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceCheck(Shown):
    """Balance of work between the ranks of a recorded run."""

    schema: str = "fsdp2prof.check.balance/1"
    passed: bool
    """Whether there is no finding of severity ``high``."""
    verdict: list[str]
    path: str
    measured_on: Literal["watched", "traced"]
    """Source of the steps: ``watched`` (``record --watch``) or ``traced``."""
    step_ns: float
    """Mean step time over ranks and steps."""
    busy_ns: float
    """Own work without waiting, mean over ranks and steps."""
    lost_ns: float
    """Mean over the steps of the slowest rank's work minus the mean work of the ranks."""
    lost_frac: float
    """``lost_ns`` as a fraction of ``step_ns``."""
    constant_ns: float
    """Part of ``lost_ns`` that a single rank causes on average over all steps."""
    varying_ns: float
    """Rest of ``lost_ns``: the slowest rank changes from step to step."""
    tokens: TokenBalance | None
    """Tokens by the file of lengths; null without a file."""
    findings: list[Finding]
    ranks: list[BalancedRank]
    """Ranks, most work first."""
    steps: list[BalancedStep]
    """Measured steps in order."""
    assumptions: list[str]
    warnings: list[str]
