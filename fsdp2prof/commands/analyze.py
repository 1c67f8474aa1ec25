"""``fsdp2prof analyze trace|memory|run|hang|nccl``: read what a job left, analyse it, write the result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.gate import Gate, fail_on_option
from fsdp2prof.commands.help import Group, option
from fsdp2prof.commands.options import JobChoice, job_options, one_of, refuse_given
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.commands.paths import InputPath
from fsdp2prof.commands.trace_options import (
    cluster_option,
    cluster_options,
    refuse_without_traces,
    trace_options,
)
from fsdp2prof.commands.trace_views import view_options, write_view
from fsdp2prof.commands.view import VIEW_FLAGS, View, view_part_options

if TYPE_CHECKING:
    from fsdp2prof.workflows.analyze import TraceOptions

__all__ = ["analyze"]

_path = click.argument("path", type=InputPath())


@click.group(cls=Group)
def analyze() -> None:
    """Analyse a run directory, traces, memory snapshots or the dumps of a job that hangs."""


@analyze.command(
    short_help="Step breakdown, exposed communication by layer.",
    examples=["fsdp2prof analyze trace runs/first --layer 'layers.1*'"],
)
@_path
@job_options
@trace_options
@cluster_options
@view_options
@view_part_options()
@fail_on_option("trace", "exposed_frac>0.2")
@output_options(brief=True)
def trace(
    path: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    hta_view: str | None,
    diff: Path | None,
    view: View,
    gate: Gate,
    output: Output,
) -> None:
    """Show where the step goes, and which communication of which layer is exposed.

    PATH is a run directory, a Kineto trace, or a folder of traces (one a rank).
    """
    if hta_view is not None or diff is not None:
        write_view(path, hta_view, diff, choice=choice, steps=options["steps"], output=output)
        return
    with output.progress(f"analysing the traces of {path}"):
        from fsdp2prof.workflows.analyze import analyze_trace

        analysis = analyze_trace(choice.open(path), **options)
    output.render(view.of(analysis), source=path)
    gate.check(analysis)


@analyze.command(
    short_help="Peak memory by layer, phase and kind.", examples=["fsdp2prof analyze memory runs/first"]
)
@_path
@job_options
@option(
    "--diff",
    type=InputPath(),
    metavar="OTHER",
    help="Instead: what changed at the peak from the recording OTHER to this one, on the lowest rank.",
    group="Analysis",
    everyday=True,
)
@view_part_options(steps=False)
@cluster_option
@fail_on_option("memory", "peak_allocated_gib>70")
@output_options(brief=True)
def memory(
    path: Path,
    *,
    choice: JobChoice,
    diff: Path | None,
    view: View,
    cluster: str | None,
    gate: Gate,
    output: Output,
) -> None:
    """Show what fills the device at the peak, by layer, phase and kind of tensor.

    PATH is a run directory, a memory snapshot, or a folder of snapshots (one a rank).
    """
    if diff is not None:
        refuse_given("--cluster", "--fail-on", *VIEW_FLAGS, because="--diff compares two peaks")
        one_of(choice.ranks, "--diff", "rank")
        with output.progress(f"comparing {diff} with {path}"):
            from fsdp2prof.workflows.compare import compare_memory

            comparison = compare_memory(choice.open(diff), choice.open(path))
        output.render(comparison)
        return
    with output.progress(f"analysing the memory of {path}"):
        from fsdp2prof.workflows.analyze import analyze_memory

        analysis = analyze_memory(choice.open(path), cluster=cluster)
    output.render(view.of(analysis), source=path)
    gate.check(analysis)


@analyze.command(
    short_help="A whole run: what was run, trace, memory.",
    examples=[
        "fsdp2prof analyze run runs/first",
        "fsdp2prof analyze run runs/first --fail-on 'exposed_frac>0.2'",
    ],
)
@click.argument("run", type=InputPath())
@job_options
@trace_options
@view_part_options()
@cluster_options
@fail_on_option("run", "exposed_frac>0.2")
@output_options(brief=True)
def run(
    run: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    view: View,
    gate: Gate,
    output: Output,
) -> None:
    """Show what was run and how it ended, where its step goes and what fills its memory.

    RUN is the folder that `fsdp2prof record -o RUN` wrote, or one with traces and memory snapshots.
    """

    with output.progress(f"analysing {run}"):
        from fsdp2prof.workflows.analyze import analyze_run

        job = choice.open(run)
        refuse_without_traces(job)
        analysis = analyze_run(job, **options)
    output.render(view.of(analysis), source=run)
    gate.check(analysis)


@analyze.command(
    short_help="A job that hangs: who waits where, and for whom.",
    examples=["fsdp2prof analyze hang runs/first"],
)
@_path
@option(
    "--run",
    type=InputPath(),
    metavar="RUN",
    help="Run directory whose manifests name layers and mesh dimensions, if PATH is not one.",
    group="Input",
)
@output_options()
def hang(path: Path, *, run: Path | None, output: Output) -> None:
    """Show which collective blocks a job, which ranks have not issued it, and which issue something else.

    PATH is a Flight Recorder dump, a folder of them (one a rank), or a run directory that holds them.
    """
    with output.progress(f"analysing the dumps of {path}"):
        from fsdp2prof.workflows.hang import analyze_hang

        analysis = analyze_hang(path, run=run)
    output.render(analysis, source=path)


@analyze.command(
    short_help="Why a group is slow: what NCCL itself wrote.",
    examples=["fsdp2prof analyze nccl nccl.log --run runs/first"],
)
@_path
@option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Run directory whose manifests name layers and mesh dimensions, if PATH is not one.",
    group="Input",
)
@output_options()
def nccl(path: Path, *, run: Path | None, output: Output) -> None:
    """Show how fast NCCL's collectives were, without a trace, and why a group is slow, from NCCL's own log.

    PATH is a log of NCCL Inspector (JSON) or of NCCL_DEBUG=INFO, a folder of them, or a run directory.
    """
    with output.progress(f"analysing NCCL's files of {path}"):
        from fsdp2prof.workflows.nccl import analyze_nccl

        analysis = analyze_nccl(path, run=run)
    output.render(analysis, source=path)


@analyze.command(
    "try",
    short_help="What each setting gained that was tried in a running job.",
    examples=["fsdp2prof analyze try runs/tried"],
)
@_path
@output_options()
def tried(path: Path, *, output: Output) -> None:
    """What `fsdp2prof try` measured in RUN: each candidate's gain and interval, and the prediction."""
    with output.progress(f"reading {path}"):
        from fsdp2prof.workflows.trial import trial_of_run

        result = trial_of_run(path)
    output.render(result)
