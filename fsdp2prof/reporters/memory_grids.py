"""The tables of a memory analysis: peaks, what fills them by category and layer, layers while they ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fsdp2prof.analyzers.layers import fold_names, natural_key
from fsdp2prof.reporters.grid import Cell, Col, Grid, byte_unit, plural
from fsdp2prof.results import MemoryAnalysis, RankMemory
from fsdp2prof.units import format_bytes, format_ns
from fsdp2prof.vocabulary import CATEGORIES, category_label, layer_name

__all__ = [
    "block_grid",
    "category_grid",
    "fullest_first",
    "layer_cells",
    "layer_peak_grid",
    "matrix_grid",
    "peak_grid",
]

_RANK_ROWS = 8
_LAYER_ROWS = 12
_BLOCK_ROWS = 5

_SOURCES = {
    "cuda_snapshot": "allocator snapshot",
    "storage_count": "exact storage count",
    "kineto": "profiler events",
    "estimate": "estimate",
}


def fullest_first(analysis: MemoryAnalysis) -> list[RankMemory]:
    """Return the ranks, highest peak first."""
    return sorted(analysis.ranks, key=lambda rank: -rank.peak.allocated_bytes)


def peak_grid(analysis: MemoryAnalysis, *, every: bool = False) -> Grid:
    """Return each rank's peak: how high, when, in which layer."""
    ranks = fullest_first(analysis)
    shown = ranks if every else ranks[:_RANK_ROWS]
    rest = len(ranks) - len(shown)
    return Grid(
        title="Peak memory",
        note="highest first",
        columns=[
            Col("rank", "number"),
            Col("device"),
            Col("allocated", "number"),
            Col("reserved", "number"),
            Col("step", "number"),
            Col("phase"),
            Col("layer", "name"),
            Col("counted by"),
        ],
        rows=[_peak_cells(rank) for rank in shown],
        more=f"and {plural(rest, 'more rank')}" if rest else "",
    )


def _peak_cells(rank: RankMemory) -> list[Cell]:
    peak = rank.peak
    return [
        str(rank.rank),
        rank.device,
        format_bytes(peak.allocated_bytes),
        "-" if peak.reserved_bytes is None else format_bytes(peak.reserved_bytes),
        "-" if peak.step is None else str(peak.step),
        peak.phase,
        "-" if peak.fqn is None else layer_name(peak.fqn),
        _SOURCES.get(rank.source, rank.source) + (", truncated" if rank.truncated else ""),
    ]


def category_grid(rank: RankMemory) -> Grid:
    """Return what fills a rank at its peak, by category."""
    total = rank.peak.allocated_bytes
    sizes = sorted((item for item in rank.peak.categories.items() if item[1]), key=lambda item: -item[1])
    return Grid(
        title=f"What fills rank {rank.rank} at its peak",
        columns=[Col("kind"), Col("bytes", "number"), Col("%", "number"), Col("", "bar")],
        rows=[
            [category_label(name), format_bytes(size), f"{100 * size / total:.1f}", size / total]
            for name, size in sizes
        ],
        totals=[["allocated", format_bytes(total), "100.0" if total else "-", 0.0]],
        remarks=_running_then(rank),
    )


def _running_then(rank: RankMemory) -> list[str]:
    """Say what the trace of the same run shows at the peak."""
    seen = rank.at_peak
    if seen is None:
        return []
    parts = [
        f"the host was in {seen.operator}" if seen.operator else "",
        f"the last launch was {seen.launched}" if seen.launched else "",
        f"in flight: {', '.join(seen.running)}" if seen.running else "nothing was in flight",
    ]
    when = "At that instant" if seen.match == "clock" else f"At that place of the traced step {seen.step}"
    return [f"{when}: {'; '.join(part for part in parts if part)}."]


