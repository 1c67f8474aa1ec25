"""Columns, each declared once: its key in data, header, unit and source; and the tables made of them.

A column takes its value from an item: the attribute of its own name, or what ``of`` says. :func:`table` makes
rows, totals and the table behind ``-v`` from one list of columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from fsdp2prof.reporters.document import Block, Column, Kind, Section, Source, Table, Value
from fsdp2prof.reporters.formats import (
    MS,
    Show,
    byte_unit,
    decimals,
    largest,
    mean_count,
    show_bytes,
    show_category,
    show_count,
    show_dtype,
    show_flops,
    show_frac,
    show_gb_per_s,
    show_in,
    show_kernel,
    show_ns,
    show_op,
    show_percent,
    show_text,
    words,
)
from fsdp2prof.vocabulary import Word, layer_name


class Make(Protocol):
    """Function that makes a column of one format."""

    def __call__(self, key: str = ..., label: str | None = ..., of: Source = ...) -> Column:
        """Return a column; see :class:`~fsdp2prof.reporters.document.Column`."""


def text(key: str, label: str | None = None, show: Show = show_text, of: Source = None) -> Column:
    """Return a column of short words."""
    return Column(name=key, label=_label(key, label), show=show, of=of)


def name(key: str, label: str | None = None, show: Show = show_text, of: Source = None) -> Column:
    """Return a column of long untrusted names."""
    return Column(name=key, label=_label(key, label), kind="name", show=show, of=of)


def prose(key: str, label: str | None = None, of: Source = None) -> Column:
    """Return a column of sentences, or of settings to type: they wrap and are never cut."""
    return Column(name=key, label=_label(key, label), kind="prose", show=show_text, of=of)


def state(key: str = "state", label: str | None = None, of: Source = None) -> Column:
    """Return a column whose words are coloured: ``complete``, ``crashed``."""
    return Column(name=key, label=_label(key, label), kind="state", of=of)


def layer(key: str = "fqn", label: str = "layer", of: Source = None) -> Column:
    """Return a column of modules' names: ``(root)`` for the empty one, ``(no layer)`` for None."""
    return Column(name=key, label=label, kind="name", show=layer_name, of=of)


def word(key: str, label: str | None, vocabulary: Mapping[str, Word], of: Source = None) -> Column:
    """Return a column of words of a vocabulary, each by its label."""
    return text(key, label, words(vocabulary), of)


def number(key: str, label: str | None = None, show: Show = show_text, of: Source = None) -> Column:
    """Return a right-aligned column."""
    return Column(name=key, label=_label(key, label), kind="number", show=show, of=of)


def _shown_by(show: Show, kind: Kind = "number", key: str = "", label: str | None = None) -> Make:
    """Return the function that makes columns of one format; ``key`` and ``label`` are for a column without
    its own."""

    def make(key: str = key, label: str | None = label, of: Source = None) -> Column:
        return Column(name=key, label=_label(key, label), kind=kind, show=show, of=of)

    return make


op = _shown_by(show_op, "text", "op")
dtype = _shown_by(show_dtype, "text", "dtype")
category = _shown_by(show_category, "text", "category", "kind")
kernel = _shown_by(show_kernel, "name", "name")
count = _shown_by(show_count)
mean = _shown_by(mean_count, key="count", label="n")
time = _shown_by(show_ns)
size = _shown_by(show_bytes)
frac = _shown_by(show_frac)
percent = _shown_by(show_percent, label="%")
gb_per_s = _shown_by(show_gb_per_s)
flops = _shown_by(show_flops)


def ms(key: str, label: str | None = None, of: Source = None) -> Column:
    """Return a column of nanoseconds in milliseconds; the label or the table's note says so.

    All such columns of a table have the same number of decimals.
    """
    return replace(number(key, label, of=of), scale="ms")


