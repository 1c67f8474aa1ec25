"""A document with its tables sorted by one column, and cut after some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from fsdp2prof.analyzers.findings import listed
from fsdp2prof.analyzers.layers import natural_key
from fsdp2prof.errors import UsageError
from fsdp2prof.reporters.document import Column, Document, Section, Table, Value
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import layer_name

_NAMED = 12
"""Columns that an error names."""
_LAYER = "layer"
"""What people call a column whose key is ``fqn``."""


def arranged(document: Document, sort: str | None, top: int | None) -> Document:
    """Return the document, every table that has the column sorted by it, at most ``top`` rows in each.

    ``sort`` is a column by its key in data (``exposed_ns``) or its header (``exposed ms``), ``:asc`` or
    ``:desc`` behind it; by default numbers are sorted from the largest on, words from the first on. Unknown
    values come last. Raises ``UsageError`` for a column that no table has.
    """
    name, descending = _order(sort)
    tables = list(document.tables().values())
    if name is not None and not any(_position(table.columns, name) is not None for table in tables):
        known = list(dict.fromkeys(column.name for table in tables for column in table.columns))
        close = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"there is {listed(known, _NAMED) or 'none'}"
        raise UsageError(f"--sort {name}: no table has such a column; {hint}")

    def arrange(sections: Sequence[Section]) -> list[Section]:
        return [
            replace(
                section,
                blocks=[
                    _arranged(block, name, descending, top) if isinstance(block, Table) else block
                    for block in section.blocks
                ],
            )
            for section in sections
        ]

    return replace(
        document,
        sections=arrange(document.sections),
        brief=arrange(_asked_for(document, name)),
        data=[_arranged(table, name, descending, top) for table in document.data],
    )


def _asked_for(document: Document, name: str | None) -> Sequence[Section]:
    """Return the short form's sections: where a column is asked for, the first table that has it."""
    if name is None:
        return document.brief
    for section in (*document.brief, *document.sections):
        for block in section.blocks:
            if isinstance(block, Table) and _position(block.columns, name) is not None:
                return [replace(section, blocks=[replace(block, whole=True)])]
    return document.brief


def _order(sort: str | None) -> tuple[str | None, bool | None]:
    """Return the column and whether the largest comes first; None: as its kind is sorted."""
    for ending, descending in ((":asc", False), (":desc", True)):
        if sort is not None and sort.endswith(ending):
            return sort.removesuffix(ending), descending
    return sort, None


def _position(columns: Sequence[Column], name: str) -> int | None:
    wanted = "fqn" if name == _LAYER else name
    for at, column in enumerate(columns):
        if column.kind != "bar" and wanted in (column.name, column.header):
            return at
    if wanted == "fqn":  # a folded row's layer
        return next((at for at, column in enumerate(columns) if column.name == _LAYER), None)
    return None


def _arranged(table: Table, name: str | None, descending: bool | None, top: int | None) -> Table:
    rows, every = list(table.rows), table.unabridged
    at = None if name is None else _position(table.columns, name)
    if at is not None:
        rows = _sorted(rows, at, table.columns[at], descending)
    cut = 0 if top is None else max(0, len(rows) - top)
    remark = [f"{plural(cut, f'more {table.noun}')} left out."] if cut else []
    return replace(
        table,
        rows=rows[: len(rows) - cut],
        limit=table.limit if top is None else None,
        whole=table.whole or top is not None,
        remarks=[*remark, *table.remarks],
        unabridged=None if every is None else _arranged(every, name, descending, top),
    )


def _sorted(
    rows: Sequence[Sequence[Value]], at: int, column: Column, descending: bool | None
) -> list[Sequence[Value]]:
    layers = column.show is layer_name
    known = [row for row in rows if layers or row[at] is not None]
    unknown = [row for row in rows if not layers and row[at] is None]
    if not layers and all(isinstance(row[at], (int, float)) for row in known):
        known.sort(key=lambda row: row[at], reverse=descending is not False)  # type: ignore[arg-type, return-value]
    else:
        known.sort(key=lambda row: natural_key(_word(row[at], layers)), reverse=bool(descending))
    return [*known, *unknown]


def _word(value: Value, is_layer: bool) -> str:
    return layer_name(None if value is None else str(value)) if is_layer else str(value)
