"""A table as data: built once from results, laid out by the terminal and by the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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


def decimals(largest: float) -> int:
    """Decimals of a column whose largest number is ``largest``: enough to tell rows apart, and aligned."""
    return 3 if largest < 10 else 2 if largest < 1000 else 1


def scaled(value: float | None, scale: int, digits: int) -> str:
    """Format a number in units of ``scale``: ``-`` for null, ``0`` for an exact zero."""
    return "-" if value is None else "0" if value == 0 else f"{value / scale:,.{digits}f}"


def byte_unit(largest: int) -> tuple[str, int]:
    """Return the unit of a column of bytes and its size: the largest one that its biggest number fills."""
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if largest >= scale:
            return name, scale
    return "KiB", 1 << 10


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``3 entries``."""
    plural_noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun if count == 1 else plural_noun}"
