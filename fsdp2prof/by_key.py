"""Pairs collected by key: lists of values, and sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> defaultdict[_Key, list[_Value]]:
    """Return key -> values, keys in the order of their first pairs; a missing key has none."""
    found: defaultdict[_Key, list[_Value]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def summed(pairs: Iterable[tuple[_Key, int]]) -> Counter[_Key]:
    """Return key -> sum of the values, keys in the order of their first pairs; a missing key has 0."""
    sums: Counter[_Key] = Counter()
    for key, value in pairs:
        sums[key] += value
    return sums
