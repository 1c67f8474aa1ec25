"""How values are written for readers: one function per unit.

Each function takes a value as the result has it (integer nanoseconds, bytes, fractions; None is unknown)
and returns its text. A column keeps one unit and one number of decimals, so that its numbers align.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from fsdp2prof.backends import kernel_name
from fsdp2prof.units import format_amount, format_bytes, format_count, format_flops, format_frac, format_ns
from fsdp2prof.vocabulary import Word, category_label, dtype_label, op_label

Show: TypeAlias = Callable[[Any], str]
"""A value to its text."""

MS = 10**6
"""Nanoseconds of a millisecond."""

_UNKNOWN = "-"


def decimals(largest: float) -> int:
    """Decimals of a column whose largest number is ``largest``: enough to tell rows apart, and aligned."""
    return 3 if largest < 10 else 2 if largest < 1000 else 1


def largest(values: Iterable[float | None]) -> float:
    """Return the largest known size of some numbers, 0 without any."""
    return max((abs(value) for value in values if value is not None), default=0)


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit of a column of bytes and its size: the largest one that its biggest number fills."""
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if largest >= scale:
            return name, scale
    return "KiB", 1 << 10


def scaled(value: float | None, scale: int, digits: int) -> str:
    """Format a number in units of ``scale``: ``-`` for None, ``0`` for an exact zero, ``<0.01`` for less."""
    if value is None:
        return _UNKNOWN
    text = f"{value / scale:,.{digits}f}"
    if float(text.replace(",", "")):
        return text
    return "0" if value == 0 else f"{'<' if value > 0 else '>-'}{10**-digits:.{digits}f}"


# Functions for Column.show.


def known(write: Callable[[Any], str]) -> Show:
    """Return a function that writes a value with the given one, and an unknown one as ``-``."""
    return lambda value: _UNKNOWN if value is None else write(value)


show_text = known(str)
show_count = known(format_count)
show_amount = known(format_amount)
show_bytes = known(format_bytes)
show_ns = known(format_ns)
show_flops = known(format_flops)
show_op = known(op_label)
show_category = known(category_label)
show_kernel = known(kernel_name)
show_frac: Show = format_frac
show_dtype: Show = dtype_label


def mean_count(value: float | None) -> str:
    """Write a mean of counts: ``3``, or ``1.5``."""
    return _UNKNOWN if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def show_percent(value: float | None) -> str:
    """Write a fraction as a percentage whose sign is in the header or the row's name: ``12.5``."""
    return _UNKNOWN if value is None else f"{100 * value:.1f}"


def show_gb_per_s(value: float | None) -> str:
    """Write bytes per second in GB/s (10^9)."""
    return _UNKNOWN if value is None else f"{value / 1e9:,.2f}"


def show_in(scale: int, digits: int) -> Show:
    """Return a function that writes numbers in units of ``scale``."""
    return lambda value: scaled(value, scale, digits)


def signed(show: Show) -> Show:
    """Return a function that writes a change: the same text, with ``+`` before growth."""
    return lambda value: f"+{show(value)}" if value is not None and value > 0 else show(value)


def words(vocabulary: Mapping[str, Word]) -> Show:
    """Return a function that writes a vocabulary's word by its label, and any other word unchanged."""
    return lambda value: (
        _UNKNOWN if value is None else vocabulary[value].label if value in vocabulary else value
    )
