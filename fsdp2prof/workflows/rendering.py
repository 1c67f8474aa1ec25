"""A result as what is written of it, in this process or in another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp2prof.reporters.arrange import arranged
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.workflows.job.urls import shown

__all__ = ["Rendering"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """How a result is written."""

    format: str
    options: RenderOptions
    sort: str | None
    """Column by which tables are sorted; None leaves them as they are."""
    top: int | None
    """Rows of every table; None is as many as its document says."""
    copies: Mapping[str, str]
    """Paths that are shown as URLs."""

    def of(self, result: Any) -> str | bytes:
        """Return the result in this format. Raises ``UsageError`` for options that it cannot serve."""
        document = arranged(build(shown(result, self.copies)), self.sort, self.top)
        return RENDERERS[self.format].render(document, self.options)
