"""A document as text, JSON, CSV, a page or Markdown: a renderer a format, imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from fsdp2prof.reporters.document import Document


class RenderOptions(NamedTuple):
    """Options for rendering one document; each renderer reads those that apply to it."""

    source: str = ""
    """The name that the user gave (a path), if the document is about a file."""
    verbose: bool = False
    """Text: every row of every table, nothing folded."""
    brief: bool = False
    """Text and Markdown: the short form."""
    section: str | None = None
    """Text and Markdown: only one section, by its anchor."""
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


__all__ = ["RENDERERS", "Format", "RenderOptions"]


class Format(NamedTuple):
    """A format's properties that a command needs before anything is rendered."""

    module: str
    renderer: str
    extension: str
    """Of its files, with the dot."""
    page: bool = False
    """Whether the output is for a browser, and useless on a terminal."""

    def render(self, document: Document, options: RenderOptions) -> str | bytes:
        """Return the document in this format. Raises ``UsageError`` for options it cannot serve."""
        made: Renderer = getattr(import_module(f"{__name__}.{self.module}"), self.renderer)()
        return made.render(document, options)


RENDERERS = {
    "text": Format("terminal", "TextRenderer", ".txt"),
    "json": Format("data", "JsonRenderer", ".json"),
    "csv": Format("data", "CsvRenderer", ".csv"),
    "md": Format("markdown", "MarkdownRenderer", ".md"),
    "html": Format("html", "HtmlRenderer", ".html", page=True),
}
"""By the name of the format; the first one is the default of a command."""
