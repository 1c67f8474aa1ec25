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

LONGEST_US = float(1 << 43)
"""No event of a trace lasts a hundred days.

Below it half the spacing of float64 is under half a nanosecond: three decimals survive the rounding."""
_LATEST_US = 4.6e15
"""The year 2115 of Unix time: sums and differences of such times fit 64 bits of nanoseconds."""

_THREE_DECIMALS = re.compile(rb"(?:-?[0-4]?\d{1,15}\.\d{3}(?:,|\Z))+")
_NUMBER = re.compile(rb"-?\d{1,16}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,2})?")
_INT64 = np.iinfo(np.int64)
_NARROWER = tuple((dtype, np.iinfo(dtype)) for dtype in (np.int8, np.int16, np.int32))


class TextTimeNeededError(Exception):
    """Fractional timestamps too large for float64 to hold their nanoseconds: decode them as text."""


class NoTimeError(msgspec.ValidationError):
    """A timestamp or duration that is none, or one that no training has."""

    def __init__(self, most_us: float) -> None:
        super().__init__(f"a time that is not a number of microseconds up to {most_us:.0f}")


class Interner(dict[Any, int]):
    """Distinct values numbered in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def codes(self, values: Iterable[Any], count: int) -> npt.NDArray[np.int32]:
        """Numbers of ``count`` values."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=count)


def to_ns(microseconds: list[Any], most_us: float = _LATEST_US) -> IntArray:
    """Convert microseconds (int, float or JSON text) to exact integer nanoseconds.

    Whole and fractional microseconds are converted apart; raises :class:`TextTimeNeededError` where float64
    has already lost the fraction (from 2**43 us on, as in Unix time), and ``NoTimeError`` above ``most_us``.
    """
    if not microseconds:
        return np.empty(0, dtype=np.int64)
    if isinstance(microseconds[0], msgspec.Raw):
        return _text_to_ns(microseconds, most_us)
    values = np.array(microseconds)
    if values.dtype.kind not in "if" or _largest(values) > most_us:
        raise NoTimeError(most_us)
    if values.dtype == np.int64:
        return np.asarray(values * 1000)
    if _largest(values) >= LONGEST_US:
        raise TextTimeNeededError
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + fraction_ns)


def _largest(values: npt.NDArray[Any]) -> float:
    return max(-float(values.min()), float(values.max()))


def _text_to_ns(microseconds: list[msgspec.Raw], most_us: float) -> IntArray:
    """Convert decimal text: dropping the point of a number with three decimals makes nanoseconds of it."""
    text = b",".join(microseconds)
    if text.count(b",") == len(microseconds) - 1 and _THREE_DECIMALS.fullmatch(text):
        times_ns = np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")
    else:
        times_ns = np.asarray([_decimal_ns(item, most_us) for item in microseconds], dtype=np.int64)
    if _largest(times_ns) > most_us * 1000:
        raise NoTimeError(most_us)
    return times_ns


def _decimal_ns(item: msgspec.Raw, most_us: float) -> int:
    time = Decimal(bytes(item).decode()) if _NUMBER.fullmatch(item) else None
    if time is None or abs(time) > most_us:
        raise NoTimeError(most_us)
    return round(time * 1000)


def int_column(values: Sequence[Any]) -> IntArray:
    """Convert JSON values to int64: text is parsed (``0x`` too), anything but a 64-bit integer becomes -1."""
    try:
        column = np.array(values, dtype=np.int64)
        if column.shape == (len(values),):  # else they were lists
            return column
    except (TypeError, ValueError, OverflowError):
        pass
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
