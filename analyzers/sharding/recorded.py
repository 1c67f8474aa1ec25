"""How the parameters of a recorded run are sharded, from the manifests of its ranks.

Where the ranks of a recorded run stand, and which rows each holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.mesh_map import CARRIES, map_mesh
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo, RankManifest
from fsdp2prof.results.mesh import MeshMap
from fsdp2prof.results.sharding import ShardingMap
from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh

_NEXT_DIMENSION = re.compile(r", (?=\w+: )")
"""Between the placements of two mesh dimensions: ``dp: Shard(dim=0), tp: Replicate()``."""


def group_key(group: ParamGroupInfo) -> tuple[int, str, int]:
    """The identity of a parameter group among those of a rank."""
    return group.root, group.fqn, group.index


def shard_dim(parameter: ParameterInfo) -> int:
    """The dimension that ``placement`` names: ``Shard(0)``."""
    digits = "".join(char for char in parameter.placement if char.isdecimal())
    dim = int(digits[:6] or 0)
    return dim if dim < len(parameter.global_shape) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """One parameter group in the words of every rank that has it."""

    key: tuple[int, str, int]
    by_rank: Mapping[int, ParamGroupInfo]
    shard_groups: tuple[tuple[int, ...], ...]
    """Ranks of every shard group, in the order of their shards; each group once."""

    @property
    def first(self) -> ParamGroupInfo:
        """In the words of the lowest rank."""
        return self.by_rank[min(self.by_rank)]

    def parameter(self, rank: int, position: int) -> ParameterInfo | None:
        """A rank's record of a parameter by its position; None if there is none, or it is of another
        parameter."""
        group, expected = self.by_rank.get(rank), self.first.parameters[position]
        if group is None or position >= len(group.parameters):
            return None
        told = group.parameters[position]
        same = (told.fqn, told.global_shape) == (expected.fqn, expected.global_shape)
        return told if same else None


def recorded_groups(manifests: Mapping[int, RankManifest]) -> list[RecordedGroup]:
    """Combine the ranks' records of each parameter group, in the lowest rank's order."""
    found: dict[tuple[int, str, int], dict[int, ParamGroupInfo]] = {}
    for rank, manifest in sorted(manifests.items()):
        for group in manifest.param_groups:
            found.setdefault(group_key(group), {})[rank] = group
    return [
        RecordedGroup(key=key, by_rank=by_rank, shard_groups=_shard_groups(by_rank, manifests))
        for key, by_rank in found.items()
    ]


def _shard_groups(
    by_rank: Mapping[int, ParamGroupInfo], manifests: Mapping[int, RankManifest]
) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], None] = {}
    for rank, group in by_rank.items():
        ranks = next(
            (one.ranks for one in manifests[rank].process_groups if one.name == group.shard_group), [rank]
        )
        groups[tuple(ranks)] = None
    return tuple(groups)


def sharding_of_run(source: str, manifests: Mapping[int, RankManifest]) -> ShardingTable:
    """Return the sharding in the manifests.

    If tensor parallelism cut a parameter before FSDP, its part is known only with all ranks of a shard
    group: an incomplete parameter is left out, with a warning.
    """
    meshes: dict[ShardMesh, int] = {}
    parameters: list[ParameterLayout] = []
    unknown: list[str] = []
    for group in recorded_groups(manifests):
        index = meshes.setdefault(_mesh(group), len(meshes))
        for position, parameter in enumerate(group.first.parameters):
            size = _size(group, position, parameter)
            if size is None:
                unknown.append(parameter.fqn)
                continue
            parameters.append(_layout(group.first, parameter, size, index))
    world_size = max((manifest.world_size for manifest in manifests.values()), default=0)
    return ShardingTable(
        source=source,
        world_size=world_size,
        meshes=tuple(meshes),
        parameters=tuple(parameters),
        warnings=tuple(_unknown(unknown)),
    )


def _mesh(group: RecordedGroup) -> ShardMesh:
    info = group.first
    names = info.mesh.dim_names or [f"dim{axis}" for axis in range(len(info.mesh.shape))]
    sizes = [f"{name}={size}" for name, size in zip(names, info.mesh.shape, strict=False)]
    shards = len(group.shard_groups[0])
    even = [ranks for ranks in group.shard_groups if len(ranks) == shards]
    return ShardMesh(
        text=", ".join(sizes),
        shard_dim=names[-1] if names else "",
        ranks=tuple(tuple(sorted(ranks[shard] for ranks in even)) for shard in range(shards)),
        replicas=info.replicate_world_size,
    )


def _size(group: RecordedGroup, position: int, parameter: ParameterInfo) -> int | None:
    """Rows that FSDP cut."""
    dim = shard_dim(parameter)
    if parameter.tensor_parallel is None:
        return parameter.global_shape[dim]
    for ranks in group.shard_groups:
        words = [group.parameter(rank, position) for rank in ranks]
        held = [word.local_shape[dim] for word in words if word is not None]
        if len(held) == len(ranks):
            return sum(held)
    return None


def _layout(group: ParamGroupInfo, parameter: ParameterInfo, size: int, mesh: int) -> ParameterLayout:
    dim = shard_dim(parameter)
    shape = list(parameter.padded_local_shape)
    shape[dim] = size
    return ParameterLayout(
        root=group.root,
        group=group.fqn,
        fqn=parameter.fqn,
        global_shape=tuple(parameter.global_shape),
        shape=tuple(shape),
        dim=dim,
        dtype=parameter.dtype,
        reduce_dtype=group.reduce_dtype,
        gather_dtype=group.param_dtype or parameter.dtype,
        requires_grad=parameter.requires_grad,
        placements=_placements(group, parameter),
        mesh=mesh,
    )


def _placements(group: ParamGroupInfo, parameter: ParameterInfo) -> tuple[str, ...]:
    if parameter.tensor_parallel is not None:
        return tuple(_NEXT_DIMENSION.split(parameter.tensor_parallel))
    replicas = ("Replicate()",) if group.replicate_world_size > 1 else ()
    if group.shard_group is None and replicas:
        return replicas
    return (*replicas, f"Shard(dim={shard_dim(parameter)})")


def _unknown(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"left out: {names[0]}{more}: split by tensor parallelism, and ranks of its group have no manifest"
    ]


def shards_of_run(source: str, manifests: Mapping[int, RankManifest]) -> ShardingMap | None:
    """Return who holds which rows; None without a parameter group."""
    if not any(manifest.param_groups for manifest in manifests.values()):
        return None
    found = lay_out_shards(sharding_of_run(source, manifests))
    return found if found.parameters else None


def mesh_of_run(manifests: Mapping[int, RankManifest]) -> MeshMap | None:
    """Return the mesh of the lowest rank's first parameter group, if it holds all ranks of the world.

    None where it holds fewer, for ranks were split by a dimension that FSDP does not know, where dimensions
    have no names, and where hosts hold unequal numbers of ranks or not all of them are known.
    """
    first = next((one for _, one in sorted(manifests.items()) if one.param_groups), None)
    if first is None:
        return None
    mesh, hosts = first.param_groups[0].mesh, Counter(one.host for one in manifests.values())
    even = len(set(hosts.values())) == 1 and all(hosts)
    if len(mesh.dim_names or ()) != len(mesh.shape) or prod(mesh.shape) != first.world_size:
        return None
    if first.world_size < 2 or len(manifests) != first.world_size or not even:
        return None
    sizes = dict(zip(mesh.dim_names or (), mesh.shape, strict=True))
    found = map_mesh(sizes, gpus_per_node=next(iter(hosts.values())))
    carried = _carried(first.param_groups[0])
    dimensions = [replace(one, carries=carried.get(one.name, one.carries)) for one in found.dimensions]
    return replace(found, dimensions=dimensions)


def _carried(group: ParamGroupInfo) -> dict[str, str]:
    """The role of the dimensions of a group's mesh, whatever their names: by their process groups."""
    uses = {group.all_reduce_group: CARRIES["dp_replicate"], group.shard_group: CARRIES["dp_shard"]}
    dims = zip(group.mesh.dim_names or (), group.mesh.dim_groups, strict=False)
    return {name: uses[used] for name, used in dims if used in uses}
