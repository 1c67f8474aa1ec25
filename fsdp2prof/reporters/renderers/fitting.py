"""Which columns of a table fit a width, and how wide each becomes.

The first column always stays, numbers are never cut, and columns go from the right until the rest fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Need", "fit", "shorten"]

GAP = 2
"""Columns of space between two columns of a table."""


@dataclass(frozen=True, slots=True)
class Need:
    """Width of a column's text, and the least it can do with."""

    natural: int
    least: int
    patient: bool = False
    """More room goes to the others first."""

    @property
    def wish(self) -> int:
        """Columns it would like on top of the least."""
        return self.natural - self.least


def fit(needs: Sequence[Need], width: int) -> list[int]:
    """Return the widths of the columns that fit, from the left: at least the first one.

    What is left over goes to the columns that would like more, the smallest wishes first.
    """
    kept = len(needs)
    while kept > 1 and _least(needs[:kept]) > width:
        kept -= 1
    if kept == 1:
        return [min(needs[0].natural, width)]
    spare = width - _least(needs[:kept])
    widths = [need.least for need in needs[:kept]]
    for i in sorted(range(kept), key=lambda i: (needs[i].patient, needs[i].wish)):
        more = min(spare, needs[i].wish)
        widths[i] += more
        spare -= more
    return widths


def shorten(text: str, length: int) -> str:
    """Leave out the middle of a text that is longer than ``length``."""
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def _least(needs: Sequence[Need]) -> int:
    return sum(need.least for need in needs) + GAP * (len(needs) - 1)
