"""Document of two recordings at their memory peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.memory import peaks_chart
from fsdp2prof.reporters.document import (
    Block,
    Chart,
    Column,
    Document,
    Facts,
    KeyFigure,
    Section,
    Table,
    Value,
)
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_bytes, signed
from fsdp2prof.results.memory_comparison import MemoryComparison, MemoryDelta
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import category_label, layer_name

_ROWS = 12
_UNKNOWN_PLACE = "(unknown)"


@builds(MemoryComparison)
def memory_comparison_document(comparison: MemoryComparison) -> Document:
    """Lay out a comparison of two recordings at their peaks."""
    before, after = comparison.before, comparison.after
    sides = {"before": comparison.before_path, "after": comparison.after_path}
    named = [Facts(title="Compared", pairs=sides)] if all(sides.values()) else []
    tables = comparison_tables(comparison)
    blocks: list[Block] = [*comparison_charts(comparison), *tables] if tables else []
    return Document(
        title="Memory at the peak, before and after",
        numbers=[
            KeyFigure(value=format_bytes(before.allocated_bytes), label="before"),
            KeyFigure(value=format_bytes(after.allocated_bytes), label="after"),
            KeyFigure(value=signed(show_bytes)(comparison.delta_bytes), label="change"),
        ],
        sections=[
            *(Section(anchor="compared", title=facts.title, blocks=[facts]) for facts in named),
            *([Section(anchor="change", title="What changed", blocks=blocks)] if blocks else []),
        ],
        data=[_changes(comparison)],
    )


def comparison_charts(comparison: MemoryComparison) -> list[Chart]:
    """Return both peaks by category."""
    figure = peaks_chart({"before": comparison.before, "after": comparison.after})
    before, after = comparison.before.allocated_bytes, comparison.after.allocated_bytes
    title = f"The peak went from {format_bytes(before)} to {format_bytes(after)}"
    if before == after:
        title = f"Both peaks are {format_bytes(after)}"
    return [Chart(name="memory_peaks", title=title, figure=figure)] if figure is not None else []


def comparison_tables(comparison: MemoryComparison) -> list[Table]:
    """Return the changes by category, by layer and by place, each where something of it is known."""
    whole: dict[str, Value] = {
        "before_bytes": comparison.before.allocated_bytes,
        "after_bytes": comparison.after.allocated_bytes,
        "delta_bytes": comparison.delta_bytes,
    }
    layers, folded = comparison.by_layer, comparison.by_layer_folded
    known = any(row.fqn is not None for row in layers)
    by_category = _table("memory_by_category", "Change by kind", c.category(), comparison.by_category, whole)
    by_layer = _table("memory_by_layer", "Change by layer", c.name("layer", of="name"), folded, whole)
    every = _table("memory_by_layer", "Change by layer", c.layer(), layers, whole, everything=True)
    place = c.name("place", "allocated by", of=_place)
    by_place = _table("memory_by_place", "Change by place", place, comparison.by_place, whole)
    tables = [by_category, *([replace(by_layer, unabridged=every)] if known else []), by_place]
    return [table for table in tables if table.rows or table.unabridged]


def _table(
    name: str,
    title: str,
    first: Column,
    rows: Iterable[Any],
    whole: dict[str, Value],
    *,
    everything: bool = False,
) -> Table:
    """Return one table of changes, the rows without one only where ``everything`` is asked for."""
    columns = [
        first,
        c.size("before_bytes", "before"),
        c.size("after_bytes", "after"),
        c.signed(c.size("delta_bytes", "change")),
    ]
    every = list(rows)
    changed = [row for row in every if row.delta_bytes]
    return c.table(
        name,
        title,
        columns,
        every if everything else changed,
        every=None if everything or len(changed) == len(every) else every,
        note="at the peak of each, largest change first",
        limit=None if everything else _ROWS,
        totals=[{first.name: "all", **whole}],
    )


def _place(row: MemoryDelta) -> str:
    return " at ".join(part for part in (row.op, row.place) if part) or _UNKNOWN_PLACE


def _changes(comparison: MemoryComparison) -> Table:
    """Return all changes as flat rows: grouping, name, bytes before and after, and their difference."""
    parts: dict[str, Sequence[tuple[str, MemoryDelta]]] = {
        "category": [(category_label(str(row.category)), row) for row in comparison.by_category],
        "layer": [(layer_name(row.fqn), row) for row in comparison.by_layer],
        "place": [(_place(row), row) for row in comparison.by_place],
    }
    columns = [
        c.text("by", of=0),
        c.text("name", of=1),
        *(c.text(f"{one}_bytes", of=f"2.{one}_bytes") for one in ("before", "after", "delta")),
    ]
    rows = [(by, name, row) for by, rows in parts.items() for name, row in rows]
    return c.table("changes", "Every change", columns, rows)
