"""Markdown, for an issue, a pull request or a wiki: tables in GitHub's dialect, no picture.

Everything that a trace or a run says is untrusted: no HTML, no link and no image comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp2prof.reporters.document import (
    CHANGES,
    Block,
    Chart,
    Column,
    Document,
    Facts,
    Findings,
    Section,
    Sentences,
    Table,
    Value,
)
from fsdp2prof.reporters.renderers import RenderOptions
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import layer_name, printable


class MarkdownRenderer:
    """The short form, or every section with its shown rows."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Write headings, sentences and tables."""
        if options.section is not None:
            document = document.part(options.section)
        sections = document.short() if options.brief else document.sections
        return "\n\n".join(_paragraphs(document, sections)) + "\n"


def escaped(text: str) -> str:
    """Make Markdown of a line whose names are untrusted; text in backquotes stays code."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return safe.replace("[", "\\[")


def _paragraphs(document: Document, sections: Sequence[Section]) -> Iterator[str]:
    yield f"## {escaped(document.title)}"
    if document.subtitle:
        yield escaped(document.subtitle)
    yield from map(escaped, document.verdict)
    if document.changes:
        yield f"**{CHANGES}**"
        yield _list(document.changes, numbered=True)
    if document.numbers:
        yield "; ".join(f"**{escaped(one.value)}** {escaped(one.label)}" for one in document.numbers)
    for section in sections:
        yield f"### {escaped(section.title)}"
        for block in section.blocks:
            yield from _block(block, section.title)
    if document.warnings:
        yield "### Warnings"
        yield _list(document.warnings)


def _block(block: Block, heading: str) -> Iterator[str]:
    if isinstance(block, Chart):
        return
    if block.title and block.title != heading:
        yield f"**{escaped(block.title)}**"
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        yield _list([f"{name}: {value}" for name, value in block.pairs.items()])
    elif isinstance(block, Findings):
        yield _list([f"{one.severity}: {_where(one.fqn)}{one.message}" for one in block.findings])
        if block.more:
            yield f"and {plural(block.more, 'more finding')}; all with --full"
    else:
        yield from _sentences(block)


def _where(fqn: str | None) -> str:
    return "" if fqn is None else f"{layer_name(fqn)}: "


def _sentences(block: Sentences) -> Iterator[str]:
    if block.note:
        yield f"_{escaped(block.note)}_"
    if block.style == "code":
        yield "\n".join(f"    {printable(line)}" for line in block.lines)
    elif block.style == "plain":
        yield from map(escaped, block.lines)
    else:
        yield _list(block.lines)
    if block.more:
        yield f"{block.more} more with --full"


def _list(lines: Sequence[str], *, numbered: bool = False) -> str:
    return "\n".join(f"{'1.' if numbered else '-'} {escaped(line)}" for line in lines)


def _table(table: Table) -> Iterator[str]:
    if table.note:
        yield f"_{escaped(table.note)}_"
    columns = [i for i, column in enumerate(table.columns) if column.kind != "bar"]
    shown = [table.columns[i] for i in columns]
    rows = [[_cell(table.columns[i], row[i]) for i in columns] for row in table.rows[: table.limit]]
    rows += [
        ["" if row[i] is None else _cell(table.columns[i], row[i]) for i in columns] for row in table.totals
    ]
    lines = [
        _row([_header(column) for column in shown]),
        _row(["---:" if column.kind == "number" else "---" for column in shown]),
        *map(_row, rows),
    ]
    yield "\n".join(lines)
    left_out = len(table.rows) - len(table.rows[: table.limit])
    if left_out:
        yield f"and {plural(left_out, f'more {table.noun}')}"
    if table.remarks:
        yield _list(table.remarks)


def _header(column: Column) -> str:
    return _flat(column.header)


def _cell(column: Column, value: Value) -> str:
    return _flat(column.text(value))


def _flat(text: str) -> str:
    return escaped(text).replace("|", "\\|")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
