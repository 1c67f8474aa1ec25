"""The sentences of a memory analysis: the verdict, the next places to look, the account of a failed
request."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.analyzers.layers import in_phase, named_layer
from fsdp2prof.results.comparison import LayerMemoryDelta, MemoryComparison
from fsdp2prof.results.memory import MemoryFigures, RankMemory
from fsdp2prof.results.peak import LayerMemory, OutOfMemory, Peak, Remedy
from fsdp2prof.units import format_bytes, format_frac
from fsdp2prof.vocabulary import category_label, remedy_label

_NAMED = 3
"""Things that a sentence names."""
_WORTH_NAMING = 0.05
"""Part of the peak from which a category or a saving is worth naming."""
_UNKNOWN = 0.5
"""Unattributed part of the peak from which nothing can be advised but to record more."""
_UNKNOWN_KIND = {"unattributed": "memory of no known kind"}
"""How a sentence names what a table calls unattributed."""
_ROLES = ("sharded_parameter", "sharded_gradient", "optimizer_state")
"""Categories that only a recording knows."""
_LIBRARIES_BYTES = 6 << 30
"""What a context, NCCL's buffers and captured graphs of one process seldom take."""
_CLOSE = 0.95
"""Share of the peak: another place this close to it limits the gain of lowering the peak."""


def memory_verdict(ranks: Sequence[RankMemory], figures: MemoryFigures) -> list[str]:
    """Report the height, place and content of the peak, and the change to try.

    Of the fullest rank, or of the fullest one that ran out of memory.
    """
    failed = [(rank, rank.oom) for rank in ranks if rank.oom is not None]
    if failed:
        rank, oom = failed[0]
        who = len({one.rank for one, _ in failed})
        return [_failure(rank.rank, oom, who), _place_and_filling(rank.peak), what_would_fit(oom)]
    height = _height(figures, len({one.rank for one in ranks}))
    return [height, _place_and_filling(ranks[0].peak), *_what_to_try(ranks[0], figures)]


def memory_advice(ranks: Sequence[RankMemory]) -> list[str]:
    """Report the next places to look on the fullest rank."""
    peak = ranks[0].peak
    lines = []
    held = [row for row in peak.layers if row.categories.get("unsharded_parameter")]
    if any(fqn is not None for row in held for fqn in row.fqns):
        held.sort(key=lambda row: -row.categories["unsharded_parameter"])
        lines.append(f"Unsharded at the peak: {_some([_layers(row) for row in held])}.")
    near = [other for other in peak.others if other.allocated_bytes >= _CLOSE * peak.allocated_bytes]
    if near:
        gained = peak.allocated_bytes - near[0].allocated_bytes
        places = _some([where(other.phase, other.fqn) for other in near])
        saved = f"saves only {format_bytes(gained)}" if gained else "saves nothing"
        lines.append(
            f"Memory is {'almost ' if gained else ''}as high {places}: lowering only one of them {saved}."
        )
    return lines


def comparison_verdict(comparison: MemoryComparison) -> list[str]:
    """Say how much the peak changed, and which categories and layers changed most."""
    before, after = comparison.before.allocated_bytes, comparison.after.allocated_bytes
    change = comparison.delta_bytes
    if not change:
        whole = f"The peak is the same: {format_bytes(after)}."
    else:
        part = f" ({100 * change / before:+.1f}%)" if before else ""
        direction = "higher" if change > 0 else "lower"
        whole = (
            f"The peak is {format_bytes(abs(change))} {direction}{part}: "
            f"{format_bytes(before)} before, {format_bytes(after)} after."
        )
    kinds = [
        f"{category_label(row.category or 'unattributed')} ({_signed(row.delta_bytes)})"
        for row in comparison.by_category
        if row.delta_bytes
    ]
    layers = [
        f"{_layers(row)} ({_signed(row.delta_bytes)})"
        for row in comparison.by_layer_folded
        if row.delta_bytes
    ]
    lines = [whole]
    if kinds:
        lines.append(f"Largest changes: {_some(kinds)}.")
    if layers and any(fqn is not None for row in comparison.by_layer_folded for fqn in row.fqns):
        lines.append(f"Where: {_some(layers)}.")
    return lines


def where(phase: str, fqn: str | None = None) -> str:
    """Report the program's position; phase ``other`` is one that neither a label nor a stack shows."""
    place = "in no known phase" if phase == "other" else in_phase(phase)
    return place if fqn is None else f"{place} of {named_layer(fqn)}"


