"""Means over ranks and steps: exact integers where they are some, unknown where a part of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def mean(total: float, count: int) -> float:
    """Return total / count, as an exact integer if it is one."""
    return total // count if isinstance(total, int) and total % count == 0 else total / count


def means(rows: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the mean of each key over rows that all have it."""
    return {key: mean(sum(row[key] for row in rows), len(rows)) for key in (rows[0] if rows else ())}


def known_sum(values: Sequence[_Number | None]) -> _Number | None:
    """Return the sum; None where one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def rate(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return bytes over their time, for (bytes, rate) pairs; None if none is known."""
    known = [(size, speed) for size, speed in pairs if size and speed]
    time = sum(size / speed for size, speed in known)
    return sum(size for size, _ in known) / time if time else None
