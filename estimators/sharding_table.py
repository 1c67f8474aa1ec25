"""Sharding of a model that was never run, in the table that recorded runs also give."""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.sharding.groups import ParameterGroup, ShardedParameter, freeze, parameter_groups
from fsdp2prof.estimators.techniques.registry import check_parallelism, part_of
from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh


def shard_model(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec) -> ShardingTable:
    """Shard a model on paper; ranks are numbered with tp fastest, as ``init_device_mesh`` numbers them.

    Raises ``ModelError`` for a model, mesh or policy that cannot be built, and for pipeline stages.
    """
    if mesh.pp > 1:
        raise ModelError("mesh: a pipeline stage is sharded on its own: leave pp at 1")
    policy = replace(policy, seq_len=2 * mesh.cp * mesh.tp)  # of no matter here: the shortest that divides
    built = build_model(model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    check_parallelism(built, mesh, policy)
    before = {name: tuple(one.shape) for name, one in built.module.named_parameters()}
    built = part_of(built, mesh, policy)
    freeze(built, policy)
    whole = {name: tuple(one.shape) for name, one in built.module.named_parameters()} | before
    parameters = [
        _layout(group, parameter, whole[parameter.fqn], mesh)
        for group in parameter_groups(built, mesh, policy)
        for parameter in group.parameters
    ]
    return ShardingTable(
        source=model.source,
        world_size=mesh.world_size,
        meshes=(_mesh(mesh), *((_expert_mesh(mesh),) if mesh.ep > 1 else ())),
        parameters=tuple(parameters),
    )


def _mesh(mesh: MeshSpec) -> ShardMesh:
    ranks = tuple(
        tuple(
            (replica * mesh.fsdp_size + shard) * mesh.tp + tp
            for replica in range(mesh.dp_replicate)
            for tp in range(mesh.tp)
        )
        for shard in range(mesh.fsdp_size)
    )
    sizes = {"dp_replicate": mesh.dp_replicate, mesh.fsdp_dim: mesh.fsdp_size, "tp": mesh.tp}
    text = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == mesh.fsdp_dim)
    return ShardMesh(text=text, shard_dim=mesh.fsdp_dim, ranks=ranks, replicas=mesh.dp_replicate)


def _expert_mesh(mesh: MeshSpec) -> ShardMesh:
    """The ranks that FSDP shards experts over: shard -> ranks that hold it, of every part of the experts."""
    ranks = tuple(
        tuple(
            replica * mesh.fsdp_size * mesh.tp + shard * mesh.ep + part
            for replica in range(mesh.dp_replicate)
            for part in range(mesh.ep)
        )
        for shard in range(mesh.expert_fsdp_size)
    )
    sizes = {"dp_replicate": mesh.dp_replicate, "efsdp": mesh.expert_fsdp_size, "ep": mesh.ep}
    text = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "efsdp")
    return ShardMesh(text=text, shard_dim="efsdp", ranks=ranks, replicas=mesh.dp_replicate)


def _layout(
    group: ParameterGroup, one: ShardedParameter, whole: tuple[int, ...], mesh: MeshSpec
) -> ParameterLayout:
    return ParameterLayout(
        root=0,
        group=group.fqn,
        fqn=one.fqn,
        global_shape=whole,
        shape=one.shape,
        dim=one.dim,
        dtype=one.dtype,
        reduce_dtype=group.reduce_dtype,
        gather_dtype=one.gather_dtype,
        requires_grad=one.requires_grad,
        placements=_placements(one, whole, mesh),
        mesh=int(mesh.ep > 1 and one.is_expert),
    )


def _placements(one: ShardedParameter, whole: tuple[int, ...], mesh: MeshSpec) -> tuple[str, ...]:
    """Of FSDP's DTensor: replicas, shards, and the placements of tensor parallelism before it."""
    replicas = ("Replicate()",) if mesh.dp_replicate > 1 else ()
    if mesh.ep > 1 and one.is_expert:
        shard = f"_StridedShard(dim=0, sf={mesh.ep})" if one.dim == 0 else f"Shard(dim={one.dim})"
        return (*replicas, shard, "Shard(dim=0)")
    if mesh.tp == 1:
        return (*replicas, f"Shard(dim={one.dim})")
    cut = next((axis for axis, size in enumerate(whole) if one.shape[axis] != size), None)
    shard = f"_StridedShard(dim=0, sf={mesh.tp})" if cut == 0 else "Shard(dim=0)"
    return (*replicas, shard, "Replicate()" if cut is None else f"Shard(dim={cut})")
