"""Result of ``check balance``: how evenly a step's work lies on the ranks, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown


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
