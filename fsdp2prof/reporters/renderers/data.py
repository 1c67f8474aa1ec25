"""Formats for other programs: JSON, which is the result itself, and CSV, which is one of its tables."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import msgspec

from fsdp2prof.errors import UsageError
from fsdp2prof.reporters.document import Column, Document, Table, Value
from fsdp2prof.reporters.renderers import RenderOptions
from fsdp2prof.vocabulary import layer_name, printable

_UNPRINTABLE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal may interpret and JSON does not escape: delete, C1 controls, directions."""


class JsonRenderer:
    """The documented JSON: indented, keys in the order of the contract, with a final newline."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Encode the dataclass that the document was made from."""
        text = msgspec.json.format(_encode(document.result), indent=2).decode()
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def _encode(result: Any) -> bytes:
    try:
        return msgspec.json.encode(result)
    except UnicodeEncodeError:  # a file's name that is not UTF-8
        return msgspec.json.encode(_escaped(msgspec.to_builtins(result)))


def _escaped(value: Any) -> Any:
    """Write bytes that are not text as visible codes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class CsvRenderer:
    """One table with a header line; nanoseconds, bytes and fractions as the result has them.

    An unknown value is an empty field. Layers have their names for people, so that ``(root)`` differs from
    ``(no layer)``. Names come from untrusted files: one that a spreadsheet would run as a formula is
    written behind an apostrophe, and control characters as visible codes.
    """

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
