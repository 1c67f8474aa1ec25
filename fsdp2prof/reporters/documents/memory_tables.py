"""The tables of a memory analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Column, Table, Value
from fsdp2prof.reporters.formats import byte_unit, decimals, scaled
from fsdp2prof.results.estimate import PredictedPeak
from fsdp2prof.results.memory import AtPeak, MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import Fragmentation, LayerMemory, LiveBlock, OutOfMemory, Peak, Remedy
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import CATEGORIES, remedy_label

_RANK_ROWS = 8
_LAYER_ROWS = 12
_BLOCK_ROWS = 5

_SOURCES = {
    "cuda_snapshot": "allocator snapshot",
    "storage_count": "exact storage count",
    "kineto": "profiler events",
    "estimate": "estimate",
}
_ENOUGH = {True: "yes", False: "no", None: "unknown"}


def peak_table(analysis: MemoryAnalysis) -> Table:
    """Return each rank's peak: its height, time and layer."""
    ranks = analysis.ranks
    columns = [
        c.number("rank"),
        c.size("allocated_bytes", "allocated", of="peak.allocated_bytes"),
        c.size("reserved_bytes", "reserved", of="peak.reserved_bytes"),
        c.text("phase", of="peak.phase"),
        c.layer(of="peak.fqn"),
        c.number("step", of="peak.step"),
        c.text("device"),
        c.text("source", "counted by", lambda value: str(_SOURCES.get(value, value))),
        c.text("truncated", "history", _history, of=lambda one: one.truncated or None),
    ]
    several = len(ranks) > 1
    return c.table(
        "ranks",
        "Peak memory",
        columns,
        ranks,
        known=True,
        note="highest first" if several else "",
        limit=_RANK_ROWS,
        noun="rank",
        remarks=[f"Details below: rank {ranks[0].rank}, with the highest peak; --ranks selects another."]
        if several
        else [],
    )


def _history(truncated: bool | None) -> str:
    return "truncated" if truncated else "whole"


def category_table(rank: RankMemory) -> Table:
    """Return the bytes of a rank at its peak, by category."""
    return c.table(
        "by_category",
        f"Peak of rank {rank.rank} by kind",
        [c.category(), c.size("bytes"), c.percent("frac"), c.bar("frac")],
        rank.peak.by_category,
        totals=[{"category": "allocated", "bytes": rank.peak.allocated_bytes, "frac": "100.0"}],
        remarks=_running_then(rank.at_peak),
    )


def _running_then(seen: AtPeak | None) -> list[str]:
    """Report the trace of the same run at the peak."""
    if seen is None:
        return []
    parts = [
        f"the host was in {seen.operator}" if seen.operator else "",
        f"the last launch was {seen.launched}" if seen.launched else "",
        f"in flight: {', '.join(seen.running)}" if seen.running else "nothing was in flight",
    ]
    when = "At the peak" if seen.match == "clock" else f"At the same point of traced step {seen.step}"
    return [f"{when}: {'; '.join(part for part in parts if part)}."]


def layer_memory_table(peak: Peak | PredictedPeak) -> Table:
    """Return the bytes of a rank at its peak, by layer and category; layers that are alike share a row."""
    names = [row.category for row in peak.by_category]
    unit, scale = byte_unit(max(row.bytes for row in peak.layers_folded))
    digits = decimals(peak.allocated_bytes / scale)

    def sparse(value: int) -> str:
        return scaled(value, scale, digits) if value else ""

    columns = [
        c.name("layer", of="name"),
        c.number("bytes", "all", sparse),
        *(c.number(f"{name}_bytes", CATEGORIES[name].header, sparse, of=_held(name)) for name in names),
    ]
    sums: dict[str, Value] = {f"{name}_bytes": peak.categories[name] for name in names}
    folded = len(peak.layers_folded) < len(peak.layers)
    return c.table(
        "by_layer",
        "Memory at the peak by layer",
        columns,
        peak.layers_folded,
        every=peak.layers,
        note=f"{unit}; identical layers are summed in one row" if folded else unit,
        every_note=unit,
        limit=_LAYER_ROWS,
        totals=[{"layer": "all", "bytes": peak.allocated_bytes, **sums}],
    )


def _held(category: str) -> Callable[[LayerMemory], int]:
    return lambda layer: layer.categories.get(category, 0)


