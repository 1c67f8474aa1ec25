"""Ranks of a device mesh: their coordinates, the groups of every dimension, and which of them cross nodes.

Ranks are numbered as ``init_device_mesh`` numbers them: the last dimension changes fastest. Nodes hold
``gpus_per_node`` ranks in a row, as torchrun fills them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from fsdp2prof.errors import UsageError
from fsdp2prof.results.mesh import MeshDimension, MeshGroup, MeshMap, MeshRank
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.units import plural

CARRIES = {
    "pp": "activations and their gradients between pipeline stages",
    "dp_replicate": "all-reduce of the sharded gradients (HSDP)",
    "dp_shard": "FSDP's all-gathers and reduce-scatters",
    "dp_shard_cp": "FSDP's all-gathers and reduce-scatters",
    "cp": "keys and values of attention",
    "ep": "tokens to and from experts (all-to-all)",
    "efsdp": "FSDP's all-gathers and reduce-scatters of the experts",
    "tp": "activations of every layer, several times",
}
_PART_OF = "nothing directly: FSDP shards over dp_shard_cp"
_FLATTENED = ("dp_shard", "cp")
_REGROUPED = (*_FLATTENED, "tp")
"""Dimensions that form the ranks of the experts' groups."""
_WITHIN_A_NODE = ("tp", "cp", "ep")
"""Dimensions that communicate inside every layer, without overlap."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one dimension: a row of ranks each."""

    ranks: IntArray
    """Group x member."""
    stride: int
    parts: tuple[str, ...]


