"""Parts of text for people: tables, facts, sentences.

Names come from untrusted files, so text goes through :func:`_text`, never through rich's markup.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fsdp2prof.reporters.grid import Cell, Col, Grid
from fsdp2prof.vocabulary import printable

__all__ = [
    "PLAIN_WIDTH",
    "bullets",
    "fact_list",
    "grid_view",
    "render",
    "stack",
]

PLAIN_WIDTH = 118
"""Columns of text that does not go to a terminal."""

_MIN_WIDTH, _MAX_WIDTH = 80, 140
_BAR_WIDTH = 30

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
