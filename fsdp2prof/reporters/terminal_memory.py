"""A memory analysis as text: the peak by category and layer, its course, what ran out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from fsdp2prof.reporters.advice import memory_advice
from fsdp2prof.reporters.layers import layer_name, natural_key
from fsdp2prof.reporters.terminal import (
    bullets,
    cell,
    findings_view,
    heading,
    new_table,
    plural,
    right,
    stack,
)
from fsdp2prof.reporters.wording import CATEGORIES, category_label
from fsdp2prof.results import MemoryAnalysis, RankMemory
from fsdp2prof.units import format_bytes, format_frac

__all__ = ["memory_view"]

_RANK_ROWS = 8
_LAYER_ROWS = 12
_BAR_WIDTH = 30
_SPARKS = " ▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 100

_SOURCES = {
    "cuda_snapshot": "allocator snapshot",
    "storage_count": "exact storage count",
    "kineto": "profiler events (approximate on CPU)",
    "estimate": "estimate",
}

_SHORT_CATEGORIES = {
    "sharded_parameter": "sharded\nparams",
    "sharded_gradient": "sharded\ngrads",
    "optimizer_state": "optim.\nstate",
    "unsharded_parameter": "unshard.\nparams",
    "unsharded_gradient": "unshard.\ngrads",
    "all_gather_buffer": "all-gath.\nbuffers",
    "reduce_scatter_buffer": "red.-scat.\nbuffers",
    "activation": "activ-\nations",
    "input": "inputs",
    "temporary": "tempo-\nraries",
    "unattributed": "unattri-\nbuted",
}


def memory_view(
    analysis: MemoryAnalysis, *, source: str, verbose: bool = False, advice: bool = True
) -> RenderableType:
    """Lay out a memory analysis; the fullest rank in detail, ``verbose`` shows every rank and layer."""
    ranks = sorted(analysis.ranks, key=lambda rank: -rank.peak.allocated_bytes)
    details = [section for rank in (ranks if verbose else ranks[:1]) for section in _rank(rank, verbose)]
    return stack(
        heading("Memory", f"{plural(len(ranks), 'rank')}, highest peak first"),
        _peaks(ranks, verbose),
        *details,
        findings_view(analysis.findings),
        bullets("What to look at next", memory_advice(analysis, source)) if advice else None,
        bullets("Warnings", analysis.warnings, style="yellow"),
    )


def _peaks(ranks: Sequence[RankMemory], verbose: bool) -> RenderableType:
    table = new_table(
        right("rank"),
        "device",
        right("peak\nallocated"),
        right("reserved"),
        right("step"),
        "phase",
        Column("layer", overflow="fold"),
        "counted by",
    )
    for rank in ranks if verbose else ranks[:_RANK_ROWS]:
        peak = rank.peak
        table.add_row(
            str(rank.rank),
            cell(rank.device),
            format_bytes(peak.allocated_bytes),
            "-" if peak.reserved_bytes is None else format_bytes(peak.reserved_bytes),
            "-" if peak.step is None else str(peak.step),
            cell(peak.phase),
            cell("-" if peak.fqn is None else layer_name(peak.fqn)),
            cell(_SOURCES.get(rank.source, rank.source) + (", truncated" if rank.truncated else "")),
        )
    hidden = 0 if verbose else len(ranks) - _RANK_ROWS
    return Group(table, Text(f"  and {plural(hidden, 'more rank')}; all with -v")) if hidden > 0 else table


def _rank(rank: RankMemory, verbose: bool) -> list[RenderableType | None]:
    return [
        _categories(rank),
        _matrix(rank, verbose),
        _course(rank),
        _layer_peaks(rank, verbose),
        _facts(f"Fragmentation of rank {rank.rank}", rank.fragmentation),
        _facts(f"Out of memory on rank {rank.rank}", rank.oom or {}),
    ]


def _categories(rank: RankMemory) -> RenderableType:
    total = rank.peak.allocated_bytes
    table = new_table("kind", right("bytes"), right("%"), Column("", width=_BAR_WIDTH, no_wrap=True))
    for name, size in sorted(rank.peak.categories.items(), key=lambda item: -item[1]):
        if size:
            filled = round(_BAR_WIDTH * size / total)
            table.add_row(
                category_label(name),
                format_bytes(size),
                f"{100 * size / total:.1f}",
                Text("█" * filled, "blue"),
            )
    table.add_section()
    table.add_row("allocated", format_bytes(total), "100.0" if total else "-", "", style="bold")
    return Group(heading(f"What fills rank {rank.rank} at its peak"), table)


def _matrix(rank: RankMemory, verbose: bool) -> RenderableType | None:
    cells: dict[str | None, dict[str, int]] = defaultdict(dict)
    for row in rank.peak.by_layer:
        cells[row.fqn][row.category] = cells[row.fqn].get(row.category, 0) + row.bytes
    if not cells:
        return None
    names = [name for name in CATEGORIES if any(row.get(name) for row in cells.values())]
    layers = sorted(cells, key=lambda fqn: (-sum(cells[fqn].values()), natural_key(layer_name(fqn))))
    unit, scale = _unit(max(sum(row.values()) for row in cells.values()))
    table = new_table(
        Column("layer", min_width=14, overflow="fold"),
        right("all"),
        *(right(_SHORT_CATEGORIES[name]) for name in names),
    )
    shown = layers if verbose else layers[:_LAYER_ROWS]
    for fqn in shown:
        kinds = cells[fqn]
        table.add_row(
            cell("(no layer)" if fqn is None else layer_name(fqn)),
            _in(scale, sum(kinds.values())),
            *(_in(scale, kinds.get(name, 0)) for name in names),
        )
    rest = layers[len(shown) :]
    if rest:
        sums = [sum(cells[fqn].get(name, 0) for fqn in rest) for name in names]
        table.add_row(
            f"{len(rest)} more (-v)", _in(scale, sum(sums)), *(_in(scale, size) for size in sums), style="dim"
        )
    return Group(heading("The same by layer", unit), table)


def _course(rank: RankMemory) -> RenderableType | None:
    columns = [values for name, values in rank.timeline.items() if name in CATEGORIES]
    times = rank.timeline.get("time_ns", [])
    if not columns or len(times) < 2:
        return None
    totals = [sum(values) for values in zip(*columns, strict=True)]
    heights = _resample(totals, min(_SPARK_WIDTH, len(totals)))
    top = max(heights) or 1
    line = "".join(_SPARKS[round((len(_SPARKS) - 1) * height / top)] for height in heights)
    note = f"allocated bytes, left to right, top {format_bytes(max(totals))}"
    return Group(heading(f"Course of rank {rank.rank}", note), Text("  " + line, style="blue"))


def _resample(values: Sequence[int], width: int) -> list[int]:
    """Shorten a series to ``width`` points, each the highest of its stretch: no peak is lost."""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [max(values[low:high]) for low, high in pairwise(edges)]


def _layer_peaks(rank: RankMemory, verbose: bool) -> RenderableType | None:
    if not rank.layers:
        return None
    rows = sorted(rank.layers, key=lambda row: -row.peak_bytes)
    table = new_table(
        Column("layer", min_width=14, overflow="fold"),
        "phase",
        right("peak while it ran"),
        right("left behind"),
    )
    for row in rows if verbose else rows[:_LAYER_ROWS]:
        table.add_row(
            cell("(no layer)" if row.fqn is None else layer_name(row.fqn)),
            cell(row.phase),
            format_bytes(row.peak_bytes),
            format_bytes(row.delta_bytes),
        )
    note = "highest first; " + ("all of them" if verbose else f"{min(len(rows), _LAYER_ROWS)} of {len(rows)}")
    return Group(heading("Layers while they ran", note), table)


def _facts(title: str, facts: Mapping[str, Any]) -> RenderableType | None:
    """Lay out a loose mapping: bytes as GiB, fractions as percentages, lists by their length."""
    if not facts:
        return None
    table = new_table("what", right("value"))
    for name, value in facts.items():
        table.add_row(
            cell(name.removesuffix("_bytes").removesuffix("_frac").replace("_", " ")), _fact(name, value)
        )
    return Group(heading(title), table)


def _fact(name: str, value: Any) -> Text:
    if isinstance(value, (list, dict)):
        return cell(plural(len(value), "entry").replace("entrys", "entries"))
    if name.endswith("_bytes") and isinstance(value, int):
        return cell(format_bytes(value))
    if name.endswith("_frac") and isinstance(value, (int, float)):
        return cell(format_frac(value))
    return cell("-" if value is None else str(value))


def _unit(largest: int) -> tuple[str, int]:
    """Unit of a table's cells: the largest one that leaves its biggest number at 10 or more."""
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if largest >= 10 * scale:
            return name, scale
    return "KiB", 1 << 10


def _in(scale: int, size: int) -> str:
    number = size / scale
    return "" if size == 0 else f"{number:.2f}" if abs(number) < 10 else f"{number:,.1f}"
