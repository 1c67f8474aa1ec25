"""``fsdp2prof analyze trace|memory|run|hang|nccl``: read a job's files, analyse them, write the result.

``analyze trace --critical-path`` and similar options analyse one rank's trace with HolisticTraceAnalysis.
``--layer``, ``--show-rank`` and ``--show-step`` filter the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp2prof.commands.help import ANALYSIS, INPUT, SHOWN_PART, Group, gathered, with_options
from fsdp2prof.commands.options import InputPath, JobChoice, job_options, numbers_option, one_of, refuse_given
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.commands.trace_options import (
    WHOLE_ANALYSIS,
    Gate,
    cluster_option,
    cluster_options,
    fail_on_option,
    refuse_without_traces,
    trace_options,
)
from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
    from fsdp2prof.analyzers.focus import Focused
    from fsdp2prof.workflows.ranks.one_rank import TraceOptions

VIEW_FLAGS = ("--layer", "--show-rank", "--show-step")
"""Long names of these options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Filter of a result that was analysed as a whole."""

    layers: list[str] | None
    ranks: list[int] | None
    steps: list[int] | None

    def of(self, result: Focused) -> Focused:
        """Return the part of a result; raises ``UsageError`` for a missing part."""
        if self.layers is None and self.ranks is None and self.steps is None:
            return result
        from fsdp2prof.analyzers.focus import focus_on
        from fsdp2prof.results.step import Focus

        focus = Focus(layers=self.layers, ranks=self.ranks, steps=self.steps)
        return focus_on(result, focus) if str(focus) else result


def view_part_options(*, steps: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--layer``, ``--show-rank`` and, with ``steps``, ``--show-step``; the command gets a ``view``."""

    def view(
        layer: Sequence[str], show_rank: frozenset[int] | None, show_step: frozenset[int] | None = None
    ) -> View:
        return View(layers=list(layer) or None, ranks=_listed(show_rank), steps=_listed(show_step))

    layers = "Show only layers whose name matches, for example 'layers.1?'. May be repeated."
    shown = partial(numbers_option, under=SHOWN_PART, everyday=True)
    options: list[Callable[[Any], Any]] = [
        SHOWN_PART.everyday("--layer", multiple=True, metavar="GLOB", help=layers),
        shown("--show-rank", "Show only these ranks; all are read and compared", former=["--rank"]),
        shown("--show-step", "Show only these steps; all are analysed", former=["--step"]),
    ]
    return gathered("view", view, options if steps else options[:-1])


def _listed(numbers: frozenset[int] | None) -> list[int] | None:
    return None if numbers is None else sorted(numbers)


_FLAGS = {
    "critical-path": "Instead: the longest chain of dependent work in a step.",
    "launch-statistics": "Instead: each launch with its kernel and the delay between.",
    "idle-causes": "Instead: idle time of every stream by cause.",
}

_LOOKS_AT_A_STEP = ("critical-path", "diff")


def view_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags; the command gets ``hta_view: str | None`` and ``diff: Path | None``."""
    text = "Instead: operators and kernels that changed from the trace OTHER to this one."
    options = [
        *(
            ANALYSIS(f"--{name}", "hta_view", flag_value=name, default=None, help=what)
            for name, what in _FLAGS.items()
        ),
        ANALYSIS.everyday("--diff", type=InputPath(), metavar="OTHER", help=text),
    ]
    return with_options(options, command)


def write_view(
    path: Path,
    view: str | None,
    diff: Path | None,
    *,
    choice: JobChoice,
    steps: Collection[int] | None,
    output: Output,
) -> None:
    """Write one view of one rank (by default the lowest) and step (by default the middle one).

    Raises ``UsageError`` for options that have no effect on it.
    """
    from fsdp2prof.workflows.analyze import diff_traces, view_trace

    if view is not None and diff is not None:
        raise UsageError(f"--{view} and --diff cannot be combined")
    name = view or "diff"
    reason = f"--{name} reads one rank's trace as it is"
    refuse_given(*WHOLE_ANALYSIS, *VIEW_FLAGS, "--fail-on", because=reason)
    if name not in _LOOKS_AT_A_STEP:
        refuse_given("--steps", because=f"--{name} covers the whole trace")
    one_of(choice.ranks, f"--{name}", "rank")
    step = one_of(steps, f"--{name}", "step")
    with output.progress(f"analysing the trace of {path}"):
        if diff is not None:
            output.render(diff_traces(choice.open(diff), choice.open(path), step=step))
        else:
            output.render(view_trace(choice.open(path), name, step=step))


_path = click.argument("path", type=InputPath())
_run_beside = INPUT(
    "--run",
    type=InputPath(),
    metavar="RUN",
    help="Run directory whose manifests name layers and mesh dimensions, if PATH is not one.",
)


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
@output_options()
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
@ANALYSIS.everyday(
    "--diff",
    type=InputPath(),
    metavar="OTHER",
    help="Instead: changes at the peak from the recording OTHER to this one, on the lowest rank.",
)
@view_part_options(steps=False)
@cluster_option
@fail_on_option("memory", "peak_allocated_gib>70")
@output_options()
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
    """Show the contents of device memory at the peak, by layer, phase and kind of tensor.

    PATH is a run directory, a memory snapshot, or a folder of snapshots (one per rank).
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
    short_help="Whole run: command, trace, memory.",
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
@output_options()
def run(
    run: Path,
    *,
    choice: JobChoice,
    options: TraceOptions,
    view: View,
    gate: Gate,
    output: Output,
) -> None:
    """Show the command and its end, the breakdown of the step and the contents of memory.

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
    short_help="Hung job: where each rank waits, and for which ranks.",
    examples=["fsdp2prof analyze hang runs/first"],
)
@_path
@_run_beside
@output_options()
def hang(path: Path, *, run: Path | None, output: Output) -> None:
    """Show which collective blocks a job, which ranks have not issued it, and which ranks issue a
    different one.

    PATH is a Flight Recorder dump, a log with lines of NCCL's watchdog, a folder of either (one per rank),
    or a run directory.
    """
    with output.progress(f"analysing the dumps of {path}"):
        from fsdp2prof.workflows.hang import analyze_hang

        analysis = analyze_hang(path, run=run)
    output.render(analysis, source=path)


@analyze.command(
    short_help="NCCL logs: speed of collectives, causes of slow groups.",
    examples=["fsdp2prof analyze nccl nccl.log --run runs/first"],
)
@_path
@_run_beside
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
    short_help="Gain of each setting tried in a running job.",
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