def sized(key: str, label: str | None = None, of: Source = None, unit: str = "") -> Column:
    """Return a column of bytes in one unit, under its label; columns with the same ``unit`` share theirs."""
    return replace(number(key, label, of=of), scale="bytes", group=unit or key)


def bar(key: str, of: Source = None) -> Column:
    """Return a column of fractions drawn as bars; empty where unknown."""
    return Column(name=key, label="", kind="bar", show=show_frac, of=of)


def signed(column: Column) -> Column:
    """Return the column with ``+`` before growth."""
    return replace(column, signed=True)


def table(
    key: str,
    title: str,
    columns: Sequence[Column],
    items: Iterable[Any],
    *,
    every: Iterable[Any] | None = None,
    every_note: str | None = None,
    note: str = "",
    limit: int | None = None,
    noun: str = "row",
    totals: Sequence[Mapping[str, Value]] = (),
    remarks: Sequence[str] = (),
    scale: Iterable[Any] = (),
    known: bool = False,
    whole: bool = False,
    least: int = 3,
) -> Table:
    """Return a table with one row per item.

    ``every``: the items without folding, if that differs. ``totals``: values by the columns' names.
    ``scale``: further items whose values the units are for. ``known`` leaves out columns without any
    value. ``whole``: every row is always shown. ``least``: rows that the short form keeps if it can.
    """
    shown, unfolded = list(items), None if every is None else list(every)
    columns = _scaled(columns, [*shown, *(unfolded or ()), *scale])
    if known:
        columns = [one for one in columns if any(one.value(item) is not None for item in shown)]
    sums = [[None if one.kind == "bar" else row.get(one.name) for one in columns] for row in totals]
    made = Table(
        name=key,
        title=title,
        note=note,
        columns=columns,
        rows=[[one.value(item) for one in columns] for item in shown],
        limit=limit,
        whole=whole,
        least=least,
        noun=noun,
        totals=sums,
        remarks=remarks,
    )
    if unfolded is None:
        return made
    rows = [[one.value(item) for one in columns] for item in unfolded]
    if rows == made.rows:
        return made
    below = note if every_note is None else every_note
    return replace(
        made,
        unabridged=Table(
            name=key, title=title, note=below, columns=columns, rows=rows, noun=noun, totals=sums
        ),
    )


def data(key: str, title: str, kind: type | Sequence[str], items: Iterable[Any], leave: str = "") -> Table:
    """Return a table for data formats only: raw values of a dataclass's fields, a layer by its name."""
    keys = [field.name for field in fields(kind)] if isinstance(kind, type) else kind
    columns = [layer(one, one) if one == "fqn" else text(one, one) for one in keys if one != leave]
    return table(key, title, columns, items)


def section(
    anchor: str, title: str, *blocks: Block | None, lead: str = "", detail: bool = False
) -> list[Section]:
    """Return one section of the blocks there are; none without any."""
    there = [
        block for block in blocks if block is not None and not (isinstance(block, Table) and _void(block))
    ]
    return [Section(anchor=anchor, title=title, lead=lead, blocks=there, detail=detail)] if there else []


def _void(block: Table) -> bool:
    return not block.rows and block.unabridged is None


def _label(key: str, label: str | None) -> str:
    return key if label is None else label


def _scaled(columns: Sequence[Column], items: Sequence[Any]) -> list[Column]:
    """Choose the unit and the decimals of the columns of times and bytes by their values."""
    most: dict[str, float] = {}
    for one in columns:
        if one.scale:
            group = one.group or one.scale
            values = (one.value(item) for item in items)
            most[group] = max(most.get(group, 0), largest(v for v in values if isinstance(v, (int, float))))
    return [_resolved(one, most[one.group or one.scale]) if one.scale else one for one in columns]


def _resolved(column: Column, most: float) -> Column:
    if column.scale == "ms":
        return replace(column, show=show_in(MS, decimals(most / MS)))
    unit, scale = byte_unit(most)
    return replace(column, label=f"{column.label}\n{unit}", show=show_in(scale, decimals(most / scale)))
