"""Document and chart of a mesh: its dimensions, the place of every rank, and the groups that cross nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import Figure, figure, label
from fsdp2prof.reporters.document import Block, Chart, Document, KeyFigure, Section, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.mesh import MeshMap, MeshRank

_MOST_NODES, _MOST_PER_NODE = 32, 16
"""Squares beyond these are too small to read."""

_COLOURS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99", "#cab2d6", "#ffff99", "#8dd3c7", "#fccde5")
"""Of groups, over and over: those beside each other differ."""
_TEXT = "#222222"
"""On these colours, on a dark page too."""


def mesh_chart(mesh: MeshMap) -> Figure | None:
    """Draw the ranks by node, one trace a dimension, the first one shown; None for a mesh too large."""
    if mesh.nodes > _MOST_NODES or mesh.gpus_per_node > _MOST_PER_NODE or mesh.world_size < 2:
        return None
    shown = [one.name for one in mesh.dimensions if one.size > 1]
    data = [_squares(mesh, name, visible=name == shown[-1]) for name in shown]
    chart = figure(data, height=80 + 40 * mesh.nodes, x="local rank", reverse=True)
    chart["layout"]["xaxis"] |= {"dtick": 1, "range": [-0.6, mesh.gpus_per_node - 0.4]}
    return chart


def _squares(mesh: MeshMap, dimension: str, *, visible: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": label(dimension),
        "x": [one.local_rank for one in mesh.ranks],
        "y": [f"node {one.node}" for one in mesh.ranks],
        "text": [str(one.rank) for one in mesh.ranks],
        "marker": {
            "symbol": "square",
            "size": 30,
            "color": [_COLOURS[one.groups[dimension] % len(_COLOURS)] for one in mesh.ranks],
        },
        "textfont": {"color": _TEXT, "size": 12},
        "hovertext": [
            f"rank {one.rank}: {label(', '.join(f'{name}={at}' for name, at in one.coordinate.items()))}"
            f"<br>{label(dimension)} group {one.groups[dimension]}"
            for one in mesh.ranks
        ],
        "hoverinfo": "text",
        "visible": True if visible else "legendonly",
    }


_ROWS = 16


@builds(MeshMap)
def mesh_document(mesh: MeshMap) -> Document:
    """Lay out a mesh."""
    return Document(
        title=f"Mesh {mesh.mesh}",
        numbers=[
            KeyFigure(value=f"{mesh.world_size:,}", label="ranks"),
            KeyFigure(value=f"{mesh.nodes:,}", label="node" if mesh.nodes == 1 else "nodes"),
        ],
        sections=[
            Section(anchor="dimensions", title="Dimensions", blocks=mesh_blocks(mesh)),
            Section(anchor="ranks", title="Ranks", blocks=[_ranks(mesh)]),
            Section(anchor="groups", title="Process groups", blocks=[_groups(mesh)]),
        ],
    )


def mesh_blocks(mesh: MeshMap) -> list[Block]:
    """Return the dimensions as a table, and the ranks by node as a picture."""
    crossing = [one.name for one in mesh.dimensions if one.groups_across_nodes]
    title = f"Groups of {', '.join(crossing)} cross nodes" if crossing else "No group crosses nodes"
    figure, note = mesh_chart(mesh), "ranks by node; each group has its own color"
    picture = [] if figure is None else [Chart(name="nodes", title=title, note=note, figure=figure)]
    return [_dimensions(mesh), *picture]


def _dimensions(mesh: MeshMap) -> Table:
    columns = [
        c.text("name", "dimension"),
        c.count("size", "ranks"),
        c.count("stride"),
        c.count("groups"),
        c.count("groups_across_nodes", "across\nnodes"),
        c.count("nodes_per_group", "nodes of\na group"),
        c.count("ranks_per_node", "ranks of it\non a node"),
        c.prose("carries"),
    ]
    note = "slowest first; stride: ranks from one to the next of a group"
    return c.table("dimensions", "Dimensions", columns, mesh.dimensions, note=note, noun="dimension")


def _ranks(mesh: MeshMap) -> Table:
    own = [one.name for one in mesh.dimensions if not one.flattened]
    columns = [
        c.number("rank"),
        c.number("node"),
        c.number("local_rank", "local\nrank"),
        *(c.number(name, of=_along(name)) for name in own),
    ]
    note = "index along every dimension"
    return c.table("ranks", "Ranks", columns, mesh.ranks, note=note, limit=_ROWS, noun="rank")


def _along(dimension: str) -> Callable[[MeshRank], int]:
    return lambda one: one.coordinate[dimension]


def _groups(mesh: MeshMap) -> Table:
    columns = [
        c.text("dimension"),
        c.number("index", "group"),
        c.name("ranks", of=lambda one: _listed(one.ranks)),
        c.name("nodes", of=lambda one: _listed(one.nodes)),
        c.text("crosses_nodes", "", lambda crosses: "crosses nodes" if crosses else ""),
    ]
    return c.table("groups", "Process groups", columns, mesh.groups, limit=_ROWS, noun="group")


def _listed(numbers: Sequence[int]) -> str:
    """Write equal steps short: ``0-7``, ``0, 8, ..., 56``."""
    if len(numbers) < 4:
        return ", ".join(map(str, numbers))
    step = numbers[1] - numbers[0]
    if any(after - before != step for before, after in pairwise(numbers)):
        return ", ".join(map(str, numbers))
    if step == 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
