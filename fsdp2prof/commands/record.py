"""``fsdp2prof record``: run a training command and record its FSDP2 ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from fsdp2prof.commands.messages import say
from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import RecordOptions

__all__ = ["record"]

_DEFAULTS = RecordOptions()


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Run directory; by default runs/ and the time."
)
@click.option("-f", "--force", is_flag=True, help="Record anew into an existing run directory.")
@click.option("-q", "--quiet", is_flag=True, help="No messages on stderr.")
@click.option("--wait", default=_DEFAULTS.wait, show_default=True, help="Steps before the warm-up.")
@click.option("--warmup", default=_DEFAULTS.warmup, show_default=True, help="Steps the profiler warms up.")
@click.option("--active", default=_DEFAULTS.active, show_default=True, help="Steps to trace.")
@click.option("--start-step", type=int, help="First step to trace, counted from 0; overrides --wait.")
@click.option(
    "--memory/--no-memory",
    default=_DEFAULTS.memory,
    show_default=True,
    help="Record allocations, on steps of their own after the traced ones.",
)
@click.option("--memory-steps", default=_DEFAULTS.memory_steps, show_default=True, help="How many of them.")
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which node this is, where every node of a run records into the same run directory.",
)
@click.option("--ranks", default=_DEFAULTS.ranks, show_default=True, help="all, a list as 0,3 or sample:K.")
@click.option(
    "--shapes/--no-shapes",
    default=_DEFAULTS.shapes,
    show_default=True,
    help="Record the shapes of operators' inputs; gloo's payload bytes come from them.",
)
@click.option("--stacks", is_flag=True, help="Record Python stacks; slows the recorded steps.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def record(
    output: Path | None,
    force: bool,
    quiet: bool,
    command: tuple[str, ...],
    wait: int,
    warmup: int,
    active: int,
    start_step: int | None,
    memory: bool,
    memory_steps: int,
    node_rank: int,
    ranks: str,
    shapes: bool,
    stacks: bool,
) -> int:
    """Run CMD (torchrun, accelerate launch, srun, mpirun, python, ...) and record every rank that calls
    fully_shard, without an edit to the script.

    Where every node starts its own command (torchrun --nnodes 2 --node-rank 1), record each with the same
    output on a disk they share, and with --node-rank: node 0 writes run.json, node 1 run-node-00001.json.

    The exit code is the command's own, 128+n if signal n ended it.
    """
    from fsdp2prof.recorder.launcher import launch

    options = RecordOptions(
        wait=wait,
        warmup=warmup,
        active=active,
        memory_steps=memory_steps,
        start_step=start_step,
        ranks=ranks,
        shapes=shapes,
        stacks=stacks,
        memory=memory,
    )
    if node_rank and output is None:
        raise UsageError("--node-rank needs -o: the run directory that all nodes share")
    path = output or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    outcome = launch(list(command), path, options, node_rank=node_rank, force=force)
    if not quiet:
        for message in outcome.info.messages:
            say(f"fsdp2prof: {message}")
        if sys.stderr.isatty() or output is None:
            say(f"fsdp2prof: {path} is {outcome.info.state}; see `fsdp2prof analyze run {path}`")
    return outcome.exit_code
