"""``fsdp2prof whatif``: what a change to a recorded run would gain."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.options import JobChoice, job_options, numbers_option
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.commands.paths import InputPath
from fsdp2prof.commands.trace_options import cache_option

__all__ = ["whatif"]


@click.command(short_help="What a change to a recorded run would gain.")
@click.argument("path", metavar="RUN", type=InputPath())
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A change; several are made together: reshard=never|default|always, forward_prefetch=N, "
    "backward_prefetch=N, reduce_dtype=bfloat16, separate_reduce_scatter_group=yes, bandwidth=2x, "
    "compute=1.2x.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="WHAT",
    help="Something to leave out: host_syncs, straggler:RANK.",
)
@job_options
@numbers_option("--steps", "Traced steps to run again")
@cache_option
@output_options()
def whatif(
    path: Path,
    *,
    settings: tuple[str, ...],
    without: tuple[str, ...],
    choice: JobChoice,
    steps: frozenset[int] | None,
    cache: bool,
    output: Output,
) -> None:
    """Run a recorded run again with something changed: the new step, and what changes by layer.

    RUN is a run directory, a Kineto trace, or a folder of traces (one a rank). Without --set and --without
    every single change is tried, and ranked by what it gains.
    """
    with output.progress(f"running {path} again"):
        from fsdp2prof.workflows.whatif import what_if

        result = what_if(choice.open(path), settings=settings, without=without, steps=steps, cache=cache)
    output.render(result)
