"""Text for readers: the verdict first, then the sections, laid out for the available width.

Names come from untrusted files, so every text goes through :func:`_text`, never through rich's markup.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from fsdp2prof.reporters.document import (
    CHANGES,
    Block,
    Chart,
    Column,
    Document,
    Facts,
    Findings,
    KeyFigure,
    Section,
    Sentences,
    Table,
    Value,
)
from fsdp2prof.reporters.renderers import RenderOptions
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import layer_name, printable

GAP = 2
"""Columns of space between two columns of a table."""


@dataclass(frozen=True, slots=True)
class Need:
    """Width of a column's text, and the least it can do with."""

    natural: int
    least: int
    patient: bool = False
    """More room goes to the others first."""
    empty: bool = False
    """No row has a value here: it goes first."""

    @property
    def wish(self) -> int:
        """Columns it would like on top of the least."""
        return self.natural - self.least


def fit(needs: Sequence[Need], width: int) -> dict[int, int]:
    """Return the widths of the columns that fit, by position: at least the first one's.

    The remaining width goes to the columns that need more, the smallest needs first.
    """
    kept = list(range(len(needs)))
    leaving = [i for i in reversed(kept[1:]) if needs[i].empty]
    leaving += [i for i in reversed(kept[1:]) if not needs[i].empty]
    for i in leaving:
        if _least([needs[j] for j in kept]) <= width:
            break
        kept.remove(i)
    if len(kept) == 1:
        return {0: min(needs[0].natural, width)}
    spare = width - _least([needs[i] for i in kept])
    widths = {i: needs[i].least for i in kept}
    for i in sorted(kept, key=lambda i: (needs[i].patient, needs[i].wish)):
        more = min(spare, needs[i].wish)
        widths[i] += more
        spare -= more
    return widths


def shorten(text: str, length: int) -> str:
    """Leave out the middle of a text that is longer than ``length``."""
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def _least(needs: Sequence[Need]) -> int:
    return sum(need.least for need in needs) + GAP * (len(needs) - 1)


_BAR_NATURAL, _BAR_LEAST = 30, 6
_NAME_LEAST, _FIRST_LEAST, _PROSE_LEAST = 20, 40, 24
"""Columns that a name, the first column and a sentence get before the rightmost columns are left out."""

_NAME_LINES = 3
"""Lines over which a name is folded before its middle is left out."""

_CROWDED = 3
"""Sections of a short form that leave no room for the key figures, which they repeat."""

_LEAST_ROWS = 3
"""Rows that the short form leaves in a table."""

_FINDING_LINES = 2
"""Lines of a finding beside those of a row, when the longest block is looked for."""

_PARTS_NAMED = 4
"""Sections that the last line of the short form names."""

_WARNING = 180
"""Characters of a warning in the short form."""

_SPARKS = " ▁▂▃▄▅▆▇█"
_SEVERITY_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}
_STATE_STYLES = {"complete": "green", "partial": "yellow", "running": "yellow"}


class TextRenderer:
    """Plain or coloured text of a given width."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Return the document as text, ``options.width`` wide; ``options.verbose`` shows every row."""
        if options.section is not None:
            return _printed(_parts(document.part(options.section), options), options)
        whole = _printed(_parts(document, options), options)
        if not options.brief or (not document.brief and _fits(whole, document)):
            return whole
        return _shortened(replace(document, brief=document.short()), options)


def _fits(text: str, document: Document) -> bool:
    return text.count("\n") <= document.brief_lines


