"""``fsdp2prof whatif``: predict the gain of a change to a recorded run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from fsdp2prof.commands.help import ANALYSIS, CLUSTER, Command
from fsdp2prof.commands.options import (
    IN_A_NODE,
    InputPath,
    JobChoice,
    Place,
    job_options,
    numbers_option,
    place_options,
    refuse_given,
)
from fsdp2prof.commands.output import Output, output_options


@click.command(
    cls=Command,
    short_help="Predict the gain of a change to a recorded run.",
    examples=[
        "fsdp2prof whatif runs/first",
        "fsdp2prof whatif runs/first --set reshard=never --set bandwidth=2x",
    ],
)
@click.argument("path", metavar="RUN", type=InputPath())
@ANALYSIS.everyday(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A change; several are combined: reshard=never|default|always, sync=last, "
    "forward_prefetch=N, backward_prefetch=N, reduce_dtype=bfloat16, separate_reduce_scatter_group=yes, "
    "wrap=blocks, bandwidth=2x, compute=1.2x, mesh=dp_replicate=2,dp_shard=8.",
)
@ANALYSIS.everyday(
    "--without",
    multiple=True,
    metavar="WHAT",
    help="A cause of lost time to remove: host_syncs, data_loader, straggler:RANK (straggler:2,3).",
)
@place_options("The recorded accelerator, for another mesh (h100-sxm), or a file that describes it.")
@CLUSTER(
    "--measured",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="For another mesh: a CSV or YAML file of measured runs, each with model, mesh, options and step_ms, "
    "tokens_per_s_per_gpu or mfu. They correct the cluster's speeds.",
)
@job_options
@numbers_option("--steps", "Traced steps to replay")
@output_options()
def whatif(
    path: Path,
    *,
    settings: tuple[str, ...],
    without: tuple[str, ...],
    place: Place,
    measured: Path | None,
    choice: JobChoice,
    steps: frozenset[int] | None,
    output: Output,
) -> None:
    """Replay a recorded run with changes: the new step time, and the changes by layer.

    RUN is a run directory, a Kineto trace, or a folder of traces (one per rank). Without --set and
    --without, every single change is tried and ranked by its gain.
    """
    if not any(text.startswith("mesh=") for text in settings):
        because = "the cluster matters only for another mesh (--set mesh=...)"
        refuse_given("--hardware", *IN_A_NODE, "--measured", because=because)
    elif place.hardware is None:
        because = "without --hardware the run is assumed to be on CPUs"
        refuse_given(*IN_A_NODE, "--measured", because=because)
    with output.progress(f"replaying {path}"):
        from fsdp2prof.workflows.whatif import what_if

        cluster = None
        if place.hardware is not None:
            cluster = place.cluster()
        note = None
        if cluster is not None and measured is not None:
            from fsdp2prof.workflows.estimate import corrected

            cluster, note = corrected(cluster, measured)
        result = what_if(
            choice.open(path),
            settings=settings,
            without=without,
            cluster=cluster,
            steps=steps,
        )
        if note is not None:
            result = replace(result, warnings=[*result.warnings, note])
    output.render(result)
