"""Result of ``inspect mesh``: which rank stands where in a device mesh, and which groups cross nodes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshDimension:
    """One dimension of a mesh, or several flattened into one."""

    name: str
    size: int
    """Ranks of one of its groups."""
    stride: int
    """Ranks between neighbours of a group."""
    groups: int
    groups_across_nodes: int
    nodes_per_group: int
    """Nodes that its most spread group is on."""
    ranks_per_node: int
    """Ranks of one group on one node, at most."""
    flattened: list[str]
    """Dimensions it is made of; empty for one of the mesh's own."""
    carries: str
    """What goes over it in a step, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRank:
    """Where one rank stands."""

    rank: int
    node: int
    local_rank: int
    coordinate: dict[str, int]
    """Index along every dimension."""
    groups: dict[str, int]
    """Index of its group of every dimension, among that dimension's groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshGroup:
    """The ranks of one process group."""

    dimension: str
    index: int
    ranks: list[int]
    nodes: list[int]
    crosses_nodes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshMap(Shown):
    """Ranks, coordinates and process groups of a device mesh."""

    schema: str = "fsdp2prof.inspect.mesh/1"
    verdict: list[str]
    mesh: str
    """As it was given, dimensions of one rank left out."""
    world_size: int
    gpus_per_node: int
    nodes: int
    dimensions: list[MeshDimension]
    """Slowest first, flattened ones after those they are made of."""
    ranks: list[MeshRank]
    """All, or those asked for."""
    groups: list[MeshGroup]
    """All, or those of the ranks asked for."""
    warnings: list[str]