def _printed(parts: Iterable[RenderableType], options: RenderOptions) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=options.width,
        force_terminal=options.colour,
        color_system="standard" if options.colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for i, part in enumerate(parts):
        console.print(*([""] if i else []), part, sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _parts(document: Document, options: RenderOptions) -> Iterator[RenderableType]:
    yield _headline(document)
    if document.changes:
        yield _titled(CHANGES, "", _list(document.changes))
    if document.numbers:
        yield _indented(_key_figures(document.numbers, options.width - 2))
    for section in document.sections:
        yield from _section(section, options)
    if document.warnings:
        yield _titled("Warnings", "", _list(document.warnings, "yellow"))
    if document.charts() and options.source:
        yield _text(f"{_command('report', options)}  shows all of this as charts.", "dim")


# The short form.


def _brief(document: Document, options: RenderOptions) -> Iterator[RenderableType]:
    yield _headline(document)
    if document.changes:
        yield _titled(CHANGES, "", _list(document.changes))
    if document.numbers and len(document.brief) < _CROWDED:
        yield _indented(_key_figures(document.numbers, options.width - 2))
    for section in document.brief:
        for block in section.blocks:
            if (shown := _block(block, options)) is not None:
                yield shown
    if document.warnings:
        yield _titled("Warnings", "", _list(document.warnings, "yellow"))
    yield _titled("Next", "", _list(_next(document, options)))


def _next(document: Document, options: RenderOptions) -> list[str]:
    """Return the commands that show more."""
    report = [f"{_command('report', options)}  shows the timeline and charts"] if document.charts() else []
    shown = {section.anchor for section in document.brief}
    others = [section.anchor for section in document.sections if section.anchor not in shown]
    more = ", ..." if len(others) > _PARTS_NAMED else ""
    parts = f"; --section NAME prints one part: {', '.join(others[:_PARTS_NAMED])}{more}" if others else ""
    return [*(report if options.source else ()), f"-v prints everything{parts}"]


def _command(verb: str, options: RenderOptions) -> str:
    return f"fsdp2prof {verb} {shlex.quote(options.source)}"


def _shortened(document: Document, options: RenderOptions) -> str:
    """Return the short form: as many sections as fit, then as many rows of each.

    The verdict and the first section are always kept.
    """
    least = replace(document, numbers=(), changes=document.changes[:1], warnings=_few(document.warnings, 1))
    for many in range(len(document.brief), 0, -1):
        *_, shortest = _shorter(replace(least, brief=document.brief[:many]))
        if _fits(_printed(_brief(shortest, options), options), document):
            break
    for made in (document, replace(document, warnings=_few(document.warnings, 2)), least):
        for one in _shorter(replace(made, brief=document.brief[:many])):
            text = _printed(_brief(one, options), options)
            if _fits(text, document):
                return text
    return _printed(
        _brief(replace(shortest, changes=(), warnings=_few(document.warnings, 0)), options), options
    )


def _shorter(document: Document) -> Iterator[Document]:
    """Return the document, then ever shorter ones: fewer rows, findings and sentences."""
    yield document
    while (brief := _with_one_less(document.brief)) is not None:
        document = replace(document, brief=brief)
        yield document


def _few(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines that are short enough to be read at a glance, and how many are left out."""
    shown = [shorten(line, _WARNING) for line in lines[:most]]
    return [*shown, f"{len(lines) - most} more with -v"] if len(lines) > most else shown


def _with_one_less(sections: Sequence[Section]) -> list[Section] | None:
    """Leave out the last row or finding of the longest block; None where every block is at its shortest."""
    blocks = [(i, j, block) for i, section in enumerate(sections) for j, block in enumerate(section.blocks)]
    for kept in (True, False):
        longest, i, j = max(((_spare(block, kept), -i, -j) for i, j, block in blocks), default=(0, 0, 0))
        if longest:
            break
    else:
        return None
    shorter = [list(section.blocks) for section in sections]
    shorter[-i][-j] = _less(shorter[-i][-j])
    return [replace(one, blocks=blocks) for one, blocks in zip(sections, shorter, strict=True)]


def _spare(block: Block, kept: bool) -> int:
    """Return the number of lines of a block that may be shortened; 0 if it may not.

    ``kept``: no table is cut below the rows that it keeps.
    """
    if isinstance(block, Table):
        rows = 0 if block.whole else len(block.rows[: block.limit])
        least = block.least if kept else _LEAST_ROWS
        return rows if rows > least + (rows == len(block.rows)) else 0
    if isinstance(block, Findings) and len(block.findings) > 1:
        return _FINDING_LINES * len(block.findings)
    if isinstance(block, Sentences) and block.style != "code" and len(block.lines) > 1:
        return _FINDING_LINES * len(block.lines)
    return 0


def _less(block: Block) -> Block:
    if isinstance(block, Table):
        shown = len(block.rows[: block.limit])
        said = shown < len(block.rows)  # else the line that counts what is left out takes a row's place
        return replace(block, limit=shown - (1 if said else 2))
    if isinstance(block, Findings):
        return replace(block, findings=block.findings[:-1], more=block.more + 1)
    if isinstance(block, Sentences):
        return replace(block, lines=block.lines[:-1], more=block.more + 1)
    return block


def _headline(document: Document) -> RenderableType:
    return Group(_heading(document.title, document.subtitle), *(_text(line) for line in document.verdict))


def _key_figures(numbers: Sequence[KeyFigure], width: int) -> RenderableType:
    figures = [_text(number.value, "bold").append(f" {printable(number.label)}") for number in numbers]
    lines = [figures[0]]
    for figure in figures[1:]:
        if cell_len(lines[-1].plain) + 3 + cell_len(figure.plain) > width:
            lines.append(figure)
        else:
            lines[-1] = Text.assemble(lines[-1], "   ", figure)
    return Group(*lines)


def _section(section: Section, options: RenderOptions) -> Iterator[RenderableType]:
    laid = [(block.title, shown) for block in section.blocks if (shown := _block(block, options)) is not None]
    if laid and laid[0][0] != section.title:
        laid[0] = section.title, Group(_text(section.title, "bold underline"), "", laid[0][1])
    yield from (shown for _, shown in laid)


def _block(block: Block, options: RenderOptions) -> RenderableType | None:
    if isinstance(block, Table):
        return _table(block, options)
    if isinstance(block, Chart):
        return _chart(block, options.width)
    if isinstance(block, Facts):
        return _titled(block.title, "", _facts(block))
    if isinstance(block, Findings):
        return _titled(block.title, "", _findings(block)) if block.findings else None
    return _titled(block.title, block.note, _sentences(block)) if block.lines else None


def _titled(title: str, note: str, content: RenderableType) -> RenderableType:
    return Group(_heading(title, note), _indented(content)) if title else _indented(content)


def _heading(title: str, note: str) -> Text:
    text = _text(title, "bold")
    if note:
        text.append(f"  {printable(note)}", style="not bold dim")
    return text


def _indented(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 2))


def _pairs(*, gap: int) -> RichTable:
    """Return an empty table of two columns in which nothing is ever cut."""
    return RichTable.grid(RichColumn(overflow="fold"), RichColumn(overflow="fold"), padding=(0, gap))


def _facts(block: Facts) -> RenderableType:
    table = _pairs(gap=2)
    for name, value in block.pairs.items():
        table.add_row(_text(name, "dim"), _text(value))
    return table


def _findings(block: Findings) -> RenderableType:
    table = _pairs(gap=2)
    for finding in block.findings:
        where = "" if finding.fqn is None else f"{layer_name(finding.fqn)}: "
        table.add_row(
            _text(finding.severity, _SEVERITY_STYLES[finding.severity]), _text(where + finding.message)
        )
    if block.more:
        table.add_row("", _text(f"and {plural(block.more, 'more finding')}; all with -v", "dim"))
    return table


def _sentences(block: Sentences) -> RenderableType:
    lines = [*block.lines, *([f"{block.more} more with -v"] if block.more else [])]
    if block.style in ("plain", "code"):
        return Group(*map(_text, lines))
    return _list(lines, "yellow" if block.style == "warning" else "")


def _list(lines: Sequence[str], style: str = "") -> RenderableType:
    table = _pairs(gap=1)
    for line in lines:
        table.add_row("-", _text(line, style))
    return table


def _chart(chart: Chart, width: int) -> RenderableType | None:
    """Draw a chart's line of blocks, as wide as possible; empty if there is no room."""
    spark = chart.spark
    if spark is None or not max(spark.values, default=0):
        return None
    values, marks = list(spark.values), spark.marks
    if len(values) > width - 2:
        edges = [round(i * len(values) / (width - 2)) for i in range(width - 1)]
        values = [max(values[low:high]) for low, high in pairwise(edges)]
        marks = "".join(marks[low : low + 1] for low in edges[:-1])
    top = max(values)
    line = "".join(_SPARKS[round((len(_SPARKS) - 1) * value / top)] for value in values)
    below = [_text(text, "dim") for text in (marks, spark.legend) if text]
    note = ", ".join(text for text in (chart.note, f"full height: {spark.full}") if text)
    return _titled(spark.title or chart.title, note, Group(_text(line, "blue"), *below))


# Tables.


def _table(table: Table, options: RenderOptions) -> RenderableType:
    shown = (table.unabridged or table) if options.verbose else table
    rows = shown.rows if options.verbose else shown.rows[: shown.limit]
    texts = [[_cell(*pair) for pair in zip(shown.columns, row, strict=True)] for row in rows]
    totals = [
        [
            "" if value is None else _cell(column, value)
            for column, value in zip(shown.columns, row, strict=True)
        ]
        for row in shown.totals
    ]
    needs = [
        _need(i, column, [row[i] for row in (*texts, *totals)]) for i, column in enumerate(shown.columns)
    ]
    widths = fit(needs, options.width)
    laid = RichTable(
        *(_column(shown.columns[j], width) for j, width in widths.items()),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        show_edge=False,
    )
    for i, row in enumerate([*texts, *totals]):
        is_total = i >= len(texts)
        laid.add_row(
            *(_styled(shown.columns[j], row[j], width, options.verbose) for j, width in widths.items()),
            style="bold" if is_total else "",
        )
    below = [*_left_out(shown, len(rows), widths), *shown.remarks]
    notes = [_indented(Group(*map(_text, below)))] if below else []
    return Group(_heading(table.title, table.note), laid, *notes)


def _left_out(table: Table, rows: int, columns: Container[int]) -> Iterator[str]:
    if rest := len(table.rows) - rows:
        yield f"and {plural(rest, f'more {table.noun}')}; all with -v"
    hidden = [column for i, column in enumerate(table.columns) if i not in columns]
    dropped = [label for column in hidden if (label := column.header)]
    if dropped:
        yield f"not shown at this width: {', '.join(dropped)}; widen or use --format json"


def _cell(column: Column, value: Value) -> str | float:
    if column.kind == "bar":
        return float(value) if isinstance(value, (int, float)) else 0.0
    return "" if value is None and column.kind == "state" else printable(column.text(value))


def _need(index: int, column: Column, cells: Sequence[str | float]) -> Need:
    header = max(map(cell_len, column.label.split("\n")))
    if column.kind == "bar":
        return Need(max(_BAR_NATURAL, header), max(_BAR_LEAST, header), patient=True)
    texts = [cell for cell in cells if isinstance(cell, str)]
    natural = max([header, *map(cell_len, texts)])
    if column.kind == "prose":
        return Need(natural, max(header, min(natural, _PROSE_LEAST)))
    if column.kind == "name" or (index == 0 and column.kind != "number"):
        return Need(natural, max(header, min(natural, _NAME_LEAST if index else _FIRST_LEAST)))
    return Need(natural, natural, empty=not set(texts) - {"", "-"})


def _column(column: Column, width: int) -> RichColumn:
    return RichColumn(
        "\n".join(map(printable, column.label.split("\n"))),
        width=width,
        justify="right" if column.kind == "number" else "left",
        overflow="fold",
    )


def _styled(column: Column, cell: str | float, width: int, whole: bool) -> Text:
    if isinstance(cell, float):
        return Text("█" * round(width * min(1.0, cell)), style="blue")
    if column.kind == "state":
        return Text(cell, style=_STATE_STYLES.get(cell, "bold red"))
    if column.kind == "prose":
        return Text(" ".join("\n".join(_broken(word, width)) for word in cell.split(" ")))
    return Text("\n".join(_broken(cell if whole else shorten(cell, _NAME_LINES * width), width)))


def _broken(name: str, width: int) -> Iterator[str]:
    """Break a long name after a dot, slash or underscore if it has one, not inside a word."""
    while cell_len(name) > width and " " not in name:
        at = max(name.rfind(end, 0, width) for end in "._/") + 1
        if not at:
            break
        yield name[:at]
        name = name[at:]
    yield name


def _text(text: str, style: str = "") -> Text:
    """Return untrusted text as it is, its control characters made visible."""
    return Text(printable(text), style=style)
