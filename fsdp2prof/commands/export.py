"""``fsdp2prof export``: a run for the tools that people have already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fsdp2prof.commands.options import JobChoice, job_options
from fsdp2prof.commands.output import Output, destination_options, refuse_existing
from fsdp2prof.commands.paths import InputPath
from fsdp2prof.commands.trace_options import cluster_options, refuse_without_traces, trace_options
from fsdp2prof.errors import UsageError
from fsdp2prof.units import format_bytes, plural
from fsdp2prof.workflows.urls import shown

if TYPE_CHECKING:
    from fsdp2prof.workflows.analyze import TraceOptions

__all__ = ["export"]

_RUN = click.argument("path", metavar="RUN", type=InputPath())


@click.group(short_help="Write a run for other tools: Perfetto, Parquet, CSV, OpenMetrics.")
def export() -> None:
    """Write what is known of a run for other tools."""


@export.command(short_help="All ranks as one trace for ui.perfetto.dev.")
@_RUN
@job_options
@trace_options
@destination_options("Write to this file: NAME.json.gz, or NAME.json.", required=True)
def perfetto(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    """Write all ranks on one clock, as one trace for ui.perfetto.dev (Trace Event Format).

    Beside what was recorded: tracks of phases, layers, collectives, exposed communication and stalls, memory
    counters, findings as instants, and arrows between the ranks of a collective.
    """
    target = output.path
    assert target is not None
    if not target.name.endswith((".json.gz", ".json")):
        raise UsageError(f"{target}: a trace's name ends in .json.gz or .json")
    refuse_existing(target, output.force)
    with output.progress(f"exporting {path}"):
        from fsdp2prof.workflows.export_perfetto import export_perfetto

        made = export_perfetto(choice.open(path), target, **options)
        output.publish()
    output.tell(
        f"wrote {target}: {plural(made.ranks, 'rank')}, {made.events:,} events, "
        f"{made.arrows:,} collectives joined over the ranks, {format_bytes(made.bytes)}"
    )


@export.command(short_help="Every table as a Parquet file.")
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


@export.command(short_help="Every table as a CSV file.")
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
    from fsdp2prof.workflows.export_tables import check_folder, export_tables

    folder = output.path
    assert folder is not None
    check_folder(folder, kind, force=output.force)
    made = export_tables(_analysis(path, choice, options, output), folder, kind)
    output.publish()
    rows = sum(made.values())
    output.tell(f"wrote {plural(len(made), 'table')} of {rows:,} rows in all into {folder}")


@export.command(short_help="The main numbers as OpenMetrics text.")
@_RUN
@job_options
@trace_options
@cluster_options
@destination_options("Write to this file instead of stdout.")
def metrics(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output) -> None:
    """Write the main numbers of a run as OpenMetrics text, for Prometheus and what reads its format.

    Seconds, bytes and ratios; layers, phases, ranks and parts of the step are labels.
    """
    from fsdp2prof.reporters.open_metrics import open_metrics

    if output.path is not None:
        refuse_existing(output.path, output.force)
    output.write(open_metrics(_analysis(path, choice, options, output)))


def _analysis(path: Path, choice: JobChoice, options: TraceOptions, output: Output) -> Any:
    with output.progress(f"analysing {path}"):
        from fsdp2prof.workflows.analyze import analyze_any

        job = choice.open(path)
        refuse_without_traces(job)
        return shown(analyze_any(job, **options))
