"""``fsdp2prof analyze trace|memory|run``: read what a run left, analyse it, print or write the result."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.gate import Gate, fail_on_option
from fsdp2prof.commands.options import (
    JobChoice,
    Output,
    job_options,
    one_of,
    output_options,
    refuse_given,
)
from fsdp2prof.commands.trace_options import refuse_without_traces, trace_options
from fsdp2prof.commands.trace_views import view_options, write_view
from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp2prof.results import MemoryAnalysis, RunAnalysis, TraceAnalysis
    from fsdp2prof.workflows.analyze import TraceOptions
    from fsdp2prof.workflows.job_files import JobFiles

__all__ = ["analyze"]

_path = click.argument("path", type=click.Path(path_type=Path))
_verbose = click.option("-v", "--verbose", is_flag=True, help="Every rank, step and layer, nothing folded.")


@click.group()
def analyze() -> None:
    """Analyse a run directory, traces or memory snapshots."""


@analyze.command(short_help="Step breakdown, exposed communication by layer.")
@_path
@job_options
@trace_options
@view_options
@fail_on_option("trace", "exposed_frac>0.2")
@output_options()
def trace(
    path: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    view: str | None,
    diff: Path | None,
    gate: Gate,
    output: Output,
) -> None:
    """Where the step goes, and which communication of which layer is exposed.

    PATH is a run directory, a Kineto trace, or a folder of traces (one a rank).
    """
    if view is not None or diff is not None:
        write_view(path, view, diff, choice=choice, steps=options["steps"], output=output)
        return
    with output.progress(f"analysing the traces of {path}"):
        from fsdp2prof.workflows.analyze import analyze_trace

        analysis = analyze_trace(choice.open(path), **options)
    output.render(analysis, source=path)
    gate.check(analysis)


@analyze.command(short_help="Peak memory by layer, phase and kind.")
@_path
@job_options
@click.option(
    "--diff",
    type=click.Path(path_type=Path),
    metavar="OTHER",
    help="Instead: what changed at the peak from the recording OTHER to this one, on the lowest rank.",
)
@fail_on_option("memory", "peak_allocated_gib>70")
@_verbose
@output_options("text", "json", "csv", "html")
@click.option(
    "--table",
    type=click.Choice(["peak", "layers"]),
    default="peak",
    show_default=True,
    help="Which table CSV output holds: what is alive at the peak, or each layer's own peak.",
)
def memory(
    path: Path,
    *,
    choice: JobChoice,
    diff: Path | None,
    gate: Gate,
    verbose: bool,
    table: str,
    output: Output,
) -> None:
    """What fills the device at the peak, by layer, phase and kind of tensor.

    PATH is a run directory, a memory snapshot, or a folder of snapshots (one a rank).
    """
    if diff is not None:
        refuse_given("--fail-on", "--table", because="--diff compares two peaks")
        one_of(choice.ranks, "--diff", "rank")
        before, after = (choice.open(one) for one in (diff, path))
        _memory_diff(before, after, verbose, output)
        return
    with output.progress(f"analysing the memory of {path}"):
        from fsdp2prof.workflows.analyze import analyze_memory

        analysis = analyze_memory(choice.open(path), cache=True)

    def text() -> RenderableType:
        from fsdp2prof.reporters.advice import memory_advice
        from fsdp2prof.reporters.terminal import memory_view

        return memory_view(analysis, advice=[*memory_advice(analysis), _hint(path)], every=verbose)

    def csv() -> str:
        from fsdp2prof.reporters.csvreport import render_memory

        return render_memory(analysis, table)

    _write(output, path, analysis, text=text, csv=csv)
    gate.check(analysis)


@analyze.command(short_help="A whole run: what was run, trace, memory.")
@click.argument("run", type=click.Path(path_type=Path))
@job_options
@trace_options
@fail_on_option("run", "exposed_frac>0.2")
@_verbose
@output_options("text", "json", "html")
def run(
    run: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    gate: Gate,
    verbose: bool,
    output: Output,
) -> None:
    """What was run and how it ended, then its traces and its memory.

    RUN is the folder that `fsdp2prof record -o RUN` wrote, or one with traces and memory snapshots.
    """
    with output.progress(f"analysing {run}"):
        from fsdp2prof.workflows.analyze import analyze_run

        job = choice.open(run)
        refuse_without_traces(job)
        analysis = analyze_run(job, **options)

    def text() -> RenderableType:
        from fsdp2prof.reporters.advice import memory_advice, trace_advice
        from fsdp2prof.reporters.terminal import run_view

        advice = trace_advice(analysis.trace) if analysis.trace else []
        advice += memory_advice(analysis.memory) if analysis.memory else []
        return run_view(analysis, advice=[*advice, _hint(run)], every=verbose)

    _write(output, run, analysis, text=text)
    gate.check(analysis)


def _memory_diff(before: JobFiles, after: JobFiles, every: bool, output: Output) -> None:
    if output.format == "html":
        raise UsageError("--diff has no HTML form: use text, json or csv")
    with output.progress(f"comparing {before.path} with {after.path}"):
        from fsdp2prof.workflows.compare import compare_memory

        comparison = compare_memory(before, after)
    if output.format == "json":
        from fsdp2prof.reporters import jsonreport

        output.write(jsonreport.render(comparison))
    elif output.format == "csv":
        from fsdp2prof.reporters.csvreport import render_comparison

        output.write(render_comparison(comparison))
    else:
        from fsdp2prof.reporters.comparison_grids import comparison_grids
        from fsdp2prof.reporters.terminal import grid_view, render, stack

        view = stack(*map(grid_view, comparison_grids(comparison, every=every)))
        output.write(render(view, to_terminal=output.to_terminal))


def _write(
    output: Output,
    path: Path,
    analysis: TraceAnalysis | MemoryAnalysis | RunAnalysis,
    *,
    text: Callable[[], RenderableType],
    csv: Callable[[], str] | None = None,
) -> None:
    if output.format == "json":
        from fsdp2prof.reporters import jsonreport

        output.write(jsonreport.render(analysis))
    elif output.format == "html":
        from fsdp2prof.reporters import html

        output.write(html.render(str(path), analysis))
    elif csv is not None and output.format == "csv":
        output.write(csv())
    else:
        from fsdp2prof.reporters.terminal import render

        output.write(render(text(), to_terminal=output.to_terminal))


def _hint(path: Path) -> str:
    return f"fsdp2prof report {shlex.quote(str(path))} -o report.html  shows all of this as charts."