def largest_layer(layers: Sequence[LayerMemory]) -> str:
    """Name the layer or the alike layers that hold most, and unattributed bytes where they are more."""
    first, total = layers[0], format_bytes(sum(layer.bytes for layer in layers))
    known = next((layer for layer in layers if layer.fqns != [None]), None)
    if known is None:
        return f"{format_bytes(first.bytes)} at the peak belong to no layer"
    holds = f"{known.name} {'holds' if len(known.fqns) == 1 else 'hold'}"
    if known is first:
        return f"{holds} most: {format_bytes(known.bytes)} of {total}"
    return f"{format_bytes(first.bytes)} of {total} belong to no layer; {holds} {format_bytes(known.bytes)}"


def block_table(rank: RankMemory) -> Table:
    """Return the largest allocations alive at the peak."""
    columns = [
        c.size("bytes"),
        c.category(),
        c.layer(),
        c.name("op", of=_op),
        c.name("place", "allocated at"),
        c.text("phase"),
        c.number("step"),
        c.time("age_ns", "age"),
    ]
    title, rows = "Largest blocks at the peak", rank.peak.largest_blocks
    return c.table("largest_blocks", title, columns, rows, known=True, limit=_BLOCK_ROWS, noun="block")


def line_table(rank: RankMemory) -> Table:
    """Return the lines of the program that hold most at the peak."""
    columns = [c.name("place", "allocated at"), c.category(), c.size("bytes"), c.number("blocks")]
    return c.table(
        "by_line", "Memory at the peak by line", columns, rank.peak.by_line, known=True, noun="line"
    )


def _op(block: LiveBlock) -> str | None:
    """An operator that is only the line of the program says nothing beside that line."""
    same = block.op is not None and block.place is not None and block.op.endswith(block.place)
    return None if same else block.op


def layer_peak_table(rank: RankMemory) -> Table:
    """Return how high memory was while each layer ran, and how much it grew."""
    columns = [c.layer(), c.text("phase"), c.size("peak_bytes", "peak"), c.size("delta_bytes", "growth")]
    rows = sorted(rank.layers, key=lambda row: -row.peak_bytes)
    note = "over the whole device, highest first; growth: from start to end of the layer"
    return c.table("layers_running", "While each layer ran", columns, rows, note=note, limit=_LAYER_ROWS)


def remedy_table(title: str, remedies: Sequence[Remedy], oom: OutOfMemory | None = None) -> Table:
    """Return the savings of changes, and whether each would have made a failed request fit."""
    columns = [
        c.text("action", "change", remedy_label),
        c.size("saves_bytes", "saves\nat most"),
        *([c.text("enough", show=_ENOUGH.__getitem__)] if oom else []),
        c.prose("how"),
    ]
    return c.table(
        "remedies", title, columns, remedies, note="each alone, largest saving first", noun="change"
    )


def fragmentation_table(found: Fragmentation, rank: int) -> Table:
    """Return reserved against allocated memory by pool and stream, and its sum."""
    sums = [
        c.size("reserved_bytes", "reserved"),
        c.size("allocated_bytes", "allocated"),
        c.size("inactive_split_bytes", "split,\nunused"),
        c.size("releasable_bytes", "releasable"),
        c.size("pending_free_bytes", "waiting for\na stream"),
        c.size("rounding_bytes", "rounding"),
        c.size("largest_free_block_bytes", "largest\nfree block"),
        c.count("segments"),
    ]
    return c.table(
        "fragmentation",
        f"Reserved and not allocated on rank {rank}",
        [c.text("pool"), c.number("stream"), *sums],
        found.by_pool,
        note="at the end of the recording" + (", expandable segments" if found.expandable_segments else ""),
        noun="pool",
        totals=[{"pool": "all", **{one.name: one.value(found) for one in sums}}],
    )


# Tables of every rank, for data formats.


def peak_rows_table(analysis: MemoryAnalysis) -> Table:
    """Return the bytes alive at every rank's peak per layer and category."""
    rows = [(rank, row) for rank in analysis.ranks for row in rank.peak.by_layer]
    columns = [
        c.text("rank", of="0.rank"),
        c.layer("fqn", "fqn", of="1.fqn"),
        *_of_the_row("category", "bytes"),
    ]
    return c.table("peak", "Alive at the peak, by rank, layer and category", columns, rows)


def layer_rows_table(analysis: MemoryAnalysis) -> Table:
    """Return each layer's own peak and growth per phase, of every rank."""
    rows = [(rank, row) for rank in analysis.ranks for row in rank.layers]
    figures = _of_the_row("phase", "peak_bytes", "delta_bytes")
    columns = [c.text("rank", of="0.rank"), c.layer("fqn", "fqn", of="1.fqn"), *figures]
    return c.table("layers", "Each layer's own peak and growth", columns, rows)


def _of_the_row(*keys: str) -> list[Column]:
    return [c.text(key, of=f"1.{key}") for key in keys]
