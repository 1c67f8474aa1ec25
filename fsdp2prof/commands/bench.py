"""``fsdp2prof bench``: measure links, devices and hosts instead of believing data sheets."""

from __future__ import annotations

import click

from fsdp2prof.commands.help import CLUSTER, MEASUREMENT, Command
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import UsageError


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    short_help="Measure collectives, matrix products, copies and host dispatch.",
    examples=["fsdp2prof bench -o cluster.json -- torchrun --nproc-per-node 8"],
)
@CLUSTER.everyday(
    "--mesh", metavar="DIM=N,...", help="Measure each dimension of this mesh (dp_replicate=2,dp_shard=4)."
)
@MEASUREMENT("--seconds", type=click.FloatRange(min=1), default=120, help="Approximate duration in seconds.")
@MEASUREMENT("--largest", default="1GiB", help="Payload of the largest collective.")
@MEASUREMENT(
    "--quick", is_flag=True, help="Small sizes only, to check in a few seconds that everything runs."
)
@output_options()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- LAUNCHER...")
def bench(
    command: tuple[str, ...],
    *,
    mesh: str | None,
    seconds: float,
    largest: str,
    quick: bool,
    output: Output,
) -> None:
    """Start ranks with LAUNCHER (torchrun --nproc-per-node 8) that measure the cluster.

    They measure collectives over sizes, matrix products, attention, copies, host dispatch, and matrix
    products beside a collective. A result written as JSON (-o cluster.json) is a file for `estimate step
    --hardware`.
    """
    from fsdp2prof.units import parse_bytes
    from fsdp2prof.workflows import bench as benches

    with output.progress("measuring"):
        result = benches.bench(
            command,
            mesh=_mesh(mesh),
            seconds=seconds,
            largest_bytes=parse_bytes(largest),
            quick=quick,
        )
    output.render(result)


def _mesh(text: str | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in text.split(",") if text else ():
        name, _, size = item.partition("=")
        if not name.strip() or not size.isdecimal() or not int(size):
            raise UsageError(f"--mesh {text}: write dimensions from the outermost, dp_replicate=2,dp_shard=4")
        sizes[name.strip()] = int(size)
    return sizes
