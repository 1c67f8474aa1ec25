"""``fsdp2prof report``: one offline HTML file of a run, of traces or of memory snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.options import JobChoice, job_options
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.commands.trace_options import refuse_without_traces, trace_options

if TYPE_CHECKING:
    from fsdp2prof.workflows.analyze import TraceOptions

__all__ = ["report"]


@click.command()
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@job_options
@trace_options
@output_options("html")
def report(
    path: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    output: Output,
) -> None:
    """Write a run's report as one offline HTML file.

    RUN is a run directory; a trace, a memory snapshot or a folder of them gives the parts it has.
    """
    with output.progress(f"analysing {path}"):
        from fsdp2prof.workflows.analyze import analyze_any

        job = choice.open(path)
        refuse_without_traces(job)
        options["what_if"] = True
        analysis = analyze_any(job, **options)
    output.render(analysis, source=path)
