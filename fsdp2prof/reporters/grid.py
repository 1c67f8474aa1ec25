"""A table as data: built once from results, laid out by the terminal and by the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fsdp2prof.reporters.formats import byte_unit, decimals, scaled
from fsdp2prof.units import plural

__all__ = ["Cell", "Col", "Grid", "byte_unit", "decimals", "plural", "scaled"]

Cell: TypeAlias = "str | float"
"""Text, or the fraction (0..1) that a bar column fills."""


@dataclass(frozen=True, slots=True)
class Col:
    """A column: its header (may break lines) and how its cells are shown."""

    label: str
    kind: Literal["text", "name", "number", "bar", "state"] = "text"
    """``name``: long untrusted text that may wrap; ``state``: coloured by its word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A titled table; every row has one cell per column. Cells hold untrusted text, unescaped."""

    title: str
    note: str = ""
    """What the title does not say: units, order, what a column leaves out."""
    columns: Sequence[Col]
    rows: Sequence[Sequence[Cell]]
    totals: Sequence[Sequence[Cell]] = ()
    """Rows under a line: means, sums, percentages."""
    more: str = ""
    """What was left out: ``and 12 more rows``."""
    remarks: Sequence[str] = field(default=())
    """Sentences under the table."""
