"""Text for people: what the trace, memory and run views share, and how a view becomes text.

A view is a rich renderable. Names come from untrusted files, so text goes through :func:`cell`, never
through rich's markup.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fsdp2prof.reporters.wording import printable
from fsdp2prof.results import Finding

__all__ = [
    "PLAIN_WIDTH",
    "bullets",
    "cell",
    "findings_view",
    "heading",
    "new_table",
    "plural",
    "render",
    "right",
    "stack",
]

PLAIN_WIDTH = 116
"""Columns of text that does not go to a terminal."""

_MIN_WIDTH, _MAX_WIDTH = 80, 140

_SEVERITY_STYLE = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}


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


def cell(text: str, style: str = "") -> Text:
    """Return untrusted text as a cell."""
    return Text(printable(text), style=style)


def heading(title: str, note: str = "") -> Text:
    """Return a section's title with an explanation beside it."""
    text = Text(title, style="bold")
    if note:
        text.append(f"  {note}", style="not bold dim")
    return text


def new_table(*columns: Column | str) -> Table:
    """Return an empty table in the house style."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)


def right(header: str, *, style: str = "") -> Column:
    """Return a numeric column."""
    return Column(header, justify="right", no_wrap=True, style=style)


def stack(*sections: RenderableType | None) -> Group:
    """Put sections under each other with a blank line between."""
    lines: list[RenderableType] = []
    for section in sections:
        if section is not None:
            lines += [section, ""]
    return Group(*lines[:-1])


def findings_view(findings: Sequence[Finding]) -> RenderableType | None:
    """Return findings, worst first, or None without any."""
    if not findings:
        return None
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        where = "" if finding.fqn is None else f"{finding.fqn or '(root)'}: "
        table.add_row(
            Text(finding.severity, style=_SEVERITY_STYLE[finding.severity]), cell(where + finding.message)
        )
    return Group(heading("Findings"), Padding(table, (0, 0, 0, 2)))


def bullets(title: str, lines: Sequence[str], style: str = "") -> RenderableType | None:
    """Return a titled list, or None without lines."""
    if not lines:
        return None
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", cell(line, style))
    return Group(heading(title), Padding(table, (0, 0, 0, 2)))


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
