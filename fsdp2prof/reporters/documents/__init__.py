"""A result becomes its document: one builder a kind of result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2prof.reporters.document import Document

__all__ = ["build"]

_BUILDERS: dict[type, Callable[[Any], Document]] = {}
"""Type of a result -> its builder, ``documents/KIND.py:build``."""


def build(result: Any) -> Document:
    """Return a result's document. Raises ``KeyError`` for a type that has none."""
    return _BUILDERS[type(result)](result)
