"""``fsdp2prof trigger``: ask a running job for a recording."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.help import RUN, Command
from fsdp2prof.commands.messages import say
from fsdp2prof.run_directory import recording_folder


@click.command(cls=Command, examples=["fsdp2prof trigger runs/first"])
@click.argument("run", type=click.Path(path_type=Path))
@RUN(
    "--wait",
    type=click.FloatRange(min=0),
    default=30.0,
    help="Seconds to wait until the job says which steps it will record.",
)
def trigger(run: Path, wait: float) -> int:
    """Ask the job that `fsdp2prof record --on-demand -o RUN` runs for a recording: the same steps of every
    rank, a few steps from now.
    """
    from fsdp2prof.recorder.requests import ask_and_wait

    plan = ask_and_wait(run, wait)
    if plan is None:
        say(f"fsdp2prof: asked; no answer in {wait:g} s: a recording or a long step is running")
        return 1
    click.echo(f"{run / recording_folder(plan.number)}: every rank, from step {plan.step}")
    return 0
