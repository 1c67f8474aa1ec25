"""Where the numbers of a text come from: each one must be a number or a sentence of the JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from fsdp2prof.units import format_bytes, format_flops, format_frac, format_ns

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")

_UNITS = (1, 1e6, 1e9, 1 << 10, 1 << 20, 1 << 30)
_DECIMALS = (0, 1, 2, 3)

_SHOWN: tuple[Callable[[float], str], ...] = (
    lambda value: format_bytes(round(value)),
    format_ns,
    format_frac,
    format_flops,
    *(
        lambda value, unit=unit, digits=digits: f"{value / unit:,.{digits}f}"
        for unit in _UNITS
        for digits in _DECIMALS
    ),
    lambda value: f"{100 * value:.1f}",
)
"""Every way in which a number is written."""


def unexplained(text: str, document: Any, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Return the numbers of a text that no number or string of the document accounts for.

    ``without`` are keys whose contents do not count: rows that the text is made of by adding or averaging.
    """
    known: set[str] = set()
    for value in _values(document, without):
        if isinstance(value, str):
            known.update(_NUMBER.findall(value))
        else:
            known.update(number for show in _SHOWN for number in _NUMBER.findall(show(abs(value))))
    return sorted({number for number in _NUMBER.findall(text) if number not in known})


def _values(document: Any, without: frozenset[str]) -> Iterator[Any]:
    """Return every number and string of a JSON document, keys included."""
    if isinstance(document, dict):
        for key, item in document.items():
            if key not in without:
                yield key
                yield from _values(item, without)
    elif isinstance(document, list):
        for item in document:
            yield from _values(item, without)
    elif document is not None and not isinstance(document, bool):
        yield document