def layer_cells(rank: RankMemory) -> dict[str | None, dict[str, int]]:
    """Return bytes at the peak by layer and category, the largest layer first."""
    cells: dict[str | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rank.peak.by_layer:
        cells[row.fqn][row.category] += row.bytes
    order = sorted(cells, key=lambda fqn: (-sum(cells[fqn].values()), natural_key(_layer(fqn))))
    return {fqn: dict(cells[fqn]) for fqn in order}


def matrix_grid(rank: RankMemory, *, every: bool = False) -> Grid | None:
    """Return what fills a rank at its peak, by layer and category; None where nothing is known by layer."""
    cells = layer_cells(rank)
    if not cells:
        return None
    names = [name for name in CATEGORIES if any(row.get(name) for row in cells.values())]
    unit, scale = byte_unit(max(sum(row.values()) for row in cells.values()))
    layers = list(cells)
    alike = [(fqn, tuple(sorted(cells[fqn].items()))) for fqn in layers]
    folded = fold_names(alike, every=every)
    shown = folded if every else folded[:_LAYER_ROWS]
    rest = [i for _, members in folded[len(shown) :] for i in members]

    def row(label: str, members: Sequence[int]) -> list[Cell]:
        sizes = [sum(cells[layers[i]].get(name, 0) for i in members) for name in names]
        return [label, *(_in(scale, size) for size in (sum(sizes), *sizes))]

    return Grid(
        title="The same by layer",
        note=unit if every else f"{unit}; layers that are alike share a row, summed",
        columns=[
            Col("layer", "name"),
            Col("all", "number"),
            *(Col(CATEGORIES[name].header, "number") for name in names),
        ],
        rows=[row(_layer(None) if layers[members[0]] is None else name, members) for name, members in shown],
        totals=[
            *([row(plural(len(rest), "more layer"), rest)] if rest else []),
            row("all", range(len(layers))),
        ],
    )


def layer_peak_grid(rank: RankMemory, *, every: bool = False) -> Grid | None:
    """Return how high memory was while each layer ran and what it left behind; None where unknown."""
    if not rank.layers:
        return None
    rows = sorted(rank.layers, key=lambda row: -row.peak_bytes)
    shown = rows if every else rows[:_LAYER_ROWS]
    rest = len(rows) - len(shown)
    return Grid(
        title="Layers while they ran",
        note="device-wide, highest first",
        columns=[Col("layer", "name"), Col("phase"), Col("peak", "number"), Col("left behind", "number")],
        rows=[
            [_layer(row.fqn), row.phase, format_bytes(row.peak_bytes), format_bytes(row.delta_bytes)]
            for row in shown
        ],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )


def block_grid(rank: RankMemory, *, every: bool = False) -> Grid | None:
    """Return the largest allocations alive at the peak; None where they are not known."""
    blocks = rank.peak.largest_blocks
    if not blocks:
        return None
    shown = blocks if every else blocks[:_BLOCK_ROWS]
    with_place = any(block.stack for block in blocks)
    rest = len(blocks) - len(shown)
    return Grid(
        title="Largest blocks at the peak",
        columns=[
            Col("bytes", "number"),
            Col("kind"),
            Col("layer", "name"),
            Col("phase"),
            Col("step", "number"),
            Col("age", "number"),
            Col("op", "name"),
            *([Col("allocated at", "name")] if with_place else []),
        ],
        rows=[
            [
                format_bytes(block.bytes),
                category_label(block.category),
                _layer(block.fqn),
                block.phase,
                "-" if block.step is None else str(block.step),
                "-" if block.age_ns is None else format_ns(block.age_ns),
                block.op or "-",
                *([block.place or "-"] if with_place else []),
            ]
            for block in shown
        ],
        more=f"and {plural(rest, 'more block')}" if rest else "",
    )


def _layer(fqn: str | None) -> str:
    return layer_name(fqn)


def _in(scale: int, size: int) -> str:
    if size == 0:
        return ""
    text = f"{size / scale:,.2f}"
    return "<0.01" if text == "0.00" else text
