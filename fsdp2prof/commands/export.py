"""``fsdp2prof export``: write a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fsdp2prof.commands.help import OUTPUT, Group
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.options import InputPath, JobChoice, job_options, refuse_given
from fsdp2prof.commands.output import Output, destination_options, refuse_existing
from fsdp2prof.commands.trace_options import cluster_options, refuse_without_traces, trace_options
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.units import format_bytes, plural
from fsdp2prof.workflows.exports.trackers import TRACKERS, Tracker, tracking
from fsdp2prof.workflows.job.urls import shown

if TYPE_CHECKING:
    from fsdp2prof.workflows.job.job_files import JobFiles
    from fsdp2prof.workflows.ranks.one_rank import TraceOptions

_RUN = click.argument("path", metavar="RUN", type=InputPath())


@click.group(cls=Group, short_help="Export a run: Perfetto, Parquet, CSV, OpenMetrics, Chakra.")
def export() -> None:
    """Write a run in the formats of other tools."""


@export.command(
    short_help="All ranks as one trace for ui.perfetto.dev.",
    examples=["fsdp2prof export perfetto runs/first -o merged.json.gz"],
)
@_RUN
@job_options
@trace_options
@destination_options("Write to this file: NAME.json.gz, or NAME.json.", required=True)
def perfetto(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    """Write all ranks on one clock, as one trace for ui.perfetto.dev (Trace Event Format).

    In addition to the recorded events: tracks of phases, layers, collectives, exposed communication and
    stalls, memory counters, findings as instants, and arrows between the ranks of a collective.
    """
    target = output.path
    assert target is not None
    if not target.name.endswith((".json.gz", ".json")):
        raise UsageError(f"{target}: a trace's name ends in .json.gz or .json")
    refuse_existing(target, output.force)
    with output.progress(f"exporting {path}"):
        from fsdp2prof.workflows.exports.perfetto import export_perfetto

        made = export_perfetto(choice.open(path), target, **options)
        output.publish()
    output.tell(
        f"wrote {target}: {plural(made.ranks, 'rank')}, {made.events:,} events, "
        f"{made.arrows:,} collectives joined over the ranks, {format_bytes(made.bytes)}"
    )


@export.command(
    short_help="Every table as a Parquet file.", examples=["fsdp2prof export parquet runs/first -o tables"]
)
@_RUN
@job_options
@trace_options
@cluster_options
@destination_options("Write the files into this folder.", required=True)
def parquet(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    """Write every table of the analysis as a Parquet file, raw values under the names of its columns.

    Needs pyarrow: pip install 'fsdp2prof[parquet]'.
    """
    _tables("parquet", path, choice, options, output)


@export.command(
    short_help="Every table as a CSV file.", examples=["fsdp2prof export csv runs/first -o tables"]
)
@_RUN
@job_options
@trace_options
@cluster_options
@destination_options("Write the files into this folder.", required=True)
def csv(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    """Write every table of the analysis as a CSV file, raw values under the names of its columns."""
    _tables("csv", path, choice, options, output)


def _tables(
    kind: Literal["csv", "parquet"], path: Path, choice: JobChoice, options: TraceOptions, output: Output
) -> None:
    from fsdp2prof.workflows.exports.chakra import check_folder, export_tables

    folder = output.path
    assert folder is not None
    check_folder(folder, kind, force=output.force)
    made = export_tables(_analysis(path, choice, options, output), folder, kind)
    output.publish()
    rows = sum(made.values())
    output.tell(f"wrote {plural(len(made), 'table')} of {rows:,} rows in all into {folder}")


@export.command(
    short_help="Chakra execution traces, for ASTRA-sim.",
    examples=["fsdp2prof export chakra runs/first -o traces"],
)
@_RUN
@job_options
@destination_options("Write the files into this folder.", required=True)
def chakra(path: Path, *, choice: JobChoice, output: Output) -> None:
    """Write every rank's recorded steps as a Chakra execution trace, for ASTRA-sim and other readers of
    the format.

    Contains operations, durations and dependencies: the host, streams, collectives with size and group.
    Needs protobuf: pip install 'fsdp2prof[chakra]'.
    """
    folder = output.path
    assert folder is not None
    if folder.exists() and not output.force:
        raise InputError(f"{folder}: exists already; choose another name or add -f")
    with output.progress(f"exporting {path}"):
        from fsdp2prof.workflows.exports.chakra import export_chakra

        made = export_chakra(choice.open(path), folder)
    output.tell(
        f"wrote {folder}: {plural(made.ranks, 'rank')}, {made.nodes:,} nodes, "
        f"{plural(made.groups, 'process group')} beside that of all ranks"
    )
    if made.as_time and not output.quiet:
        say(
            f"{plural(made.as_time, 'collective')} of a process group that neither trace nor manifest "
            "describes: written as a duration, not as communication"
        )


@export.command(
    short_help="Main numbers as OpenMetrics text.", examples=["fsdp2prof export metrics runs/first"]
)
@_RUN
@job_options
@trace_options
@cluster_options
@OUTPUT(
    "--log",
    "tracker",
    type=click.Choice(TRACKERS),
    help="Log the figures of the whole run to a tracker instead; tensorboard's folder is -o.",
)
@destination_options("Write to this file instead of stdout.")
def metrics(
    path: Path, *, choice: JobChoice, options: TraceOptions, tracker: Tracker | None, output: Output
) -> None:
    """Write the main numbers of a run as OpenMetrics text, for Prometheus and other readers of the format.

    Seconds, bytes and ratios; layers, phases, ranks and parts of the step are labels. A tracker gets no
    layers, and the largest value over ranks. The tracker's own environment variables set run, project and
    server: WANDB_*, MLFLOW_*.
    """
    if tracker is not None:
        _log(tracker, path, choice, options, output)
        return
    if output.path is not None:
        refuse_existing(output.path, output.force)
    result = _analysis(path, choice, options, output)
    from fsdp2prof.reporters.open_metrics import open_metrics

    output.write(open_metrics(result))


def _log(tracker: Tracker, path: Path, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    if tracker == "tensorboard" and output.path is None:
        raise UsageError("--log tensorboard writes into a folder: add -o FOLDER")
    if tracker != "tensorboard":
        refuse_given("--output", because=f"{tracker} takes the destination from its environment variables")
    result = _analysis(path, choice, options, output)
    from fsdp2prof.reporters.open_metrics import tracker_scalars

    scalars = tracker_scalars(result)
    with tracking(tracker, name=path.name, folder=output.path) as log:
        log(scalars)
        output.tell(f"logged {plural(len(scalars), 'number')} to {log.where}")


def _analysis(path: Path, choice: JobChoice, options: TraceOptions, output: Output) -> Any:
    with output.progress(f"analysing {path}"):
        from fsdp2prof.workflows.analyze import analyze_any

        return shown(analyze_any(_job(path, choice), **options))


def _job(path: Path, choice: JobChoice) -> JobFiles:
    job = choice.open(path)
    refuse_without_traces(job)
    return job
