"""What an analysis says is worth acting on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Severity = Literal["high", "medium", "low", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Severities, the most severe first."""

Scalar: TypeAlias = int | float | str | bool | None
EvidenceValue: TypeAlias = Scalar | Sequence[Scalar | Mapping[str, Scalar]] | Mapping[str, Scalar]
"""A number or a word; a few of them, in order or by name; a few records of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in a recording a loss is largest."""

    fqn: str | None
    """FSDP module; the empty string is the root; null: not about a layer."""
    phase: str | None = None
    op: str | None = None
    """Kind of collective, or operator; null where neither applies."""
    rank: int | None = None
    """Rank that lost the time."""
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something worth acting on, with its evidence."""

    id: str
    severity: Severity
    fqn: str | None
    message: str
    """What is wrong and what to change, in one or two sentences."""
    change: str = ""
    """The part of the message that says what to change; empty where there is nothing to."""
    evidence: dict[str, EvidenceValue] = field(default_factory=dict)
    place: Place | None = None
    """Null where no single place of the recording shows it."""
