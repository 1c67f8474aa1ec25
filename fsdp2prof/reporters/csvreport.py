"""Results as CSV: one flat table of an analysis in raw units (nanoseconds, bytes, fractions).

An unknown value is an empty field. Names come from untrusted files: one that a spreadsheet would run as a
formula is written behind an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any

from fsdp2prof.reporters.comparison_grids import comparison_rows
from fsdp2prof.results import (
    BreakdownNs,
    GroupRow,
    LayerBytes,
    LayerPeak,
    MemoryAnalysis,
    MemoryComparison,
    TraceAnalysis,
)

__all__ = [
    "MEMORY_TABLES",
    "TRACE_TABLES",
    "render_comparison",
    "render_memory",
    "render_trace",
]

TRACE_TABLES = ("groups", "steps")
"""Collectives per rank, step, layer, phase and op; step breakdowns."""

MEMORY_TABLES = ("peak", "layers")
"""What is alive at the peak per layer and category; each layer's own peak and growth per phase."""

_PARTS = [field.name for field in fields(BreakdownNs)]


def render_trace(analysis: TraceAnalysis, table: str = "groups") -> str:
    """Return one of :data:`TRACE_TABLES` with a header line."""
    if table == "groups":
        return _write(_names(GroupRow), (asdict(row) for row in analysis.groups))
    header = ["rank", "step", "start_ns", "duration_ns", *(f"{part}_ns" for part in _PARTS)]
    return _write(header, _steps(analysis))


def render_memory(analysis: MemoryAnalysis, table: str = "peak") -> str:
    """Return one of :data:`MEMORY_TABLES` with a header line."""
    if table == "peak":
        rows = ({"rank": rank.rank, **asdict(row)} for rank in analysis.ranks for row in rank.peak.by_layer)
        return _write(["rank", *_names(LayerBytes)], rows)
    rows = ({"rank": rank.rank, **asdict(row)} for rank in analysis.ranks for row in rank.layers)
    return _write(["rank", *_names(LayerPeak)], rows)


def render_comparison(comparison: MemoryComparison) -> str:
    """Return the changes between two recordings by category, layer and place, with a header line."""
    return _write(["by", "name", "before_bytes", "after_bytes", "delta_bytes"], comparison_rows(comparison))


def _names(kind: type[GroupRow | LayerBytes | LayerPeak]) -> list[str]:
    return [field.name for field in fields(kind)]


def _steps(analysis: TraceAnalysis) -> Iterator[dict[str, Any]]:
    for rank in analysis.ranks:
        for step in rank.steps:
            parts = {f"{part}_ns": getattr(step.breakdown_ns, part) for part in _PARTS}
            yield {
                "rank": rank.rank,
                "step": step.step,
                "start_ns": step.start_ns,
                "duration_ns": step.duration_ns,
                **parts,
            }


def _write(header: list[str], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: Any) -> Any:
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value
