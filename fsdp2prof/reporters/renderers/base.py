"""What a renderer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fsdp2prof.reporters.document import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderOptions:
    """How one document is rendered; each renderer reads what concerns it."""

    source: str = ""
    """What the user named (a path), where the document is about a file."""
    verbose: bool = False
    """Text: every row of every table, nothing folded."""
    brief: bool = False
    """Text and Markdown: the short form."""
    section: str | None = None
    """Text and Markdown: one section alone, by its anchor."""
    table: str | None = None
    """CSV: the table by its name; the first one where None."""
    width: int = 118
    """Text: columns."""
    colour: bool = False
    """Text: with escape codes for colours."""


class Renderer(Protocol):
    """Turns documents into one format."""

    def render(self, document: Document, options: RenderOptions) -> str | bytes:
        """Return the document in this format. Raises ``UsageError`` for options it cannot serve."""
