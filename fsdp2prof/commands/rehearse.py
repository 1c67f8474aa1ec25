"""``fsdp2prof rehearse``: run a training command as one rank of a world that is not there."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.help import CLUSTER, Command
from fsdp2prof.commands.options import refuse_given
from fsdp2prof.commands.recording_options import default_run, ended, recording_options, run_directory_options
from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import RecordOptions, Rehearsal


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples=["fsdp2prof rehearse --world-size 512 -o runs/r512 -- torchrun --nproc-per-node 8 train.py"],
)
@CLUSTER.everyday("--world-size", type=click.IntRange(min=1), required=True, help="World size.")
@CLUSTER.everyday("--rank", type=click.IntRange(min=0), default=0, help="Rank of this process.")
@CLUSTER(
    "--local-world-size",
    type=click.IntRange(min=1),
    help="Ranks per node that the script sees; by default torchrun's --nproc-per-node, else 1.",
)
@CLUSTER(
    "--meta", is_flag=True, help="Run on tensors without data, for models that do not fit on this machine."
)
@run_directory_options
@recording_options(without=["ranks"])
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def rehearse(
    world_size: int,
    rank: int,
    local_world_size: int | None,
    meta: bool,
    output: Path | None,
    force: bool,
    quiet: bool,
    command: tuple[str, ...],
    options: RecordOptions,
) -> int:
    """Run CMD as one rank of a world of any size, alone on this machine, and record its memory and
    communication.

    CMD is python train.py, optionally with torchrun, which is left out. Collectives move nothing, so the
    numbers that the training computes and prints are meaningless, and so are the durations of collectives.
    The exit code is the command's own.
    """
    from fsdp2prof.recorder.launch.launcher import launch
    from fsdp2prof.recorder.rehearsal import as_one_process

    refuse_given("--ranks", "--verify", because="a rehearsal runs one rank, whose values are meaningless")
    if rank >= world_size:
        raise UsageError(f"--rank {rank}: a world of {world_size} has ranks 0 to {world_size - 1}")
    started, per_node = as_one_process(command)
    rehearsal = Rehearsal(
        world_size=world_size,
        rank=rank,
        local_world_size=min(local_world_size or per_node or 1, world_size),
        meta=meta,
    )
    path = output or default_run()
    outcome = launch(started, path, options, force=force, rehearsal=rehearsal)
    return ended(outcome, path, quiet=quiet, always=output is None)
