"""Two recordings at their peaks: which category, layer and line of the program holds more than before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.analyzers.memory.attribution import own_frame
from fsdp2prof.analyzers.memory.peak import describe_peak
from fsdp2prof.analyzers.memory.prepared import PreparedRecording
from fsdp2prof.analyzers.memory.wording import comparison_verdict
from fsdp2prof.results.comparison import LayerMemoryDelta, MemoryComparison, MemoryDelta
from fsdp2prof.results.peak import Peak

_Key = TypeVar("_Key", bound=Hashable)


def compare_memory(before: PreparedRecording, after: PreparedRecording) -> MemoryComparison:
    """Compare two recordings, each at its own peak.

    Stacks match by the text of all their frames; blocks without a stack match by operator.
    """
    stacks = [_sums(zip(_stacks(view), _sizes(view), strict=True)) for view in (before, after)]
    places = [_sums(((op, own_frame(stack)), size) for (op, stack), size in one.items()) for one in stacks]
    return replace(
        compare_peaks(describe_peak(before), describe_peak(after)),
        by_stack=_deltas(
            stacks, lambda key: {"op": key[0], "stack": list(key[1]), "place": own_frame(key[1])}
        ),
        by_place=_deltas(places, lambda key: {"op": key[0], "place": key[1]}),
    )


def compare_peaks(before: Peak, after: Peak) -> MemoryComparison:
    """Compare two peaks, recorded or predicted, by category and layer; nothing by stack or place."""
    sides = (before, after)
    categories = [_sums((row.category, row.bytes) for row in peak.by_layer) for peak in sides]
    layers = [_sums((row.fqn, row.bytes) for row in peak.by_layer) for peak in sides]
    by_layer = _deltas(layers, lambda key: {"fqn": key})
    comparison = MemoryComparison(
        before=before,
        after=after,
        delta_bytes=after.allocated_bytes - before.allocated_bytes,
        by_category=_deltas(categories, lambda key: {"category": key}),
        by_layer=by_layer,
        by_stack=[],
        by_layer_folded=_folded(by_layer),
    )
    return replace(comparison, verdict=comparison_verdict(comparison))


def _folded(rows: list[MemoryDelta]) -> list[LayerMemoryDelta]:
    """Sum layers whose names differ in one number and that hold the same before and after."""
    folded = [
        LayerMemoryDelta(
            name=name,
            fqns=[rows[i].fqn for i in members],
            before_bytes=rows[members[0]].before_bytes * len(members),
            after_bytes=rows[members[0]].after_bytes * len(members),
            delta_bytes=rows[members[0]].delta_bytes * len(members),
        )
        for name, members in fold_names([(row.fqn, (row.before_bytes, row.after_bytes)) for row in rows])
    ]
    return sorted(folded, key=lambda row: (-abs(row.delta_bytes), -row.after_bytes))


def _sizes(view: PreparedRecording) -> list[int]:
    sizes: list[int] = view.live(view.peak_order).size.tolist()
    return sizes


def _stacks(view: PreparedRecording) -> list[tuple[str | None, tuple[str, ...]]]:
    live, stacks = view.live(view.peak_order), view.recording.stacks
    frames = {row: stacks[row] for row in set(live.stack.tolist()) if row >= 0}
    return [(op, frames.get(row, ())) for op, row in zip(live.op.to_list(), live.stack.tolist(), strict=True)]


def _sums(items: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    sums: dict[_Key, int] = {}
    for key, size in items:
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
