"""What the recorder saw of the host from outside: lines of the training's thread, and garbage collections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.ranks.summary import GARBAGE
from fsdp2prof.manifest import HostSpan, RankManifest
from fsdp2prof.tables import IntArray, Strings, Trace

__all__ = ["Sighted", "sighted"]


@dataclass(frozen=True, slots=True)
class Sighted:
    """Times are on the trace's clock."""

    start_ns: IntArray
    """When a line was seen first, ascending."""
    end_ns: IntArray
    """When it was seen last before another."""
    line: Strings
    collections: Intervals
    """When Python collected garbage."""

    def lines(self, start: IntArray, end: IntArray) -> list[str | None]:
        """Return the line seen most in each stretch; null where none was seen."""
        first = np.searchsorted(self.end_ns, start, side="left").tolist()
        last = np.searchsorted(self.start_ns, end, side="right").tolist()
        return [
            self._most(low, high, int(begin), int(until)) if high > low else None
            for low, high, begin, until in zip(first, last, start, end, strict=True)
        ]

    def gaps(self, start: IntArray, end: IntArray) -> list[str | None]:
        """As :meth:`lines`, with ``GARBAGE`` for stretches of which garbage collections take most."""
        collected = 2 * intervals.covered(self.collections, start, end) > end - start
        return [
            GARBAGE if is_garbage else line
            for is_garbage, line in zip(collected.tolist(), self.lines(start, end), strict=True)
        ]

    def _most(self, low: int, high: int, start: int, end: int) -> str | None:
        spent: Counter[str | None] = Counter()
        for row in range(low, high):
            inside = min(end, int(self.end_ns[row])) - max(start, int(self.start_ns[row]))
            spent[self.line[row]] += inside + 1
        return spent.most_common(1)[0][0]


def sighted(trace: Trace, manifest: RankManifest | None) -> Sighted:
    """Return what the manifest beside a trace says; nothing where there is none, or no common clock."""
    steps = [] if manifest is None or not trace.base_time_ns else manifest.host_steps
    start, end = _times((span for one in steps for span in one.lines), trace.base_time_ns)
    order = np.argsort(start, kind="stable")
    lines = Strings.intern([span.line for one in steps for span in one.lines])
    collected = _times((span for one in steps for span in one.garbage_collections), trace.base_time_ns)
    return Sighted(start[order], end[order], lines.take(order), intervals.union(*collected))


def _times(spans: Iterable[HostSpan], base_ns: int) -> tuple[IntArray, IntArray]:
    spans = list(spans)
    start = np.array([one.start_ns - base_ns for one in spans], dtype=np.int64)
    return start, start + np.array([one.duration_ns for one in spans], dtype=np.int64)
