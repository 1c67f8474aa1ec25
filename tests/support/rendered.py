"""What a result's document comes to in text, JSON and CSV, and how tests look into it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from fsdp2prof.reporters.document import Document, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions


def text_of(result: Any, *, width: int = 118, verbose: bool = False) -> str:
    """As a terminal shows it."""
    text = RENDERERS["text"].render(build(result), RenderOptions(width=width, verbose=verbose))
    assert isinstance(text, str)
    return text


def json_of(result: Any) -> dict[str, Any]:
    """Decoded again."""
    document: dict[str, Any] = json.loads(RENDERERS["json"].render(build(result), RenderOptions()))
    return document


def csv_of(result: Any, table: str | None = None) -> list[dict[str, str]]:
    """The rows of one table, by default the first."""
    text = RENDERERS["csv"].render(build(result), RenderOptions(table=table))
    assert isinstance(text, str)
    return list(csv.DictReader(io.StringIO(text)))


def table_of(document: Document, name: str) -> Table:
    """A table of the sections, folded as it is shown first."""
    blocks = [block for section in document.sections for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and block.name == name)


def row_of(text: str, start: str) -> list[str]:
    """The words of the first line that starts so."""
    return next(line.split() for line in text.splitlines() if line.strip().startswith(start))
