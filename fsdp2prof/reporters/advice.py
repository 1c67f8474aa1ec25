"""What to look at next: the few sentences that lead from the numbers to the place in them that matters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields

from fsdp2prof.reporters.layers import layer_rows
from fsdp2prof.results import BreakdownNs, MemoryAnalysis, TraceAnalysis
from fsdp2prof.units import format_bytes, format_frac, format_ns
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, category_label, layer_name, op_label

__all__ = ["memory_advice", "trace_advice"]

_WORTH_NAMING = 0.05
"""Share of a step below which a loss is not worth a sentence."""

_NAMED_OPS = ("all_gather", "reduce_scatter", "all_reduce")
"""Operations with a part of the breakdown of their own; the others share ``exposed_other_comm``."""


def trace_advice(analysis: TraceAnalysis) -> list[str]:
    """Name the largest losses of the step, largest first."""
    totals: dict[str, int] = defaultdict(int)
    windows = 0
    for rank in analysis.ranks:
        for step in rank.steps:
            windows += 1
            for field in fields(BreakdownNs):
                totals[field.name] += getattr(step.breakdown_ns, field.name)
    whole = sum(totals.values())
    losses = [part for part in totals if part != "compute" and totals[part] > _WORTH_NAMING * whole]
    lines = []
    for part in sorted(losses, key=lambda name: -totals[name]):
        share, time = format_frac(totals[part] / whole), format_ns(totals[part] / windows)
        lines.append(
            f"{share} of the step is {BREAKDOWN_PARTS[part].label} ({time}){_worst_layer(analysis, part)}"
        )
    return lines


def _worst_layer(analysis: TraceAnalysis, part: str) -> str:
    if part == "idle":
        on_cpu = {rank.device_type for rank in analysis.ranks} == {"cpu"}
        why = "Python and dispatch between operators" if on_cpu else "no compute, copy or communication ran"
        return f": {why}."
    op = part.removeprefix("exposed_")
    others = part == "exposed_other_comm"
    rows = [row for row in layer_rows(analysis) if row.op == op or (others and row.op not in _NAMED_OPS)]
    if not rows:
        return "."
    worst = rows[0]
    return (
        f"; the worst {op_label(worst.op)} is {layer_name(worst.fqn)} in {worst.phase}, "
        f"{format_ns(worst.exposed_ns)} of {format_ns(worst.total_ns)} exposed."
    )


def memory_advice(analysis: MemoryAnalysis) -> list[str]:
    """Name what fills the fullest rank at its peak."""
    if not analysis.ranks:
        return []
    rank = max(analysis.ranks, key=lambda item: item.peak.allocated_bytes)
    peak = rank.peak
    lines = []
    largest = sorted(peak.categories.items(), key=lambda item: -item[1])[:2]
    if peak.allocated_bytes:
        parts = " and ".join(
            f"{category_label(name)} ({format_bytes(size)}, {format_frac(size / peak.allocated_bytes)})"
            for name, size in largest
            if size
        )
        lines.append(f"The peak of rank {rank.rank} is mostly {parts}.")
    held = [row for row in peak.by_layer if row.category == "unsharded_parameter" and row.bytes]
    if held:
        names = ", ".join(layer_name(row.fqn) for row in sorted(held, key=lambda row: -row.bytes)[:4])
        lines.append(f"Layers unsharded at that instant: {names}" + (", ..." if len(held) > 4 else "") + ".")
    if rank.truncated:
        lines.append("The history is truncated: record with more entries to see the whole step.")
    return lines
