"""``fsdp2prof report``: one offline HTML file of a run, of traces or of memory snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.help import OUTPUT, Command
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.options import InputPath, JobChoice, job_options
from fsdp2prof.commands.output import Output, output_options, refuse_existing
from fsdp2prof.commands.trace_options import cluster_options, refuse_without_traces, trace_options
from fsdp2prof.errors import UsageError
from fsdp2prof.vocabulary import printable
from fsdp2prof.workflows.job.urls import shown, url_of

if TYPE_CHECKING:
    from fsdp2prof.workflows.ranks.one_rank import TraceOptions

_NAME = "report.html"
_GENERATOR = b'<meta name="generator" content="fsdp2prof'
_HEAD = 4096


@click.command(cls=Command, examples=["fsdp2prof report runs/first --open"])
@click.argument("path", metavar="RUN", type=InputPath())
@job_options
@trace_options
@cluster_options
@OUTPUT.everyday("--open", "show", is_flag=True, help="Open the page in the browser.")
@output_options("html", beside=True)
def report(path: Path, *, choice: JobChoice, options: TraceOptions, output: Output, show: bool) -> None:
    """Write a run's report as one offline HTML file.

    RUN is a run directory; a trace, a memory snapshot or a folder of them gives a report of its part.
    Without -o the page is written beside its input (RUN/report.html), replacing an earlier one, and its
    path is printed.
    """
    if show and url_of(path if output.path is None else output.path) is not None:
        raise UsageError("--open would have no effect: the page is written to a URL")
    told = output.path is None
    output = _beside(path, output) if told else output

    with output.progress(f"analysing {path}"):
        from fsdp2prof.workflows.analyze import analyze_any

        job = choice.open(path)
        refuse_without_traces(job)
        page = output.rendered(analyze_any(job, **options), source=path)
    output.write(page)
    if told:
        click.echo(printable(shown(str(output.path))))
    if show and output.path is not None:
        import webbrowser

        try:
            webbrowser.get()
        except webbrowser.Error:
            say(f"no browser here: copy {shown(str(output.path))} to your machine")
        else:
            click.launch(output.path.absolute().as_uri())


def _beside(path: Path, output: Output) -> Output:
    """Choose the page's place; only an earlier report is overwritten unless ``-f`` is given."""
    place = path / _NAME if path.is_dir() else path.with_name(f"{path.name}.{_NAME}")
    force = output.force or _is_report(place)
    refuse_existing(place, force)
    return output._replace(path=place, force=force)


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _GENERATOR in file.read(_HEAD)
    except OSError:
        return False
