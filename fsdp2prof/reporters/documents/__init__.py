"""A result becomes its document: one builder per kind of result, registered where it is defined.

The builders of ``fsdp2prof.results.NAME`` are in the module ``NAME`` here, which is imported when the
first of these results is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, TypeVar

from fsdp2prof.reporters.document import Document
from fsdp2prof.units import format_numbers

_OF_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)
_NAMED_KEYS = 6
"""Unread keys of a trainer's file that a warning names."""
_Builder = TypeVar("_Builder", bound=Callable[[Any], Document])

BUILDERS: dict[type, Callable[[Any], Document]] = {}
"""Type of a result -> its builder, of the modules imported so far."""


def builds(kind: type) -> Callable[[_Builder], _Builder]:
    """Register a function as the builder of a kind of result."""

    def register(builder: _Builder) -> _Builder:
        BUILDERS[kind] = builder
        return builder

    return register


def build(result: Any) -> Document:
    """Return a result's document, with the result's own verdict and warnings unless the builder has others.

    Raises ``KeyError`` for a type that has none.
    """
    kind = type(result)
    name = f"{__name__}.{kind.__module__.rpartition('.')[2]}"
    if kind not in BUILDERS and find_spec(name):
        import_module(name)
    document = BUILDERS[kind](result)
    config = getattr(result, "config", None)
    unread = getattr(config, "not_known", ())
    typos = [
        f"{key} is not a key that is read: did you mean {meant}?"
        for key, meant in getattr(config, "misspelt", {}).items()
    ]
    own = [*_unread(unread), *getattr(result, "warnings", ())]
    return replace(
        document,
        result=result,
        verdict=(*typos, *(document.verdict or getattr(result, "verdict", ()))),
        warnings=_of_several_ranks(document.warnings or own),
    )


def _unread(keys: Sequence[str]) -> list[str]:
    """Report keys of a trainer's file that were not read, as many as fit a line."""
    if not keys:
        return []
    shown, rest = keys[:_NAMED_KEYS], len(keys) - _NAMED_KEYS
    more = [f"{rest} more"] if rest > 0 else []
    return [f"keys that this reader does not know, taken to change nothing: {', '.join([*shown, *more])}"]


def _of_several_ranks(warnings: Sequence[str]) -> tuple[str, ...]:
    """Merge the same warnings of several ranks into one, at the position of the first."""
    said: dict[str, set[int]] = {}
    for warning in warnings:
        match = _OF_RANK.fullmatch(warning)
        text, ranks = (warning, set()) if match is None else (match[2], {int(match[1])})
        said.setdefault(text, set()).update(ranks)
    return tuple(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {format_numbers(sorted(ranks))}: {text}" if ranks else text
        for text, ranks in said.items()
    )


def every_builder() -> dict[type, Callable[[Any], Document]]:
    """Return all builders there are; imports every module of this package."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return BUILDERS
