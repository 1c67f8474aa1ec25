"""Results as text for people: the views of a trace, a memory and a run analysis.

Names come from untrusted files, so text goes through :func:`_text`, never through rich's markup.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fsdp2prof.reporters.allocator_grids import fragmentation_grid, oom_lines, remedy_grid
from fsdp2prof.reporters.cause_grids import bandwidth_grid, late_grid, sync_grid
from fsdp2prof.reporters.grid import Cell, Col, Grid, plural
from fsdp2prof.reporters.memory_grids import (
    block_grid,
    category_grid,
    fullest_first,
    layer_peak_grid,
    matrix_grid,
    peak_grid,
)
from fsdp2prof.reporters.run_grids import rank_grid, run_facts, sharding_grid
from fsdp2prof.reporters.trace_grids import (
    NO_COLLECTIVE,
    breakdown_grid,
    layer_grid,
    rank_lines,
    step_numbers,
)
from fsdp2prof.results import Finding, MemoryAnalysis, RankMemory, RunAnalysis, TraceAnalysis
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import CATEGORIES, PHASES, layer_name, printable

__all__ = [
    "PLAIN_WIDTH",
    "bullets",
    "fact_list",
    "grid_view",
    "memory_view",
    "render",
    "run_view",
    "stack",
    "trace_view",
]

PLAIN_WIDTH = 118
"""Columns of text that does not go to a terminal."""

_MIN_WIDTH, _MAX_WIDTH = 80, 140
_BAR_WIDTH = 30
_SPARKS = " ▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 100

_SEVERITY_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}
_STATE_STYLES = {"complete": "green", "partial": "yellow", "running": "yellow"}


def render(view: RenderableType, *, to_terminal: bool) -> str:
    """Return a view as text: coloured and as wide as the terminal, or plain and :data:`PLAIN_WIDTH` wide.

    ``NO_COLOR`` is honoured.
    """
    width = PLAIN_WIDTH
    if to_terminal:
        width = max(_MIN_WIDTH, min(shutil.get_terminal_size().columns, _MAX_WIDTH))
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=to_terminal, highlight=False, markup=False, emoji=False
    )
    console.print(view)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def trace_view(analysis: TraceAnalysis, *, advice: Sequence[str] = (), every: bool = False) -> RenderableType:
    """Lay out a trace analysis; ``every`` shows each step and layer."""
    layers = layer_grid(analysis, every=every)
    return stack(
        _trace_headline(analysis),
        grid_view(breakdown_grid(analysis, every=every)),
        grid_view(layers) or Text(NO_COLLECTIVE),
        grid_view(late_grid(analysis, every=every)),
        grid_view(bandwidth_grid(analysis, every=every)),
        grid_view(sync_grid(analysis, every=every)),
        _paragraph("Ranks against each other", rank_lines(analysis)),
        _findings(analysis.findings),
        bullets("What to look at next", advice),
        bullets("Warnings", analysis.warnings, "yellow"),
    )


def memory_view(
    analysis: MemoryAnalysis, *, advice: Sequence[str] = (), every: bool = False
) -> RenderableType:
    """Lay out a memory analysis; the fullest rank in detail, ``every`` shows each rank and layer."""
    ranks = fullest_first(analysis)
    details = [
        section for rank in (ranks if every else ranks[:1]) for section in _memory_details(rank, every)
    ]
    return stack(
        grid_view(peak_grid(analysis, every=every)),
        *details,
        _findings(analysis.findings),
        bullets("What to look at next", advice),
        bullets("Warnings", analysis.warnings, "yellow"),
    )


def run_view(analysis: RunAnalysis, *, advice: Sequence[str] = (), every: bool = False) -> RenderableType:
    """Lay out the run, then its trace and its memory."""
    run = analysis.run
    return stack(
        fact_list(f"Run  {run.path}", run_facts(run)),
        grid_view(rank_grid(run, every=every)),
        grid_view(sharding_grid(run, every=every)),
        bullets("What the recording says", run.messages, "yellow"),
        trace_view(analysis.trace, every=every) if analysis.trace else None,
        memory_view(analysis.memory, every=every) if analysis.memory else None,
        bullets("What to look at next", advice),
        bullets("Warnings", analysis.warnings, "yellow"),
    )


# Parts of a view.


def _trace_headline(analysis: TraceAnalysis) -> Text:
    ranks = analysis.ranks
    worlds = [rank.world_size for rank in ranks if rank.world_size]
    of = f" of {max(worlds)}" if worlds and max(worlds) != len(ranks) else ""
    devices = ", ".join(sorted({rank.device_type for rank in ranks}))
    text = _heading("Trace", f"{plural(len(ranks), 'rank')}{of}, {devices}, {step_numbers(analysis)}")
    unfinished = [f"rank {rank.rank} {rank.state}" for rank in ranks if rank.state not in (None, "complete")]
    if unfinished:
        more = ", ..." if len(unfinished) > 4 else ""
        text.append("  " + ", ".join(unfinished[:4]) + more, "not bold yellow")
    return text


def _memory_details(rank: RankMemory, every: bool) -> Iterator[RenderableType | None]:
    yield _paragraph(f"Out of memory on rank {rank.rank}", oom_lines(rank))
    yield grid_view(remedy_grid(rank))
    yield grid_view(category_grid(rank))
    yield grid_view(matrix_grid(rank, every=every))
    yield _course(rank)
    yield grid_view(block_grid(rank, every=every))
    yield grid_view(layer_peak_grid(rank, every=every))
    yield grid_view(fragmentation_grid(rank))


def _course(rank: RankMemory) -> RenderableType | None:
    """Draw allocated bytes over time as one line of blocks."""
    columns = [values for name, values in rank.timeline.items() if name in CATEGORIES]
    totals = [sum(values) for values in zip(*columns, strict=True)]
    if len(totals) < 2 or not max(totals):
        return None
    width = min(_SPARK_WIDTH, len(totals))
    edges = [round(i * len(totals) / width) for i in range(width + 1)]
    heights = [max(totals[low:high]) for low, high in pairwise(edges)]
    line = "".join(_SPARKS[round((len(_SPARKS) - 1) * height / max(totals))] for height in heights)
    note = f"allocated bytes from left to right, full height {format_bytes(max(totals))}"
    lines = [_heading(f"Memory of rank {rank.rank} over time", note), Text("  " + line, style="blue")]
    times = rank.timeline["time_ns"]
    if rank.phase_spans and min(times) >= 0:
        letters = "".join(_phase_letter(rank, times[low]) for low in edges[:-1])
        lines.append(Text(f"  {letters}\n  f forward, b backward, o optimizer", style="dim"))
    return Group(*lines)


def _phase_letter(rank: RankMemory, time_ns: int) -> str:
    at = (span.phase for span in rank.phase_spans if span.start_ns <= time_ns < span.end_ns)
    phase = next(at, None)
    return PHASES[phase if phase in PHASES else "other"].header


def _findings(findings: Sequence[Finding]) -> RenderableType | None:
    if not findings:
        return None
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        where = "" if finding.fqn is None else f"{layer_name(finding.fqn)}: "
        severity = Text(finding.severity, style=_SEVERITY_STYLES[finding.severity])
        table.add_row(severity, _text(where + finding.message))
    return Group(_heading("Findings"), _indented(table))


def fact_list(title: str, facts: Mapping[str, str]) -> RenderableType:
    """Lay out names and values under a title."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), _text(value))
    return Group(_heading(title), _indented(table))


