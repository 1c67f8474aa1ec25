"""``fsdp2prof inspect``: look up meshes, shardings, checkpoints and catalogs, without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.help import CLUSTER, MESH, MODEL, Group, gathered
from fsdp2prof.commands.options import MODEL_OPTIONS, numbers_option
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
    from fsdp2prof.workflows.description import Described

_MOST_RANKS = 1 << 20
"""As many as options may name."""


@click.group(cls=Group)
def inspect() -> None:
    """Look up a mesh, the sharding of a model, a checkpoint, and built-in models and hardware."""


@inspect.command(
    short_help="Ranks, coordinates and groups of a mesh, and groups that cross nodes.",
    examples=["fsdp2prof inspect mesh dp_replicate=2,dp_shard=4,tp=2 --gpus-per-node 8"],
)
@click.argument("mesh")
@MESH("--gpus-per-node", type=click.IntRange(1, _MOST_RANKS), default=8, metavar="N")
@numbers_option("--ranks", "Ranks to show, with their groups")
@MESH(
    "--at",
    "at",
    metavar="DIM=I,...",
    help="Show the ranks at these coordinates, for example dp_shard=3,tp=0.",
)
@output_options()
def mesh(mesh: str, gpus_per_node: int, ranks: frozenset[int] | None, at: str | None, output: Output) -> None:
    """Show the coordinates of every rank of a mesh, the groups of every dimension, and which cross nodes.

    MESH is for example dp_replicate=2,dp_shard=4,tp=2; ep regroups the ranks of dp_shard x cp.
    """
    from fsdp2prof.analyzers.sharding.mesh_map import map_mesh
    from fsdp2prof.estimators.config.mesh import MeshSpec

    spec = MeshSpec.parse(mesh)
    coordinates = {} if at is None else _coordinates(at)
    output.render(
        map_mesh(spec.sizes(), ep=spec.ep, gpus_per_node=gpus_per_node, ranks=ranks, at=coordinates)
    )


def _coordinates(text: str) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for item in text.split(","):
        name, _, index = (part.strip() for part in item.partition("="))
        if not index.isdecimal() or len(index) > len(str(_MOST_RANKS)) or name in found:
            raise UsageError(f"--at: {item.strip()!r} is not DIM=I; write for example dp_shard=3,tp=0")
        found[name] = int(index)
    return found


def _described(
    model: str | None, layers: int | None, mesh: str | None, config: Path | None
) -> Described | None:
    from fsdp2prof.workflows.description import describe

    named = {"model": model, "layers": layers, "mesh": mesh}
    given = {name: value for name, value in named.items() if value is not None}
    return describe(config=config, given=given, policy={}) if given or config is not None else None


_model_options = gathered(
    "described",
    _described,
    (
        *MODEL_OPTIONS,
        CLUSTER.everyday("--mesh", help="For example dp_replicate=4,dp_shard=8; also tp, cp."),
        MODEL(
            "--config",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="Model, mesh and policy (wrap, dtypes) as a YAML or TOML file, as for estimate.",
        ),
    ),
)
"""Options that describe a model; the command gets ``described``, None without any of them."""


@inspect.command(
    short_help="Rows of each parameter on each rank.",
    examples=["fsdp2prof inspect sharding runs/first"],
)
@click.argument("run", type=click.Path(path_type=Path), required=False)
@_model_options
@output_options()
def sharding(run: Path | None, *, described: Described | None, output: Output) -> None:
    """Show the rows of each parameter on each rank, the padding, and the cost of redistributing.

    RUN is the folder that `fsdp2prof record -o RUN` wrote; or describe a model with --model and --mesh.
    """
    from fsdp2prof.workflows.inspect import inspect_run_sharding, inspect_sharding

    if (run is None) == (described is None):
        raise UsageError("give a recorded run, or a model with --model and --mesh; one of the two")
    if run is not None:
        output.render(inspect_run_sharding(run))
    elif described is not None:
        output.render(inspect_sharding(described))


@inspect.command(
    short_help="Contents of a distributed checkpoint, compared with a model.",
    examples=["fsdp2prof inspect checkpoint step-1000 --model llama3-8b"],
)
@click.argument("folder", type=click.Path(path_type=Path))
@_model_options
@output_options()
def checkpoint(folder: Path, *, described: Described | None, output: Output) -> None:
    """Tensors and files of a checkpoint by torch.distributed.checkpoint, beside those of a model.

    FOLDER holds .metadata, which is read without executing anything in it. No tensor is loaded.
    """
    from fsdp2prof.workflows.inspect import inspect_checkpoint

    output.render(inspect_checkpoint(folder, described))


@inspect.command(short_help="The built-in models.", examples=["fsdp2prof inspect models"])
@output_options()
def models(output: Output) -> None:
    """List the built-in models and their shapes."""
    from fsdp2prof.workflows.inspect import list_models

    output.render(list_models())


@inspect.command(
    short_help="Accelerators and networks, with their sources.", examples=["fsdp2prof inspect hardware"]
)
@output_options()
def hardware(output: Output) -> None:
    """Accelerators and networks that --hardware and --network know, each figure with its source."""
    from fsdp2prof.workflows.inspect import list_hardware

    output.render(list_hardware())


@inspect.command(
    short_help="Categories, phases, operations and causes in columns and JSON values.",
    examples=["fsdp2prof inspect categories"],
)
@output_options()
def categories(output: Output) -> None:
    """The words that columns and keys hold: memory categories, phases, operations, causes."""
    from fsdp2prof.workflows.inspect import list_categories

    output.render(list_categories())
