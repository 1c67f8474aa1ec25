"""Estimates as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.reporters.grid import Cell, Col, Grid, byte_unit, scaled
from fsdp2prof.reporters.terminal import bullets, fact_list, grid_view, stack
from fsdp2prof.results import CheckpointEstimate, CommEstimate, CommRow, MemoryEstimate
from fsdp2prof.units import format_bytes, format_count, format_frac
from fsdp2prof.vocabulary import category_label, dtype_label, layer_name, op_label, printable

__all__ = ["checkpoint_view", "comm_view", "memory_view"]

_LAYER_ROWS = 12


def comm_view(estimate: CommEstimate, *, every: bool = False) -> RenderableType:
    """Lay out a communication estimate: sums by op, then layers, alike ones folded unless ``every``."""
    return stack(
        _headline("Communication of one rank in one step", estimate.model, estimate.mesh),
        grid_view(_totals_grid(estimate)),
        grid_view(_layers_grid(estimate, every)),
        bullets("Assumptions", estimate.assumptions),
    )


def checkpoint_view(estimate: CheckpointEstimate) -> RenderableType:
    """Lay out a checkpoint estimate."""
    low, high = format_bytes(estimate.rank_bytes_min), format_bytes(estimate.rank_bytes_max)
    facts = {
        "sharded checkpoint": f"{format_bytes(estimate.sharded_bytes)}, {format_count(estimate.files)} files",
        "  parameters": format_bytes(estimate.parameter_bytes),
        "  optimizer": format_bytes(estimate.optimizer_bytes),
        "  one rank writes": low if low == high else f"{low} to {high}",
        "full state dict": f"{format_bytes(estimate.full_bytes)}, by one rank",
        "  of the model alone": format_bytes(estimate.full_parameter_bytes),
    }
    if estimate.sharded_seconds is not None and estimate.full_seconds is not None:
        facts["time to write"] = (
            f"{estimate.sharded_seconds:.1f} s sharded, {estimate.full_seconds:.1f} s full"
        )
    return stack(
        _headline("Checkpoint", estimate.model, estimate.mesh),
        fact_list("Sizes", facts),
        bullets("Assumptions", estimate.assumptions),
    )


def memory_view(estimate: MemoryEstimate, *, every: bool = False) -> RenderableType:
    """Lay out a memory estimate: the peak and what fills it; ``every`` shows each layer."""
    return stack(
        _headline("Memory of one rank", estimate.model, estimate.mesh),
        fact_list("Peak", _peak_facts(estimate)),
        bullets("What to change", estimate.advice),
        grid_view(_category_grid(estimate)),
        grid_view(_stream_grid(estimate)),
        grid_view(_layer_peak_grid(estimate, every)),
        bullets("Assumptions", estimate.assumptions),
    )


def _headline(title: str, model: Mapping[str, Any], mesh: Mapping[str, Any]) -> Text:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.items() if name != "world_size" and size != 1)
    ranks = format_count(mesh["world_size"]) + (" rank" if mesh["world_size"] == 1 else " ranks")
    text = Text(title, style="bold")
    text.append(
        f"  {printable(str(model['name']))}, {format_count(model['parameters'])} parameters, {ranks}"
        + (f" ({sizes})" if sizes else ""),
        style="not bold dim",
    )
    return text


def _totals_grid(estimate: CommEstimate) -> Grid:
    totals = estimate.per_step
    unit, scale = byte_unit(max((total.payload_bytes for total in totals.values()), default=0))
    return Grid(
        title="By operation",
        columns=[Col("op"), *_number_columns(unit)],
        rows=[
            [
                op_label(op),
                format_count(total.count),
                scaled(total.payload_bytes, scale, 3),
                scaled(total.wire_bytes, scale, 3),
            ]
            for op, total in totals.items()
        ],
    )


def _layers_grid(estimate: CommEstimate, every: bool) -> Grid:
    layers: dict[tuple[int, str | None], list[CommRow]] = {}
    for row in estimate.groups:
        layers.setdefault((row.root, row.fqn), []).append(row)
    unit, scale = byte_unit(max((row.payload_bytes for row in estimate.groups), default=0))
    rows: list[list[Cell]] = []
    for root in dict.fromkeys(root for root, _ in layers):
        own = {fqn: alike for (of, fqn), alike in layers.items() if of == root and fqn is not None}
        shapes = [(fqn, tuple(map(_shape, alike))) for fqn, alike in own.items()]
        for name, members in fold_names(shapes, every=every):
            shown = f"{name} (each)" if len(members) > 1 else name
            first = own[list(own)[members[0]]]
            rows += _layer_rows(shown if root == 0 else f"model {root}: {shown}", first, scale)
    return Grid(
        title="By layer",
        columns=[
            Col("layer", "name"),
            Col("phase"),
            Col("op"),
            Col("over"),
            Col("dtype"),
            *_number_columns(unit),
        ],
        rows=[*rows, *_layer_rows("(no layer)", layers.get((0, None), []), scale)],
    )


def _number_columns(unit: str) -> list[Col]:
    return [Col("count", "number"), Col(f"payload\n{unit}", "number"), Col(f"wire\n{unit}", "number")]


def _shape(row: CommRow) -> tuple[object, ...]:
    return (row.phase, row.op, row.mesh_dim, row.dtype, row.group_size, row.count, row.payload_bytes)


def _layer_rows(name: str, rows: list[CommRow], scale: int) -> list[list[Cell]]:
    return [
        [
            name if index == 0 else "",
            row.phase,
            op_label(row.op),
            f"{row.mesh_dim or row.process_group or '-'} ({row.group_size})",
            dtype_label(row.dtype),
            format_count(row.count),
            scaled(row.payload_bytes, scale, 3),
            scaled(row.wire_bytes, scale, 3),
        ]
        for index, row in enumerate(rows)
    ]


def _module(fqn: str | None) -> str:
    return layer_name(fqn)


def _peak_facts(estimate: MemoryEstimate) -> dict[str, str]:
    peak, outside = estimate.peak, estimate.outside_allocator_bytes
    where = f"in {peak.phase} of {_module(peak.fqn)}, step {peak.step}"
    facts = {
        "reserved": f"{format_bytes(peak.reserved_bytes)} by the caching allocator",
        "active": f"{format_bytes(peak.active_bytes)} {where}",
        "outside the allocator": f"{format_bytes(outside['low'])} to {format_bytes(outside['high'])}",
    }
    for step in estimate.steps:
        facts[f"step {step.step}"] = (
            f"{format_bytes(step.reserved_bytes)} reserved, {format_bytes(step.active_bytes)} active"
        )
    if estimate.policy["offload"]:
        facts["host memory"] = format_bytes(estimate.host_bytes)
    if estimate.device_total_bytes is not None and estimate.headroom_bytes is not None:
        room = format_bytes(abs(estimate.headroom_bytes))
        device = format_bytes(estimate.device_total_bytes)
        facts["device"] = f"{device}: " + (
            f"fits, {room} left" if estimate.fits else f"does not fit, {room} short"
        )
    return facts


def _category_grid(estimate: MemoryEstimate) -> Grid:
    peak = estimate.peak
    filled = {name: size for name, size in peak.categories.items() if size}
    return Grid(
        title="What fills the active peak",
        columns=[Col("category"), Col("bytes", "number"), Col("share", "number"), Col("", "bar")],
        rows=[
            [
                category_label(name),
                format_bytes(size),
                format_frac(size / peak.active_bytes),
                size / peak.active_bytes,
            ]
            for name, size in sorted(filled.items(), key=lambda item: -item[1])
        ],
    )


def _stream_grid(estimate: MemoryEstimate) -> Grid:
    return Grid(
        title="Reserved by stream",
        note="each stream's pool keeps its own blocks",
        columns=[Col("stream"), Col("reserved", "number")],
        rows=[[name, format_bytes(size)] for name, size in estimate.peak.streams.items()],
    )


def _layer_peak_grid(estimate: MemoryEstimate, every: bool) -> Grid | None:
    layers = sorted(estimate.layers, key=lambda layer: -layer.peak_bytes)
    shown = layers if every else layers[:_LAYER_ROWS]
    if not shown:
        return None
    left_out = len(layers) - len(shown)
    return Grid(
        title="Most active bytes while a layer ran",
        columns=[Col("layer", "name"), Col("phase"), Col("peak", "number"), Col("growth", "number")],
        rows=[
            [
                _module(layer.fqn),
                layer.phase,
                format_bytes(layer.peak_bytes),
                format_bytes(layer.delta_bytes),
            ]
            for layer in shown
        ],
        more=f"and {left_out} more rows" if left_out else "",
    )
