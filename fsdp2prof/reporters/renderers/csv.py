"""CSV: one table of a document, raw values under the names of its columns.

An unknown value is an empty field. Layers have their names for people, so that ``(root)`` differs from
``(no layer)``. Names come from untrusted files: one that a spreadsheet would run as a formula is written
behind an apostrophe, and control characters as visible codes.
"""

from __future__ import annotations

import csv
import io

from fsdp2prof.errors import UsageError
from fsdp2prof.reporters.document import Column, Document, Table, Value
from fsdp2prof.reporters.renderers import RenderOptions
from fsdp2prof.vocabulary import layer_name, printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class CsvRenderer:
    """One table with a header line; nanoseconds, bytes and fractions as the result has them."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Write the table that ``options.table`` names, or the document's first."""
        columns, rows = _choose(document, options.table).raw()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        writer.writerows(map(_field, columns, row) for row in rows)
        return out.getvalue()


def _choose(document: Document, name: str | None) -> Table:
    tables = document.tables()
    if not tables:
        raise UsageError("this result has no table to write as CSV: use --format text or json")
    if name is None:
        return next(iter(tables.values()))
    if name not in tables:
        raise UsageError(f"--table {name}: the tables here are {', '.join(tables)}")
    return tables[name]


def _field(column: Column, value: Value) -> Value:
    if column.show is layer_name:
        value = column.text(value)
    if not isinstance(value, str):
        return value
    return printable(f"'{value}" if value.startswith(_FORMULA) else value)
