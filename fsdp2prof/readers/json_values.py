"""JSON values to numpy: exact nanoseconds, integers however they are written, interned strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsdp2prof.tables import CompactArray, IntArray

__all__ = ["Interner", "TextTimeNeededError", "compact", "int_column", "narrow", "to_ns"]

_FLOAT_EXACT_BELOW_US = float(1 << 43)
"""Below it half the spacing of float64 is under half a nanosecond, so three decimals survive the rounding."""

_THREE_DECIMALS = re.compile(rb"\.(\d{3})(?=,|\Z)")
_INT64 = np.iinfo(np.int64)
_NARROWER = tuple((dtype, np.iinfo(dtype)) for dtype in (np.int8, np.int16, np.int32))


class TextTimeNeededError(Exception):
    """Fractional timestamps too large for float64 to hold their nanoseconds: decode them as text."""


class Interner(dict[Any, int]):
    """Distinct values numbered in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def codes(self, values: Iterable[Any], count: int) -> npt.NDArray[np.int32]:
        """Numbers of ``count`` values."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=count)


def to_ns(microseconds: list[Any]) -> IntArray:
    """Convert microseconds (int, float or JSON text) to exact integer nanoseconds.

    Whole and fractional microseconds are converted apart; raises :class:`TextTimeNeededError` where float64
    has already lost the fraction (from 2**43 us on, as in Unix time).
    """
    if microseconds and isinstance(microseconds[0], msgspec.Raw):
        return _text_to_ns(microseconds)
    values = np.array(microseconds, dtype=None if microseconds else np.int64)
    if values.dtype == np.int64:
        return np.asarray(values * 1000)
    if np.abs(values).max() >= _FLOAT_EXACT_BELOW_US:
        raise TextTimeNeededError
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + fraction_ns)


def _text_to_ns(microseconds: list[msgspec.Raw]) -> IntArray:
    """Convert decimal text: dropping the point of a number with three decimals makes nanoseconds of it."""
    text, replaced = _THREE_DECIMALS.subn(rb"\1", b",".join(microseconds))
    if replaced == len(microseconds):
        return np.asarray(np.fromstring(text, dtype=np.int64, sep=","))
    return np.asarray([round(Decimal(bytes(item).decode()) * 1000) for item in microseconds], dtype=np.int64)


def int_column(values: Sequence[Any]) -> IntArray:
    """Convert JSON values to int64: text is parsed (``0x`` too), what is no integer of 64 bits is -1."""
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.asarray([_integer(value) for value in values], dtype=np.int64)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same integers in as few bytes as their range needs."""
    if not len(values):
        return values
    low, high = values.min(), values.max()
    for dtype, limits in _NARROWER:
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    return values


def compact(values: npt.NDArray[Any]) -> CompactArray:
    """Return the same integers in 32 bits each if all fit, else in 64."""
    limits = np.iinfo(np.int32)
    fit = not len(values) or (limits.min <= values.min() and values.max() <= limits.max)
    return values.astype(np.int32 if fit else np.int64, copy=False)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return -1
    if not isinstance(value, int) or not _INT64.min <= value <= _INT64.max:
        return -1
    return value
