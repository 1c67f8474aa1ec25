"""Two runs, traces, recordings or estimates against each other, as one flat table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fsdp2prof.results import CommFigures, RunComparison

__all__ = ["HEADER", "flat_rows"]

HEADER = ("table", "fqn", "phase", "op", "measure", "before", "after", "delta")
"""Columns of :func:`flat_rows`; ``fqn`` holds the layer, the memory category, the rank or the setting."""

_MEASURES = tuple(field.name for field in fields(CommFigures))


def flat_rows(comparison: RunComparison) -> Iterator[dict[str, Any]]:
    """Yield every change as a row of :data:`HEADER`, in raw units."""
    for setting in comparison.settings:
        yield _row("settings", setting.name, "value", setting.before, setting.after, None)
    for time in [comparison.step, comparison.unrecorded_step, *comparison.breakdown]:
        if time is not None:
            yield _row("step", time.part, "ns", time.before_ns, time.after_ns, time.delta_ns)
    for row in comparison.communication:
        for name in _MEASURES:
            before, after = (
                None if side is None else getattr(side, name) for side in (row.before, row.after)
            )
            flat = _row("communication", row.fqn, name, before, after, getattr(row.delta, name))
            yield {**flat, "phase": row.phase, "op": row.op}
    for peak in comparison.peaks:
        for name in ("allocated_bytes", "reserved_bytes"):
            values = [getattr(peak, f"{when}_{name}") for when in ("before", "after", "delta")]
            yield _row("peak", str(peak.after_rank), name, *values)
    if comparison.memory is not None:
        for kind in comparison.memory.by_category:
            sizes = kind.before_bytes, kind.after_bytes, kind.delta_bytes
            yield _row("memory_category", kind.category, "bytes", *sizes)
        for layer in comparison.memory.by_layer:
            sizes = layer.before_bytes, layer.after_bytes, layer.delta_bytes
            yield _row("memory_layer", layer.fqn, "bytes", *sizes)


def _row(table: str, fqn: str | None, measure: str, before: Any, after: Any, delta: Any) -> dict[str, Any]:
    return {
        "table": table,
        "fqn": fqn,
        "phase": None,
        "op": None,
        "measure": measure,
        "before": before,
        "after": after,
        "delta": delta,
    }
