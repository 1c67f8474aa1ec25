"""How small models are sharded, written down by hand."""

from __future__ import annotations

from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh

__all__ = ["sharding_table"]


def _layout(fqn: str, rows: int) -> ParameterLayout:
    return ParameterLayout(
        root=0, group="", fqn=fqn, global_shape=(rows, 4), shape=(rows, 4), dim=0, dtype="float32",
        reduce_dtype=None, gather_dtype="float32", requires_grad=True, placements=("Shard(dim=0)",), mesh=0,
    )  # fmt: skip


def sharding_table(shards: int, **rows: int) -> ShardingTable:
    """Return matrices of so many rows, cut over some ranks; ``_`` in their names is a dot."""
    mesh = ShardMesh(
        text=f"dp={shards}", shard_dim="dp", ranks=tuple((rank,) for rank in range(shards)), replicas=1
    )
    parameters = tuple(_layout(name.replace("_", "."), size) for name, size in rows.items())
    return ShardingTable(source="x", world_size=shards, meshes=(mesh,), parameters=parameters, warnings=())
