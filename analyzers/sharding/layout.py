"""From the sharding of parameters to the parts on each rank, the share of padding, and the cost of moving
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from fsdp2prof.results.sharding import (
    ParameterSharding,
    RankShare,
    Redistribution,
    ShardingMap,
    ShardPiece,
    ShardRanks,
)
from fsdp2prof.tables.sharding import ParameterLayout, ShardingTable, ShardMesh
from fsdp2prof.units import dtype_bytes, format_bytes, format_frac, plural


def chunk_rows(size: int, shards: int) -> int:
    """Rows of a full shard, to which the others are padded."""
    return -(-size // shards)


def rows_of_shard(size: int, shards: int, shard: int) -> tuple[int, int]:
    """First row and number of rows of one shard; an empty one begins at the end."""
    rows = chunk_rows(size, shards)
    first = min(shard * rows, size)
    return first, min(rows, size - first)


def lay_out_shards(table: ShardingTable) -> ShardingMap:
    """Say which rank holds which rows of which parameter."""
    parameters = [_parameter(one, table.meshes[one.mesh]) for one in table.parameters]
    ranks = _shares(table)
    return ShardingMap(
        verdict=_verdict(parameters, ranks),
        source=table.source,
        world_size=table.world_size,
        bytes=sum(one.bytes for one in parameters),
        padding_bytes=sum(one.padding_bytes for one in parameters),
        meshes=[_mesh(mesh) for mesh in table.meshes],
        parameters=parameters,
        ranks=ranks,
        redistributions=[
            one for index, mesh in enumerate(table.meshes) for one in _redistributions(index, mesh, table)
        ],
        warnings=list(table.warnings),
    )


def _item(dtype: str) -> int:
    """Bytes of an element; a dtype of unknown size counts as none."""
    return dtype_bytes(dtype) or 0


def _parameter(one: ParameterLayout, mesh: ShardMesh) -> ParameterSharding:
    shards, rows = mesh.shards, chunk_rows(one.size, mesh.shards)
    held = _held(one.size, shards)
    row_bytes = one.row_numel * _item(one.dtype)
    full = sum(count == rows for count in held) if rows else 0
    empty = held.count(0)
    return ParameterSharding(
        root=one.root,
        fqn=one.fqn,
        group=one.group,
        global_shape=list(one.global_shape),
        shape=list(one.shape),
        dtype=one.dtype,
        requires_grad=one.requires_grad,
        placements=list(one.placements),
        mesh=one.mesh,
        dim=one.dim,
        shards=shards,
        rows_per_shard=rows,
        full_shards=full,
        short_shards=shards - full - empty,
        empty_shards=empty,
        bytes=one.size * row_bytes,
        shard_bytes=rows * row_bytes,
        padding_bytes=(rows * shards - one.size) * row_bytes,
        pieces=list(_pieces(one.size, held)),
    )


@lru_cache(maxsize=1024)
def _held(size: int, shards: int) -> tuple[int, ...]:
    """Rows of every shard; layers repeat, and so do sizes."""
    return tuple(rows_of_shard(size, shards, shard)[1] for shard in range(shards))


def _pieces(size: int, held: Sequence[int]) -> Iterator[ShardPiece]:
    first, row = 0, 0
    for shard in range(1, len(held) + 1):
        if shard < len(held) and held[shard] == held[first]:
            continue
        yield ShardPiece(first_shard=first, last_shard=shard - 1, first_row=min(row, size), rows=held[first])
        row += held[first] * (shard - first)
        first = shard


def _mesh(mesh: ShardMesh) -> ShardRanks:
    return ShardRanks(
        mesh=mesh.text,
        shard_dim=mesh.shard_dim,
        shards=mesh.shards,
        replicas=mesh.replicas,
        ranks_of_shard=[list(ranks) for ranks in mesh.ranks],
    )


def _shares(table: ShardingTable) -> list[RankShare]:
    sums: dict[int, list[int]] = {}
    for index, mesh in enumerate(table.meshes):
        mine = [one for one in table.parameters if one.mesh == index]
        padded = sum(chunk_rows(one.size, mesh.shards) * one.row_numel * _item(one.dtype) for one in mine)
        by_size: dict[int, list[int]] = {}
        for one in mine:
            row_bytes = by_size.setdefault(one.size, [])
            row_bytes.append(one.row_numel * _item(one.dtype))
        alike = [(_held(size, mesh.shards), sum(found), len(found)) for size, found in by_size.items()]
        for shard, ranks in enumerate(mesh.ranks):
            held = sum(rows[shard] * row_bytes for rows, row_bytes, _ in alike)
            empty = sum(count for rows, _, count in alike if not rows[shard])
            for rank in ranks:
                share = sums.setdefault(rank, [0, 0, 0])
                for position, value in enumerate((held, padded, empty)):
                    share[position] += value
    return [
        RankShare(rank=rank, bytes=held, padded_bytes=padded, empty_parameters=empty)
        for rank, (held, padded, empty) in sorted(sums.items())
    ]


def _redistributions(index: int, mesh: ShardMesh, table: ShardingTable) -> list[Redistribution]:
    """Costs of DTensor's redistributions, all parameters of a mesh together; sources: the placements.

    Shard to Replicate is an all-gather of padded shards, Replicate to Shard a local cut, Shard to Shard of
    another dimension an all-to-all, Partial to Shard a reduce-scatter, Partial to Replicate an all-reduce.
    """
    mine = [one for one in table.parameters if one.mesh == index]
    n = mesh.shards
    if n == 1 or not mine:
        return []
    gathered = sum(_padded_numel(one, n) * _item(one.gather_dtype) for one in mine)
    whole = sum(prod(one.shape) * _item(one.dtype) for one in mine)
    padded = sum(_padded_numel(one, n) * _item(one.dtype) for one in mine)
    trained = [one for one in mine if one.requires_grad]
    reduced = sum(_padded_numel(one, n) * _item(one.reduce_dtype or one.gather_dtype) for one in trained)
    many = [one for one in mine if len(one.shape) > 1]
    turned = sum(prod(one.shape) * _item(one.dtype) for one in many)
    rows = [
        ("Shard", "Replicate", "all_gather", gathered, 1, gathered, "FSDP's unshard of all layers at once"),
        ("Shard", "Replicate", "all_gather", padded, 1, whole, "full_tensor() of every parameter"),
        (
            "Replicate",
            "Shard",
            None,
            0,
            1,
            padded // n,
            "each rank keeps its rows: loading a full state dict",
        ),
        ("Partial", "Shard", "reduce_scatter", reduced, 1, reduced // n, "FSDP's gradients"),
        ("Partial", "Replicate", "all_reduce", reduced, 2, reduced, "the same gradients, replicated (DDP)"),
        ("Shard(0)", "Shard(1)", "all_to_all", turned, 1, -(-turned // n), "sharding matrices by columns"),
    ]
    return [
        Redistribution(
            mesh=index,
            source=source,
            target=target,
            op=op,
            payload_bytes=payload,
            wire_bytes=_wire(op, payload, passes, n),
            result_bytes=result,
            meaning=meaning,
        )
        for source, target, op, payload, passes, result, meaning in rows
        if op is None or payload
    ]


def _wire(op: str | None, payload: int, passes: int, n: int) -> int:
    """Bytes that a rank sends: for an all-to-all, all except its own part of its own shard."""
    if op == "all_to_all":
        return payload * (n - 1) // (n * n)
    return passes * payload * (n - 1) // n


def _padded_numel(one: ParameterLayout, shards: int) -> int:
    return chunk_rows(one.size, shards) * shards * one.row_numel


def _verdict(parameters: Sequence[ParameterSharding], ranks: Sequence[RankShare]) -> list[str]:
    if not parameters:
        return ["No parameter is sharded."]
    whole, padding = sum(one.bytes for one in parameters), sum(one.padding_bytes for one in parameters)
    most, least = (pick(ranks, key=lambda one: one.bytes) for pick in (max, min))
    held = format_bytes(most.bytes)
    if least.bytes != most.bytes:
        held = f"{format_bytes(least.bytes)} to {held}, and allocates {format_bytes(most.padded_bytes)}"
    said = [f"{plural(len(parameters), 'parameter')}, {format_bytes(whole)}: a rank holds {held}."]
    uneven = [one for one in parameters if one.padding_bytes]
    if uneven:
        worst = max(uneven, key=lambda one: one.padding_bytes)
        said.append(
            f"{len(uneven):,} of them are not evenly divisible: {format_bytes(padding)} of padding "
            f"({format_frac(padding / (padding + whole))}), most of it in {worst.fqn}."
        )
    empty = sum(one.empty_shards > 0 for one in parameters)
    if empty:
        said.append(f"Some ranks hold no rows of {plural(empty, 'parameter')}.")
    return said
