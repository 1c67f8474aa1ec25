"""Two recordings at their peaks: which category, layer and line of the program holds more than before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from fsdp2prof.analyzers.memory_peak import describe_peak
from fsdp2prof.analyzers.memory_view import MemoryView
from fsdp2prof.results import MemoryComparison, MemoryDelta

__all__ = ["compare_memory"]

_Key = TypeVar("_Key", bound=Hashable)


def compare_memory(before: MemoryView, after: MemoryView) -> MemoryComparison:
    """Compare two recordings, each at its own peak.

    Stacks match by the text of all their frames; blocks without a stack match by operator.
    """
    peaks = describe_peak(before), describe_peak(after)
    return MemoryComparison(
        before=peaks[0],
        after=peaks[1],
        delta_bytes=peaks[1].allocated_bytes - peaks[0].allocated_bytes,
        by_category=_deltas(
            [_sums(view, _categories) for view in (before, after)], lambda key: {"category": key}
        ),
        by_layer=_deltas([_sums(view, _layers) for view in (before, after)], lambda key: {"fqn": key}),
        by_stack=_deltas(
            [_sums(view, _places) for view in (before, after)],
            lambda key: {"op": key[0], "stack": list(key[1])},
        ),
    )


def _categories(view: MemoryView) -> list[str | None]:
    return view.live(view.peak_order).category.to_list()


def _layers(view: MemoryView) -> list[str | None]:
    return view.live(view.peak_order).fqn.to_list()


def _places(view: MemoryView) -> list[tuple[str | None, tuple[str, ...]]]:
    live, stacks = view.live(view.peak_order), view.recording.stacks
    frames = {row: stacks[row] for row in set(live.stack.tolist()) if row >= 0}
    return [(op, frames.get(row, ())) for op, row in zip(live.op.to_list(), live.stack.tolist(), strict=True)]


def _sums(view: MemoryView, keys: Callable[[MemoryView], list[_Key]]) -> dict[_Key, int]:
    sums: dict[_Key, int] = {}
    for key, size in zip(keys(view), view.live(view.peak_order).size.tolist(), strict=True):
        sums[key] = sums.get(key, 0) + size
    return sums


def _deltas(sums: list[dict[_Key, int]], describe: Callable[[_Key], dict[str, Any]]) -> list[MemoryDelta]:
    before, after = sums
    rows = [
        MemoryDelta(
            before_bytes=before.get(key, 0),
            after_bytes=after.get(key, 0),
            delta_bytes=after.get(key, 0) - before.get(key, 0),
            **describe(key),
        )
        for key in {**before, **after}
    ]
    return sorted(rows, key=lambda row: (-abs(row.delta_bytes), -row.after_bytes))
