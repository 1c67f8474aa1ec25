"""``fsdp2prof inspect mesh``: what a job is made of, looked up and worked out, nothing measured."""

from __future__ import annotations

from collections.abc import Mapping

import click

from fsdp2prof.commands.options import numbers_option
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import UsageError

__all__ = ["inspect"]

_MOST_RANKS = 1 << 20
"""As many as options may name."""


@click.group()
def inspect() -> None:
    """Look up where ranks stand and what the tool knows: meshes, models, hardware, categories."""


@inspect.command(short_help="Ranks, coordinates and groups of a mesh; which cross nodes.")
@click.argument("mesh")
@click.option(
    "--gpus-per-node", type=click.IntRange(1, _MOST_RANKS), default=8, show_default=True, metavar="N"
)
@numbers_option("--ranks", "Ranks to show, with their groups")
@click.option(
    "--at", "at", metavar="DIM=I,...", help="Show the ranks at these coordinates, for example dp_shard=3,tp=0."
)
@output_options()
def mesh(
    mesh: str, gpus_per_node: int, ranks: frozenset[int] | None, at: str | None, output: Output
) -> None:
    """Where every rank of a mesh stands, the groups of every dimension, and which of them cross nodes.

    MESH is for example dp_replicate=2,dp_shard=4,tp=2.
    """
    from dataclasses import asdict

    from fsdp2prof.analyzers.sharding.mesh_map import map_mesh
    from fsdp2prof.estimators.spec.mesh import MeshSpec

    spec = MeshSpec.parse(mesh)
    if spec.world_size > _MOST_RANKS:
        raise UsageError(f"mesh: {spec.world_size:,} ranks are more than {_MOST_RANKS:,}")
    coordinates = {} if at is None else _coordinates(at)
    output.render(map_mesh(asdict(spec), gpus_per_node=gpus_per_node, ranks=ranks, at=coordinates))


def _coordinates(text: str) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for item in text.split(","):
        name, _, index = (part.strip() for part in item.partition("="))
        if not index.isdecimal() or len(index) > len(str(_MOST_RANKS)) or name in found:
            raise UsageError(f"--at: {item.strip()!r} is not DIM=I; write for example dp_shard=3,tp=0")
        found[name] = int(index)
    return found
