"""Two memory recordings against each other: which category, layer and line of the program holds more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.reporters.grid import Cell, Col, Grid, plural
from fsdp2prof.results import MemoryComparison, MemoryDelta
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import category_label, layer_name

__all__ = ["comparison_grids", "comparison_rows"]

_ROWS = 12


def comparison_grids(comparison: MemoryComparison, *, every: bool = False) -> list[Grid]:
    """Return the changes by category, by layer and by place, largest first; each sums to the whole change.

    None by place where nothing is known of it.
    """
    place = Col("allocated at", "name")
    return [
        _grid("Change by kind", Col("kind"), comparison.by_category, _category, comparison, every),
        _grid("Change by layer", Col("layer", "name"), comparison.by_layer, _layer, comparison, every),
        *(
            [_grid("Change by place", place, comparison.by_stack, _place, comparison, every)]
            if comparison.by_stack
            else []
        ),
    ]


def comparison_rows(comparison: MemoryComparison) -> list[dict[str, str | int]]:
    """Return all changes as flat rows: what they are by, the name, and bytes before, after and between."""
    parts = {
        "category": (comparison.by_category, _category),
        "layer": (comparison.by_layer, _layer),
        "place": (comparison.by_stack, _place),
    }
    return [
        {
            "by": by,
            "name": name(row),
            "before_bytes": row.before_bytes,
            "after_bytes": row.after_bytes,
            "delta_bytes": row.delta_bytes,
        }
        for by, (rows, name) in parts.items()
        for row in rows
    ]


def _grid(
    title: str,
    column: Col,
    deltas: Sequence[MemoryDelta],
    name: Callable[[MemoryDelta], str],
    whole: MemoryComparison,
    every: bool,
) -> Grid:
    sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in deltas:
        before, after = sizes[name(row)]
        sizes[name(row)] = before + row.before_bytes, after + row.after_bytes
    changed = [(label, before, after) for label, (before, after) in sizes.items() if every or before != after]
    if not every:
        changed = _folded(changed)
    changed.sort(key=lambda row: -abs(row[2] - row[1]))
    shown = changed if every else changed[:_ROWS]
    rest = len(changed) - len(shown)
    return Grid(
        title=title,
        note="at the peak of each recording, largest change first",
        columns=[column, Col("before", "number"), Col("after", "number"), Col("change", "number")],
        rows=[_cells(*row) for row in shown],
        totals=[_cells("all", whole.before.allocated_bytes, whole.after.allocated_bytes)],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )


def _folded(rows: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Sum repeated layers that hold the same before and after."""
    families = fold_names([(name, (before, after)) for name, before, after in rows])
    return [(name, sum(rows[i][1] for i in same), sum(rows[i][2] for i in same)) for name, same in families]


def _cells(name: str, before: int, after: int) -> list[Cell]:
    sign = "+" if after > before else ""
    return [name, format_bytes(before), format_bytes(after), f"{sign}{format_bytes(after - before)}"]


def _category(row: MemoryDelta) -> str:
    return category_label(row.category or "unattributed")


def _layer(row: MemoryDelta) -> str:
    return layer_name(row.fqn)


def _place(row: MemoryDelta) -> str:
    place = row.place
    return " at ".join(part for part in (row.op, place) if part) or "(unknown)"
