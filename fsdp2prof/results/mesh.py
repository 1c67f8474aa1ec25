"""Result of ``inspect mesh``: position of ranks in a device mesh, and groups that cross nodes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshDimension:
    """One dimension of a mesh, or several flattened into one."""

    name: str
    size: int
    """Ranks per group."""
    stride: int
    """Rank distance between neighbours of a group."""
    groups: int
    groups_across_nodes: int
    nodes_per_group: int
    """Number of nodes of its most spread group."""
    ranks_per_node: int
    """Most ranks of one group on one node."""
    flattened: list[str]
    """Dimensions that it flattens; empty for a dimension of the mesh itself."""
    carries: str
    """Communication over it in a step, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRank:
    """Position of one rank."""

    rank: int
    node: int
    local_rank: int
    coordinate: dict[str, int]
    """Index of the rank along every dimension."""
    groups: dict[str, int]
    """Index of the rank's group of every dimension, among that dimension's groups."""


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
    """Mesh as given, without dimensions of size one."""
    world_size: int
    gpus_per_node: int
    nodes: int
    dimensions: list[MeshDimension]
    """Dimensions, slowest first; flattened ones after their parts."""
    ranks: list[MeshRank]
    """All ranks, or the requested ones."""
    groups: list[MeshGroup]
    """All groups, or those of the requested ranks."""
    warnings: list[str]
