"""Thresholds of findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from fsdp2prof.errors import UsageError
from fsdp2prof.results.finding import Finding, Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingThresholds:
    """Thresholds of findings; fractions are of the step unless stated otherwise."""

    min_cost_frac: float = 0.01
    """Losses below this appear only in the ledger."""
    medium_cost_frac: float = 0.03
    """From here on a loss has medium severity, and its remedy is proposed."""
    high_cost_frac: float = 0.1
    """From here on a loss has high severity."""
    cpu_cost_frac: float = 0.05
    """The same as ``medium_cost_frac`` for ranks that share the cores of a host, whose steps vary more."""
    small_payload_bytes: int = 8 << 20
    """Collectives below this are small: launch latency, not bandwidth, sets their time."""
    knee_frac: float = 0.5
    """Collectives slower than this fraction of the group's best busbw are below the bandwidth knee."""
    small_count: int = 8
    """Small collectives in a step from which wrapping is called too fine."""
    coarse_frac: float = 0.5
    """Fraction of all gathered parameters in one all-gather from which wrapping is called too coarse."""
    root_frac: float = 0.3
    """Fraction of all gathered parameters in the root from which wrapping its large modules is proposed."""
    root_payload_bytes: int = 256 << 20
    """Unsharded bytes of the root below which keeping it gathered is not worth a word."""
    straggler_frac: float = 0.02
    """Waiting for one rank, of the steps of the ranks that waited."""
    host_bound_frac: float = 0.1
    """Idle time because the host launched nothing."""
    slowdown: float = 1.5
    """Slowdown by tracing from which it is reported first."""
    padding_frac: float = 0.02
    """Padding in sharded parameters, of their bytes."""


def parse_thresholds(options: Sequence[str]) -> FindingThresholds:
    """Parse ``NAME=VALUE`` options. Raises ``UsageError`` for an unknown name or another value."""
    known = {field.name: field.type for field in fields(FindingThresholds)}
    values: dict[str, float] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in known:
            raise UsageError(
                f"not a finding threshold: {option!r}; write NAME=VALUE with one of {', '.join(known)}"
            )
        try:
            values[name] = int(text) if known[name] == "int" else float(text)
        except ValueError:
            raise UsageError(f"not a number in {option!r}") from None
    return replace(FindingThresholds(), **values)  # type: ignore[arg-type]


def severity_of(frac: float, limits: FindingThresholds, on_device: bool) -> Severity:
    """Return how much a part of the step matters."""
    medium = limits.medium_cost_frac if on_device else max(limits.medium_cost_frac, limits.cpu_cost_frac)
    if frac >= limits.high_cost_frac:
        return "high"
    return "medium" if frac >= medium else "low"


def worth_telling(severity: Severity) -> bool:
    """Whether a loss of this severity is reported if it has a remedy."""
    return severity in ("high", "medium")


def cost_frac(found: Finding) -> float:
    """Return the cost of a finding as a fraction of the step; 0 if it has none."""
    cost = found.evidence.get("cost_frac", 0.0)
    return float(cost) if isinstance(cost, (int, float)) else 0.0