def map_mesh(
    sizes: Mapping[str, int],
    *,
    gpus_per_node: int,
    ep: int = 1,
    ranks: Collection[int] | None = None,
    at: Mapping[str, int] | None = None,
) -> MeshMap:
    """Lay out the mesh of these dimensions, slowest first.

    ``ep`` regroups the ranks of dp_shard x cp x tp for the experts: neighbours exchange tokens, and FSDP
    shards each part of the experts over what is left. ``ranks`` and ``at`` (dimension -> index) choose some
    ranks and their groups. Raises ``UsageError`` for a rank, dimension or index that the mesh does not have,
    and for an ``ep`` that does not divide dp_shard x cp x tp.
    """
    shown = {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}
    grid = np.arange(prod(shown.values())).reshape(tuple(shown.values()))
    groups = _groups(grid, tuple(shown))
    if ep > 1:
        groups |= _expert_groups(grid, tuple(shown), ep)
    chosen = _chosen(grid, tuple(shown), ranks, at or {})
    dimensions = [_dimension(name, each, gpus_per_node, "cp" in shown) for name, each in groups.items()]
    world_size, nodes = int(grid.size), -(-int(grid.size) // gpus_per_node)
    return MeshMap(
        verdict=_verdict(dimensions, world_size, nodes),
        mesh=",".join(f"{name}={size}" for name, size in (shown | ({"ep": ep} if ep > 1 else {})).items()),
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        dimensions=dimensions,
        ranks=_ranks(grid, tuple(shown), groups, chosen, gpus_per_node),
        groups=[
            group for name, each in groups.items() for group in _members(name, each, chosen, gpus_per_node)
        ],
        warnings=_warnings(dimensions, world_size, gpus_per_node),
    )


def _groups(grid: IntArray, names: Sequence[str]) -> dict[str, _Groups]:
    found = {}
    for axis, name in enumerate(names):
        found[name] = _Groups(_rows(grid, [axis]), _stride(grid, axis), (name,))
        if name == _FLATTENED[1] and _FLATTENED[0] in names:
            both = [names.index(part) for part in _FLATTENED]
            found["_".join(_FLATTENED)] = _Groups(_rows(grid, both), _stride(grid, axis), _FLATTENED)
    return found


def _expert_groups(grid: IntArray, names: Sequence[str], ep: int) -> dict[str, _Groups]:
    """The groups of the experts, out of each row of a replica's ranks; ep changes fastest."""
    parts = tuple(part for part in _REGROUPED if part in names)
    rows = _rows(grid, [names.index(part) for part in parts]) if parts else np.zeros((1, 1), dtype=np.int64)
    size = rows.shape[1]
    if size % ep:
        raise UsageError(f"mesh: ep={ep} does not divide the {size} ranks of dp_shard x cp x tp")
    stride = _stride(grid, names.index(parts[-1])) if parts else 1
    by_expert = rows.reshape(-1, size // ep, ep)
    return {
        "ep": _Groups(by_expert.reshape(-1, ep), stride, parts),
        "efsdp": _Groups(by_expert.transpose(0, 2, 1).reshape(-1, size // ep), stride * ep, parts),
    }


def _rows(grid: IntArray, axes: Sequence[int]) -> IntArray:
    """One row of ranks a group; the axes it spans change fastest, in their order."""
    others = [axis for axis in range(grid.ndim) if axis not in axes]
    size = prod(grid.shape[axis] for axis in axes)
    return np.asarray(grid.transpose([*others, *axes]).reshape(-1, size), dtype=np.int64)


def _stride(grid: IntArray, axis: int) -> int:
    return prod(grid.shape[axis + 1 :])


def _chosen(
    grid: IntArray, names: Sequence[str], ranks: Collection[int] | None, at: Mapping[str, int]
) -> list[int]:
    for name, index in at.items():
        if name not in names:
            raise UsageError(f"--at: the mesh has no dimension {name!r}; there are {', '.join(names)}")
        size = grid.shape[names.index(name)]
        if index >= size:
            raise UsageError(f"--at: {name}={index} is not in 0 to {size - 1}")
    wrong = sorted(rank for rank in ranks or () if rank >= grid.size)
    if wrong:
        raise UsageError(f"--ranks: no rank {wrong[0]} among {plural(int(grid.size), 'rank')}")
    where = tuple(at.get(name, slice(None)) for name in names)
    found = np.sort(np.ravel(grid[where])).tolist()
    return [rank for rank in found if ranks is None or rank in ranks]


def _dimension(name: str, groups: _Groups, gpus_per_node: int, has_cp: bool) -> MeshDimension:
    nodes = groups.ranks // gpus_per_node
    spread = [len(set(row)) for row in nodes.tolist()]
    crowd = max(max(Counter(row).values()) for row in nodes.tolist())
    return MeshDimension(
        name=name,
        size=int(groups.ranks.shape[1]),
        stride=groups.stride,
        groups=int(groups.ranks.shape[0]),
        groups_across_nodes=sum(count > 1 for count in spread),
        nodes_per_group=max(spread),
        ranks_per_node=crowd,
        flattened=list(groups.parts) if groups.parts != (name,) else [],
        carries=_PART_OF if name == _FLATTENED[0] and has_cp else CARRIES.get(name, "not known"),
    )


def _ranks(
    grid: IntArray,
    names: Sequence[str],
    groups: Mapping[str, _Groups],
    chosen: Sequence[int],
    gpus_per_node: int,
) -> list[MeshRank]:
    group_of = {name: _group_of_rank(each.ranks) for name, each in groups.items()}
    coordinates = np.stack(np.unravel_index(np.arange(grid.size), grid.shape), axis=1).tolist()
    return [
        MeshRank(
            rank=rank,
            node=rank // gpus_per_node,
            local_rank=rank % gpus_per_node,
            coordinate=dict(zip(names, coordinates[rank], strict=True)),
            groups={name: index[rank] for name, index in group_of.items()},
        )
        for rank in chosen
    ]


def _group_of_rank(rows: IntArray) -> list[int]:
    found = np.empty(rows.size, dtype=np.int64)
    found[rows.ravel()] = np.repeat(np.arange(rows.shape[0]), rows.shape[1])
    return [int(index) for index in found]


def _members(name: str, groups: _Groups, chosen: Collection[int], gpus_per_node: int) -> list[MeshGroup]:
    wanted = set(chosen)
    members = []
    for index, row in enumerate(groups.ranks.tolist()):
        if wanted.isdisjoint(row):
            continue
        nodes = sorted({rank // gpus_per_node for rank in row})
        members.append(
            MeshGroup(dimension=name, index=index, ranks=row, nodes=nodes, crosses_nodes=len(nodes) > 1)
        )
    return members


def _verdict(dimensions: Sequence[MeshDimension], world_size: int, nodes: int) -> list[str]:
    said = [f"{plural(world_size, 'rank')} on {plural(nodes, 'node')}."]
    flattened = _FLATTENED[0] if any(one.name == "_".join(_FLATTENED) for one in dimensions) else None
    crossing = [one for one in dimensions if one.groups_across_nodes and one.name != flattened]
    inside = [one for one in dimensions if not one.groups_across_nodes and one.size > 1]
    if crossing:
        parts = [f"{one.name} ({plural(one.nodes_per_group, 'node')} a group)" for one in crossing]
        said.append(f"Across nodes: {', '.join(parts)}.")
    if inside:
        said.append(f"Within a node: {', '.join(one.name for one in inside)}.")
    return said


def _warnings(dimensions: Sequence[MeshDimension], world_size: int, gpus_per_node: int) -> list[str]:
    said = []
    if world_size > gpus_per_node and world_size % gpus_per_node:
        left = world_size % gpus_per_node
        said.append(
            f"{plural(world_size, 'rank')} do not fill nodes of {gpus_per_node} GPUs: the last has {left}."
        )
    said += [
        f"{one.groups_across_nodes} of {plural(one.groups, 'group')} of {one.name} cross nodes: it "
        "communicates inside every layer; keep its groups on one node."
        for one in dimensions
        if one.name in _WITHIN_A_NODE and one.groups_across_nodes
    ]
    return said