def request_story(oom: OutOfMemory) -> str:
    """Say which request failed, and how much was missing."""
    by, size, held = f"`{oom.op}`" if oom.op else "a request", oom.requested_bytes, oom.allocated_bytes
    asked = f"{by} asked for {format_bytes(size)} with {format_bytes(held)} allocated"
    if oom.device_free_bytes is None:
        return f"{asked}; the device's free memory is unknown"
    left = format_bytes(oom.device_free_bytes)
    if oom.missing_bytes is None:
        return (
            f"{asked}, although the device had {left} left: another limit applied, "
            "such as set_per_process_memory_fraction"
        )
    return f"{asked} and {left} left on the device, {format_bytes(oom.missing_bytes)} too little"


def what_would_fit(oom: OutOfMemory) -> str:
    """Say which changes would have let a failed request fit, as far as that is known, and what is still to
    come: without states in memory, no optimizer has made a step."""
    enough = [remedy for remedy in oom.remedies if remedy.enough]
    open_ones = [remedy for remedy in oom.remedies if remedy.enough is None]
    if enough:
        which = "This change alone" if len(enough) == 1 else "Each of these changes alone"
        return f"{which} would have let this request fit: {_savings(enough)}.{_to_come(oom)}"
    if open_ones:
        return f"The amount needed is unknown; the largest savings: {_savings(open_ones)}."
    if oom.remedies:
        return f"No single change is enough; the largest savings: {_savings(oom.remedies)}."
    return "No change that would save memory was found."


def _to_come(oom: OutOfMemory) -> str:
    parameters = oom.categories.get("sharded_parameter", 0)
    if not parameters or oom.categories.get("optimizer_state"):
        return ""
    return f" No optimizer state is in memory yet: AdamW's would take {format_bytes(2 * parameters)} more."


def _outside(oom: OutOfMemory) -> str:
    """Report memory of the device that others hold, where it is more than a process's own libraries take."""
    if oom.outside_bytes is None or oom.outside_bytes < _LIBRARIES_BYTES:
        return ""
    outside = format_bytes(oom.outside_bytes)
    return f" {outside} of the device are held outside this rank's allocator, as by other processes."


def _failure(rank: int, oom: OutOfMemory, ranks: int) -> str:
    who = f"Rank {rank} ran out of memory" if ranks == 1 else f"{ranks} ranks ran out of memory, rank {rank}"
    return f"{who} {where(oom.phase, oom.fqn)}: {request_story(oom)}.{_outside(oom)}"


def _height(figures: MemoryFigures, ranks: int) -> str:
    who = f"Rank {figures.rank}" if ranks == 1 else f"Rank {figures.rank}, the highest of {ranks} ranks,"
    parts = [f"{who} peaks at {format_bytes(figures.allocated_bytes)}"]
    if figures.reserved_bytes is not None:
        parts.append(f"with {format_bytes(figures.reserved_bytes)} reserved")
    if figures.device_total_bytes is not None:
        device = format_bytes(figures.device_total_bytes)
        parts.append(f"{format_frac(figures.device_frac)} of its {device} device")
    return ", ".join(parts) + "."


def _place_and_filling(peak: Peak) -> str:
    step = "" if peak.step is None else f", step {peak.step}"
    large = [row for row in peak.by_category if row.frac >= _WORTH_NAMING][:_NAMED]
    filling = ", ".join(
        f"{_UNKNOWN_KIND.get(row.category, category_label(row.category))} {format_bytes(row.bytes)} "
        f"({format_frac(row.frac)})"
        for row in large
    )
    return f"The peak is {where(peak.phase, peak.fqn)}{step}" + (f"; it holds {filling}." if filling else ".")


def _what_to_try(rank: RankMemory, figures: MemoryFigures) -> list[str]:
    if figures.unattributed_frac >= _UNKNOWN:
        if any(rank.peak.categories.get(name) for name in _ROLES):
            return ["Most of it has no role that the recording knows: see the finding."]
        return [
            "Most of it has no known role; fsdp2prof record identifies every parameter, gradient and "
            "optimizer state."
        ]
    worth = _WORTH_NAMING * rank.peak.allocated_bytes
    large = [remedy for remedy in rank.remedies if remedy.saves_bytes >= worth]
    return [f"Largest savings: {_savings(large)}."] if large else []


def _savings(remedies: Sequence[Remedy]) -> str:
    return _some([f"{remedy_label(one.action)} (up to {format_bytes(one.saves_bytes)})" for one in remedies])


def _layers(row: LayerMemory | LayerMemoryDelta) -> str:
    return named_layer(row.fqns[0]) if len(row.fqns) == 1 else f"`{row.name}`"


def _some(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 more``."""
    shown, rest = list(names[:_NAMED]), len(names) - _NAMED
    if rest > 0:
        shown.append(f"{rest} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else ''}{format_bytes(change)}"
