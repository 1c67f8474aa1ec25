"""Two runs, traces, recordings or estimates against each other, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.reporters.comparison_grids import comparison_grids
from fsdp2prof.reporters.grid import Cell, Col, Grid, decimals, plural, scaled
from fsdp2prof.reporters.terminal import bullets, fact_list, grid_view, stack
from fsdp2prof.results import CommChange, ComparedInput, RunComparison, TimeChange
from fsdp2prof.units import format_bytes, format_ns
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, category_label, dtype_label, layer_name, op_label

__all__ = ["compare_view"]

_ROWS = 12
_MS = 10**6


def compare_view(comparison: RunComparison, *, every: bool = False) -> RenderableType:
    """Lay out a comparison; ``every`` shows each layer, rank and setting."""
    memory = comparison_grids(comparison.memory, every=every) if comparison.memory else []
    if not every:
        memory = [grid for grid in memory if grid.rows]
    return stack(
        fact_list("Compared", {"before": _side(comparison.before), "after": _side(comparison.after)}),
        grid_view(_settings_grid(comparison, every)),
        grid_view(_step_grid(comparison)),
        grid_view(_time_grid(comparison, every)),
        grid_view(_bytes_grid(comparison, every)),
        grid_view(_peak_grid(comparison, every)),
        *map(grid_view, memory),
        bullets("Exactly equal", _equalities(comparison)),
        bullets("Warnings", comparison.warnings, "yellow"),
    )


def _side(side: ComparedInput) -> str:
    facts = [side.kind]
    if side.world_size is not None:
        facts.append(plural(side.world_size, "rank"))
    if side.steps and side.step_min_ns is not None and side.step_max_ns is not None:
        span = f"{format_ns(side.step_min_ns)} to {format_ns(side.step_max_ns)}"
        facts.append(f"{plural(side.steps, 'step window')} of {span}")
    return f"{side.path}: {', '.join(facts)}"


def _settings_grid(comparison: RunComparison, every: bool) -> Grid | None:
    if not comparison.settings:
        return None
    changes = comparison.settings
    folded = fold_names([(change.name, (change.before, change.after)) for change in changes], every=every)
    shown = folded if every else folded[:_ROWS]
    firsts = [(name, changes[members[0]]) for name, members in shown]
    return Grid(
        title="Set up otherwise",
        columns=[Col("setting", "name"), Col("before", "name"), Col("after", "name")],
        rows=[[name, change.before or "-", change.after or "-"] for name, change in firsts],
        more=_more(folded, shown),
    )


def _step_grid(comparison: RunComparison) -> Grid | None:
    if comparison.step is None:
        return None
    unrecorded = comparison.unrecorded_step
    parts = [row for row in comparison.breakdown if row.before_ns or row.after_ns]
    digits = decimals(max(comparison.step.before_ns, comparison.step.after_ns) / _MS)
    return Grid(
        title="Step time",
        note="ms, mean over ranks and steps; communication holds only what no compute hides",
        columns=[Col("part"), *(Col(name, "number") for name in ("before", "after", "change", "%"))],
        rows=[_time_cells(BREAKDOWN_PARTS[row.part].label, row, digits) for row in parts],
        totals=[
            _time_cells("step", comparison.step, digits),
            *([_time_cells("unrecorded step", unrecorded, digits)] if unrecorded else []),
        ],
        remarks=["The unrecorded step is the median wall time of the steps that pay for no recording."]
        if unrecorded
        else [],
    )


def _time_cells(name: str, row: TimeChange, digits: int) -> list[Cell]:
    times = [scaled(value, _MS, digits) for value in (row.before_ns, row.after_ns)]
    frac = "-" if row.delta_frac is None else f"{100 * row.delta_frac:+.1f}"
    return [name, *times, _signed(row.delta_ns, digits), frac]


def _signed(ns: float | None, digits: int) -> str:
    text = scaled(ns, _MS, digits)
    return f"+{text}" if ns is not None and ns > 0 else text


def _time_grid(comparison: RunComparison, every: bool) -> Grid | None:
    """Exposed time and stall by layer, the largest growth first; None without times on both sides."""
    rows = [row for row in comparison.communication if row.delta.exposed_ns is not None]
    changed = rows if every else [row for row in rows if row.delta.exposed_ns or row.delta.stall_ns]
    if not changed or comparison.step is None:
        return None
    shown = changed if every else changed[:_ROWS]
    figures = [side for row in shown for side in (row.before, row.after) if side is not None]
    digits = decimals(max(side.total_ns or 0 for side in figures) / _MS)
    labels = ("exposed\nbefore", "exposed\nafter", "change", "stall\nbefore", "stall\nafter", "change")
    return Grid(
        title="Exposed communication by layer",
        note="ms, mean per rank and step, largest growth first",
        columns=[Col("layer", "name"), Col("phase"), Col("op"), *(Col(label, "number") for label in labels)],
        rows=[_exposed_cells(row, digits) for row in shown],
        more=_more(changed, shown),
    )


def _exposed_cells(row: CommChange, digits: int) -> list[Cell]:
    before, after = row.before, row.after
    return [
        layer_name(row.fqn),
        row.phase,
        op_label(row.op),
        scaled(before.exposed_ns if before else None, _MS, digits),
        scaled(after.exposed_ns if after else None, _MS, digits),
        _signed(row.delta.exposed_ns, digits),
        scaled(before.stall_ns if before else None, _MS, digits),
        scaled(after.stall_ns if after else None, _MS, digits),
        _signed(row.delta.stall_ns, digits),
    ]


def _bytes_grid(comparison: RunComparison, every: bool) -> Grid | None:
    """Rows whose counts or bytes differ, repeated layers folded; None where all are equal."""
    rows = [row for row in comparison.communication if not row.equal]
    if not rows:
        return None
    folded = fold_names([(row.fqn, _bytes_key(row)) for row in rows], every=every)
    shown = folded if every else folded[:_ROWS]
    labels = ("n\nbefore", "n\nafter", "payload\nbefore", "payload\nafter", "wire\nbefore", "wire\nafter")
    return Grid(
        title="Collectives that differ",
        note="per rank and step, one layer each",
        columns=[
            Col("layer", "name"),
            Col("phase"),
            Col("op"),
            *(Col(label, "number") for label in labels),
            Col("dtype, ranks"),
        ],
        rows=[[name, *_bytes_cells(rows[members[0]])] for name, members in shown],
        more=_more(folded, shown),
    )


def _bytes_key(row: CommChange) -> tuple[Any, ...]:
    sides = [None if s is None else (s.count, s.payload_bytes, s.wire_bytes) for s in (row.before, row.after)]
    return row.phase, row.op, *sides, *row.before_dtypes, *row.after_dtypes


def _bytes_cells(row: CommChange) -> list[Cell]:
    sides = (row.before, row.after)
    counts = ["0" if side is None else f"{side.count:.4g}" for side in sides]
    payloads = [_size(None if side is None else side.payload_bytes) for side in sides]
    wires = [_size(None if side is None else side.wire_bytes) for side in sides]
    dtypes = [", ".join(map(dtype_label, names)) for names in (row.before_dtypes, row.after_dtypes)]
    sizes = [", ".join(map(str, ranks)) for ranks in (row.before_group_sizes, row.after_group_sizes)]
    kinds = [f"{dtype or '-'}, {size or '-'}" for dtype, size in zip(dtypes, sizes, strict=True)]
    kind = kinds[0] if kinds[0] == kinds[1] else " -> ".join(kinds)
    return [row.phase, op_label(row.op), *counts, *payloads, *wires, kind]


def _size(value: float | None) -> str:
    return "-" if value is None else format_bytes(round(value))


def _peak_grid(comparison: RunComparison, every: bool) -> Grid | None:
    if not comparison.peaks:
        return None
    shown = comparison.peaks if every else comparison.peaks[:_ROWS]
    return Grid(
        title="Peak memory by rank",
        note="largest growth first",
        columns=[
            Col("rank", "number"),
            *(Col(f"{what}\n{when}", "number") for what in ("allocated", "reserved") for when in _WHEN),
        ],
        rows=[
            [
                str(row.after_rank)
                if row.before_rank == row.after_rank
                else f"{row.before_rank} -> {row.after_rank}",
                format_bytes(row.before_allocated_bytes),
                format_bytes(row.after_allocated_bytes),
                _change(row.delta_allocated_bytes),
                _size(row.before_reserved_bytes),
                _size(row.after_reserved_bytes),
                _change(row.delta_reserved_bytes),
            ]
            for row in shown
        ],
        more=_more(comparison.peaks, shown),
    )


_WHEN = ("before", "after", "change")


def _change(size: int | None) -> str:
    if size is None:
        return "-"
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def _equalities(comparison: RunComparison) -> list[str]:
    """Say what both sides have in common to the byte."""
    lines = []
    rows = comparison.communication
    equal = sum(row.equal for row in rows)
    if equal:
        which = f"all {equal}" if equal == len(rows) else f"{equal} of {len(rows)}"
        lines.append(f"counts, payload and wire bytes of the collectives: {which} rows (layer, phase, op)")
    if comparison.memory is not None:
        kinds = [
            category_label(row.category or "unattributed")
            for row in comparison.memory.by_category
            if row.delta_bytes == 0 and row.before_bytes
        ]
        whole = ["the whole peak"] if comparison.memory.delta_bytes == 0 else []
        if kinds:
            lines.append(f"bytes at the peak: {', '.join([*whole, *kinds])}")
    return lines


def _more(all_rows: Sequence[object], shown: Sequence[object]) -> str:
    rest = len(all_rows) - len(shown)
    return f"and {plural(rest, 'more row')}" if rest else ""
