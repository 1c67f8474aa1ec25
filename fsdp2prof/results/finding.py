"""Findings of an analysis: problems with a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Severity = Literal["high", "medium", "low", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Severities, most severe first."""

Scalar: TypeAlias = int | float | str | bool | None
EvidenceValue: TypeAlias = Scalar | Sequence[Scalar | Mapping[str, Scalar]] | Mapping[str, Scalar]
"""A number or a word; a short list or mapping of them; a short list of records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Location of the largest loss in a recording."""

    fqn: str | None
    """FSDP module; the empty string is the root; null: not about a layer."""
    phase: str | None = None
    op: str | None = None
    """Kind of collective, or operator; null if neither applies."""
    rank: int | None = None
    """Rank that lost the time."""
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem with evidence and, if known, a change."""

    id: str
    severity: Severity
    fqn: str | None
    message: str
    """Problem and change, in one or two sentences."""
    change: str = ""
    """Part of the message that states the change; empty if there is none."""
    evidence: dict[str, EvidenceValue] = field(default_factory=dict)
    place: Place | None = None
    """Location of the largest loss; null if there is no single one."""
