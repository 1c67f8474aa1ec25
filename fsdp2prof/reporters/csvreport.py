"""Results as CSV: one flat table of an analysis in raw units (nanoseconds, bytes, fractions).

An unknown value is an empty field. Names come from untrusted files: one that a spreadsheet would run as a
formula is written behind an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from fsdp2prof.reporters.compare_rows import HEADER, flat_rows
from fsdp2prof.reporters.comparison_grids import comparison_rows
from fsdp2prof.results import (
    CommEstimate,
    CommRow,
    MemoryComparison,
    RunComparison,
)

__all__ = [
    "render_comm",
    "render_comparison",
    "render_run_comparison",
]


def render_comm(estimate: CommEstimate) -> str:
    """Return the collectives of a communication estimate with a header line."""
    return _write(_names(CommRow), (asdict(row) for row in estimate.groups))


def render_comparison(comparison: MemoryComparison) -> str:
    """Return the changes between two recordings by category, layer and place, with a header line."""
    return _write(["by", "name", "before_bytes", "after_bytes", "delta_bytes"], comparison_rows(comparison))


def render_run_comparison(comparison: RunComparison) -> str:
    """Return every change between two runs, traces or estimates as one row, with a header line."""
    return _write(list(HEADER), flat_rows(comparison))


def _names(kind: type[CommRow]) -> list[str]:
    return [field.name for field in fields(kind)]


def _write(header: list[str], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: Any) -> Any:
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value
