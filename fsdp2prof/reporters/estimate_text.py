"""Estimates as text for people."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp2prof.reporters.wording import printable
from fsdp2prof.results import CheckpointEstimate, CommEstimate, CommRow
from fsdp2prof.units import format_bytes, format_count

__all__ = ["checkpoint_view", "comm_view"]


def comm_view(estimate: CommEstimate) -> RenderableType:
    """Lay out a communication estimate: sums, then layers, alike ones in a row folded."""
    sums = _table("op", "count", "payload", "wire")
    for op, total in estimate.per_step.items():
        sums.add_row(
            op, format_count(total.count), format_bytes(total.payload_bytes), format_bytes(total.wire_bytes)
        )
    rows = _table("layer", "phase", "op", "over", "dtype", "count", "payload", "wire")
    for names, row in _folded(estimate.groups):
        rows.add_row(
            printable(names),
            row.phase,
            row.op,
            f"{row.mesh_dim or '-'} ({row.group_size})",
            row.dtype,
            format_count(row.count),
            format_bytes(row.payload_bytes),
            format_bytes(row.wire_bytes),
        )
    return Group(
        _headline("Communication of one rank in one step", estimate.model, estimate.mesh),
        Text(""),
        sums,
        Text(""),
        rows,
        *_assumptions(estimate.assumptions),
    )


def checkpoint_view(estimate: CheckpointEstimate) -> RenderableType:
    """Lay out a checkpoint estimate."""
    table = Table.grid(padding=(0, 2))
    facts = [
        (
            "sharded checkpoint",
            f"{format_bytes(estimate.sharded_bytes)} in {format_count(estimate.files)} files",
        ),
        ("  parameters", format_bytes(estimate.parameter_bytes)),
        ("  optimizer", format_bytes(estimate.optimizer_bytes)),
        (
            "  one rank writes",
            f"{format_bytes(estimate.rank_bytes_min)} to {format_bytes(estimate.rank_bytes_max)}",
        ),
        ("full state dict", f"{format_bytes(estimate.full_bytes)} on one rank"),
        ("  of the model alone", format_bytes(estimate.full_parameter_bytes)),
    ]
    if estimate.sharded_seconds is not None and estimate.full_seconds is not None:
        facts.append(("time to write", f"{estimate.sharded_seconds:.1f} s sharded"))
        facts.append(("", f"{estimate.full_seconds:.1f} s full, by one rank"))
    for name, value in facts:
        table.add_row(name, value)
    return Group(
        _headline("Checkpoint", estimate.model, estimate.mesh),
        Text(""),
        table,
        *_assumptions(estimate.assumptions),
    )


def _headline(title: str, model: dict[str, Any], mesh: dict[str, Any]) -> Text:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.items() if name != "world_size" and size != 1)
    text = Text(title, style="bold")
    parameters = format_count(model["parameters"])
    text.append(
        f"  {printable(str(model['name']))}, {parameters} parameters, "
        f"{format_count(mesh['world_size'])} ranks ({sizes or 'no parallelism'})",
        style="not bold",
    )
    return text


def _folded(rows: Iterable[CommRow]) -> list[tuple[str, CommRow]]:
    """Layers in a row whose collectives are the same become one line: ``layers.0 .. layers.31``."""
    by_layer = [
        (fqn, list(own)) for fqn, own in groupby(_by_layer(rows), key=lambda row: (row.root, row.fqn))
    ]
    folded: list[tuple[str, CommRow]] = []
    for _, alike in groupby(by_layer, key=lambda layer: [_shape(row) for row in layer[1]]):
        layers = list(alike)
        names = [_layer_name(key) for key, _ in layers]
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)}, each)"
        folded += [(shown if index == 0 else "", row) for index, row in enumerate(layers[0][1])]
    return folded


def _by_layer(rows: Iterable[CommRow]) -> list[CommRow]:
    order: dict[tuple[int, str | None], list[CommRow]] = {}
    for row in rows:
        order.setdefault((row.root, row.fqn), []).append(row)
    return [row for own in order.values() for row in own]


def _shape(row: CommRow) -> tuple[object, ...]:
    return (row.phase, row.op, row.mesh_dim, row.dtype, row.group_size, row.count, row.payload_bytes)


def _layer_name(key: tuple[int, str | None]) -> str:
    root, fqn = key
    name = "(no layer)" if fqn is None else fqn or "(root)"
    return name if root == 0 else f"model {root}: {name}"


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        numeric = header in ("count", "payload", "wire")
        table.add_column(header, justify="right" if numeric else "left", no_wrap=header != "layer")
    return table


def _assumptions(lines: list[str]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", printable(line))
    return [Text(""), Text("Assumptions", style="bold"), table] if lines else []