def bullets(title: str, lines: Sequence[str], style: str = "") -> RenderableType | None:
    """Lay out sentences under a title; nothing without sentences."""
    if not lines:
        return None
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", _text(line, style))
    return Group(_heading(title), _indented(table))


def _paragraph(title: str, lines: Sequence[str]) -> RenderableType | None:
    return Group(_heading(title), _indented(Group(*map(_text, lines)))) if lines else None


def grid_view(grid: Grid | None) -> RenderableType | None:
    """Lay out a table; nothing without one."""
    if grid is None:
        return None
    table = Table(
        *map(_column, grid.columns),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        show_edge=False,
    )
    for row in grid.rows:
        table.add_row(*map(_cell, grid.columns, row))
    for i, row in enumerate(grid.totals):
        if i == 0:
            table.add_section()
        table.add_row(*map(_cell, grid.columns, row), style="bold")
    below = [f"{grid.more}; all with -v" if grid.more else "", *grid.remarks]
    sentences = [_text(line) for line in below if line]
    return Group(
        _heading(grid.title, grid.note), table, *([_indented(Group(*sentences))] if sentences else [])
    )


def _column(column: Col) -> Column:
    if column.kind == "number":
        return Column(column.label, justify="right", no_wrap=True)
    if column.kind == "name":
        return Column(column.label, min_width=14, overflow="fold")
    return Column(column.label, no_wrap=True)


def _cell(column: Col, value: Cell) -> Text:
    if isinstance(value, float):
        return Text("█" * round(_BAR_WIDTH * value), style="blue")
    return _text(value, _STATE_STYLES.get(value, "bold red") if column.kind == "state" else "")


def _heading(title: str, note: str = "") -> Text:
    text = _text(title, "bold")
    if note:
        text.append(f"  {note}", style="not bold dim")
    return text


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def stack(*sections: RenderableType | None) -> Group:
    """Put sections under each other with a blank line between."""
    lines: list[RenderableType] = []
    for section in sections:
        if section is not None:
            lines += ["", section] if lines else [section]
    return Group(*lines)


def _text(text: str, style: str = "") -> Text:
    """Return untrusted text as it is, its control characters made visible."""
    return Text(printable(text), style=style)
