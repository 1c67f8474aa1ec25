"""``fsdp2prof watch`` and ``trigger``: follow a running job step by step, and ask it for a recording."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import click

from fsdp2prof.commands.help import OUTPUT, RUN, SHOWN_PART, Command
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import RunDirectoryError, UsageError
from fsdp2prof.files import replacing
from fsdp2prof.results.watch import WatchedRun
from fsdp2prof.run_directory import recording_folder
from fsdp2prof.workflows.exports.trackers import TRACKERS, Log, Tracker, tracking

_STEP_METRIC = "fsdp2prof/watched_step"
_TENSORBOARD = "tensorboard"
"""Folder in a run."""


@click.command(cls=Command, examples=["fsdp2prof watch runs/first"])
@click.argument("run", type=click.Path(path_type=Path))
@SHOWN_PART(
    "--window",
    type=click.IntRange(min=1, max=100_000),
    default=50,
    help="Number of last steps for the medians.",
)
@SHOWN_PART(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    help="Tokens per step over all ranks: adds tokens per second.",
)
@SHOWN_PART(
    "--follow/--once",
    default=None,
    help="Refresh until the job ends, or show it once; by default refresh on a terminal.",
)
@SHOWN_PART("--interval", type=click.FloatRange(min=0.1), default=2.0, help="Seconds between views.")
@OUTPUT(
    "--openmetrics",
    "metrics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the numbers to a file as OpenMetrics text, for a node exporter.",
)
@OUTPUT(
    "--log",
    "tracker",
    type=click.Choice(TRACKERS),
    help="Log the numbers of each view to a tracker, by step; tensorboard logs go to RUN/tensorboard.",
)
@output_options()
def watch(
    run: Path,
    *,
    window: int,
    tokens_per_step: int | None,
    follow: bool | None,
    interval: float,
    metrics: Path | None,
    tracker: Tracker | None,
    output: Output,
) -> None:
    """Show the last steps, slow ranks and memory of a job started with `fsdp2prof record --watch -o RUN`."""
    from fsdp2prof.workflows.watch import watch_run

    if follow and output.path is not None:
        raise UsageError("--follow shows one view after another: leave out -o, or use --once")
    follows = output.to_terminal and output.format == "text" if follow is None else follow
    with ExitStack() as opened:
        log: Log | None = None
        while True:
            try:
                seen: WatchedRun | None = watch_run(run, window=window, tokens_per_step=tokens_per_step)
            except RunDirectoryError as error:
                if not follows or "no rank has completed a step yet" not in str(error):
                    raise
                seen = None
            if seen is not None:
                if tracker is not None and log is None:
                    log = opened.enter_context(_tracked(tracker, run))
                _show(seen, metrics, log, output, clear=follows and output.to_terminal)
            if not follows or (seen is not None and seen.state != "running"):
                return
            time.sleep(interval)


def _tracked(tracker: Tracker, run: Path) -> AbstractContextManager[Log]:
    name = run.absolute().name
    return tracking(tracker, name=name, folder=run / _TENSORBOARD, step_metric=_STEP_METRIC)


def _show(seen: WatchedRun, metrics: Path | None, log: Log | None, output: Output, *, clear: bool) -> None:
    if metrics is not None:
        from fsdp2prof.reporters.open_metrics import open_metrics

        with replacing(metrics) as temporary:
            temporary.write_text(open_metrics(seen))
    if log is not None:
        from fsdp2prof.reporters.open_metrics import tracker_scalars

        log(tracker_scalars(seen), seen.last_step)
    if clear:
        click.clear()
    output.render(seen)
    sys.stdout.flush()


@click.command(cls=Command, examples=["fsdp2prof trigger runs/first"])
@click.argument("run", type=click.Path(path_type=Path))
@RUN(
    "--wait",
    type=click.FloatRange(min=0),
    default=30.0,
    help="Seconds to wait for the job to announce the steps it will record.",
)
def trigger(run: Path, wait: float) -> int:
    """Ask the job that `fsdp2prof record --on-demand -o RUN` runs for a recording: the same steps of every
    rank, a few steps from now.
    """
    from fsdp2prof.recorder.requests import ask_and_wait

    plan = ask_and_wait(run, wait)
    if plan is None:
        say(f"fsdp2prof: requested; no answer within {wait:g} s: a recording or a long step is running")
        return 1
    click.echo(f"{run / recording_folder(plan.number)}: every rank, from step {plan.step}")
    return 0
