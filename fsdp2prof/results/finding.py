"""What an analysis says is worth acting on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = ["SEVERITIES", "Finding", "Severity"]

Severity = Literal["high", "medium", "low", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The most severe first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something worth acting on, with its evidence."""

    id: str
    severity: Severity
    fqn: str | None
    message: str
    """What is wrong and what to change, in one or two sentences."""
    evidence: dict[str, Any] = field(default_factory=dict)
