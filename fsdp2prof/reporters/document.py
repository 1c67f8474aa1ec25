"""A result laid out: sections of blocks, built once and rendered as text, a page, CSV, JSON or in a notebook.

::

    Document
      verdict, changes, numbers     what a reader needs first
      Section                       a heading
        Table | Chart | Facts | Sentences | Findings

A builder (``reporters/documents/``) turns each kind of result into a document; it chooses, orders and names
what the result says and adds nothing to it. A renderer (:mod:`fsdp2prof.reporters.renderers`) knows
documents only. All text is untrusted: renderers escape it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeAlias

from fsdp2prof.errors import UsageError
from fsdp2prof.results.finding import Finding

CHANGES = "What each change gains"
"""Title of a document's changes."""

Value: TypeAlias = "str | int | float | bool | None"
"""A cell as the result has it: nanoseconds, bytes, fractions, words; None is unknown."""


Kind: TypeAlias = Literal["text", "name", "prose", "number", "bar", "state"]
Drawing: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"
"""What a page draws, or a function that makes it: text has no use for it."""
Source: TypeAlias = "str | int | Callable[[Any], Any] | None"
"""Source of a column's value in an item: None is the attribute of its own name; ``"1.count"`` is the
attribute ``count`` of the item's second part."""


def later(function: str, *arguments: Any) -> Callable[[], Any]:
    """Return a call of ``MODULE.FUNCTION`` of this package: imported and made once, when it is needed."""

    @cache
    def call() -> Any:
        module, _, name = function.rpartition(".")
        return getattr(import_module(f"fsdp2prof.reporters.{module}"), name)(*arguments)

    return call


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its key in data, its header for readers, and the format of its values."""

    name: str
    """Key in CSV and data frames, with its unit: ``exposed_ns``."""
    label: str
    """Header for readers; may break lines."""
    kind: Kind = "text"
    """``name``: long untrusted text that may wrap, and lose its middle; ``prose``: words that wrap and are
    never cut; ``number``: right-aligned, sorts by value; ``bar``: a
    fraction (0..1) drawn as a bar; ``state``: coloured by its word."""
    show: Callable[[Any], str] = _plain
    """A value as readers see it."""
    of: Source = None
    """Where an item has the value."""
    scale: Literal["", "ms", "bytes"] = ""
    """Times or bytes whose unit and decimals the table chooses by all values."""
    group: str = ""
    """Columns of one scale that share their unit; by default times do and bytes do not."""
    signed: bool = False
    """Growth is written with ``+``."""

    @property
    def header(self) -> str:
        """The label in one line."""
        return self.label.replace("-\n", "-").replace("\n", " ")

    def text(self, value: Value) -> str:
        """Format a cell for readers; text in a column of numbers is unchanged."""
        if isinstance(value, str) and self.kind == "number":
            return value
        plus = self.signed and isinstance(value, (int, float)) and value > 0
        return f"+{self.show(value)}" if plus else self.show(value)

    def taken(self, item: Any) -> Any:
        """Return the item's value for this column."""
        if callable(self.of):
            return self.of(item)
        for part in str(self.name if self.of is None else self.of).split("."):
            item = item[int(part)] if part.isdigit() else getattr(item, part)
        return item

    def value(self, item: Any) -> Value:
        """Return the cell of an item; a list is written with commas, None if it is empty."""
        value = self.taken(item)
        return (", ".join(map(str, value)) or None) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table; every row has one value per column."""

    name: str
    """Key of the table in data (``by_layer``); unique in its document."""
    title: str
    note: str = ""
    """Units, order and omissions of a column, which the title does not state."""
    columns: Sequence[Column]
    """Most important columns on the left: a narrow terminal leaves out the right ones, never the first."""
    rows: Sequence[Sequence[Value]]
    limit: int | None = None
    """Rows that are enough at first; the rest with ``-v``, or behind a fold."""
    whole: bool = False
    """Whether every row is shown, however short the room is: they sum to the totals."""
    least: int = 3
    """Rows that a short form keeps as long as other blocks can be shortened."""
    noun: str = "row"
    """The kind of a row, for the count of those left out."""
    totals: Sequence[Sequence[Value]] = ()
    """Rows under a line: means, sums, percentages; None leaves a cell empty."""
    remarks: Sequence[str] = ()
    """Sentences under the table."""
    unabridged: Table | None = None
    """The same with nothing folded, where ``rows`` are folded."""

    def raw(self) -> tuple[list[Column], list[list[Value]]]:
        """Return columns and rows as data has them: without bars that repeat a column's numbers."""
        named = {column.name for column in self.columns if column.kind != "bar"}
        kept = [i for i, one in enumerate(self.columns) if one.kind != "bar" or one.name not in named]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spark:
    """A chart in one line of text."""

    values: Sequence[float]
    """Heights from left to right, zero or more."""
    title: str = ""
    """Meaning of the heights, if the chart's own title differs."""
    full: str
    """Meaning of the full height, in words: ``12.0 MiB``."""
    marks: str = ""
    """One letter under each value; empty for none."""
    legend: str = ""
    """Meaning of the letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure; a table or a spark has the same numbers, for readers without pictures."""

    name: str
    """Unique in its document."""
    title: str
    note: str = ""
    figure: Drawing
    """``{"data": [...], "layout": {...}}`` as plotly takes it; names in it are escaped already."""
    detail: Drawing | None = None
    """The drawing of a page by level of zoom, for a chart with more data than can be seen at once: spans
    in lanes as :func:`~fsdp2prof.reporters.charts.timeline.timeline_detail` lays them out, names
    unchanged."""
    spark: Spark | None = None

    def drawn(self) -> Mapping[str, Any]:
        """Return the figure."""
        return self.figure() if callable(self.figure) else self.figure

    def zoomed(self) -> Mapping[str, Any] | None:
        """Return the drawing by level of zoom."""
        return self.detail() if callable(self.detail) else self.detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Names and values."""

    title: str
    pairs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences:
    """Sentences under a title."""

    title: str
    note: str = ""
    lines: Sequence[str]
    style: Literal["plain", "list", "warning", "code"] = "plain"
    """``code``: lines to paste, as they are."""
    more: int = 0
    """How many are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Findings to act on, the most severe first."""

    title: str
    findings: Sequence[Finding]
    more: int = 0
    """How many are left out."""


Block: TypeAlias = "Table | Chart | Facts | Sentences | Findings"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Blocks under one heading; a block that repeats the heading as its title shows it once."""

    anchor: str
    """Name of the section in links."""
    title: str
    lead: str = ""
    """A sentence under the title, for readers of a page."""
    blocks: Sequence[Block] = ()
    detail: bool = False
    """A page shows it closed, under "Details"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFigure:
    """A number worth a large print."""

    value: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A place of a page."""

    label: str
    target: str
    """Anchor of a section, or of a table's row: ``communication-by_layer-3``, counted from 0;
    ``communication-by_layer-all-3`` where the row is behind the fold."""
    window: tuple[int, int, int] | None = None
    """Rank, begin and end in nanoseconds on the timeline's clock; None for a target outside the timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A result laid out."""

    title: str
    subtitle: str = ""
    verdict: Sequence[str] = ()
    """At most three sentences: the limit, the most expensive place, the change to try."""
    changes: Sequence[str] = ()
    """The most effective changes, best first, each with the gain measured by replay."""
    numbers: Sequence[KeyFigure] = ()
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    result: Any = None
    """The result that it was made from, which is also its JSON."""
    data: Sequence[Table] = field(default=())
    """Tables that only data formats hold (every step, every rank), by name beside those of the sections."""
    places: Callable[[], Mapping[str, Sequence[Link]]] = dict
    """Sentence of the verdict, the changes or a finding -> where a page shows its numbers; only pages ask."""
    brief: Sequence[Section] = ()
    """The sections of the short form, in the order of their worth, where they are not those of the whole."""
    brief_lines: int = 40
    """Lines of text that the short form has at most, 100 columns wide."""

    def short(self) -> Sequence[Section]:
        """Return the sections of the short form: ``brief``, otherwise all but details, without charts."""
        if self.brief:
            return self.brief
        shown = [section for section in self.sections if not section.detail] or self.sections
        worded = [
            replace(section, blocks=[block for block in section.blocks if not isinstance(block, Chart)])
            for section in shown
        ]
        return [section for section in worded if section.blocks]

    def part(self, anchor: str) -> Document:
        """Return the document with only one of its sections. Raises ``UsageError`` for another name."""
        chosen = [section for section in self.sections if section.anchor == anchor]
        if not chosen:
            known = ", ".join(section.anchor for section in self.sections) or "none"
            raise UsageError(f"--section {anchor}: the sections here are {known}")
        return replace(self, verdict=(), changes=(), numbers=(), warnings=(), sections=chosen, brief=())

    def tables(self) -> dict[str, Table]:
        """Return every table by its name, unabridged, those for data formats first."""
        shown = [block for section in self.sections for block in section.blocks if isinstance(block, Table)]
        return {table.name: table.unabridged or table for table in (*self.data, *shown)}

    def charts(self) -> dict[str, Chart]:
        """Return every chart by its name."""
        blocks = [block for section in self.sections for block in section.blocks]
        return {block.name: block for block in blocks if isinstance(block, Chart)}
