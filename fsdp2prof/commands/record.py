"""``fsdp2prof record``: run a training command and record its FSDP2 ranks.

``fsdp2prof try``: run a training command, and try other FSDP2 settings between its steps.
"""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.help import RUN, Command
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.recording_options import default_run, ended, recording_options, run_directory_options
from fsdp2prof.errors import Fsdp2ProfError, UsageError
from fsdp2prof.manifest import RecordOptions, TrialOptions
from fsdp2prof.trial import parse_candidate, why_never_tried

_WIDTH = 100


@click.command(
    "try",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples=[
        "fsdp2prof try --set reshard=never --set forward_prefetch=2 -o runs/tried -- torchrun train.py",
    ],
)
@RUN.everyday(
    "--set",
    "texts",
    multiple=True,
    metavar="NAME=VALUE",
    help="A candidate: reshard=never|default|always, forward_prefetch=N, backward_prefetch=N, "
    "reduce_scatter_max_input_buffers=N, separate_reduce_scatter_group=yes, sync=last. "
    "[default: those of whatif]",
)
@RUN.everyday(
    "--best",
    type=click.IntRange(1, 16),
    default=3,
    help="Without --set: number of candidates to take from the changes with a predicted gain.",
)
@RUN.everyday(
    "--steps",
    type=click.IntRange(8),
    default=240,
    help="Maximum number of steps with alternating settings; fewer if the best is clear.",
)
@RUN.everyday("--seed", type=int, default=0, help="Seed of the order of the blocks.")
@RUN.everyday("--changes-results", is_flag=True, help="Allow candidates that change results: sync=last.")
@run_directory_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def try_(
    texts: tuple[str, ...],
    best: int,
    steps: int,
    seed: int,
    changes_results: bool,
    output: Path | None,
    force: bool,
    quiet: bool,
    command: tuple[str, ...],
) -> int:
    """Run CMD and measure other FSDP2 settings in it. Short blocks of steps alternate between the script's
    own settings and each candidate, on all ranks alike; then one step of each is recorded.

    Losses and parameters are those of a run without it, bit for bit (--changes-results excepted). The exit
    code and stdout are the command's own; the result is on stderr, and `analyze try RUN` prints it again.
    """
    from fsdp2prof.recorder.launch.launcher import launch

    trial = TrialOptions(
        candidates=candidates_of(texts, changes_results=changes_results),
        best=best,
        steps=steps,
        seed=seed,
        changes_results=changes_results,
    )
    path = output or default_run()
    told = None if quiet else (lambda line: say(f"fsdp2prof: {line}"))
    outcome = launch(list(command), path, RecordOptions(trial=trial), force=force, told=told)
    return ended(outcome, path, quiet=quiet, always=output is None, result=_say_result)


def candidates_of(texts: tuple[str, ...], *, changes_results: bool) -> list[str]:
    """Check candidates before anything starts. Raises ``UsageError`` for one that is never possible."""
    for text in texts:
        parse_candidate(text)
        if (reason := why_never_tried(text, changes_results=changes_results)) is not None:
            raise UsageError(f"{text}: {reason}")
    return list(dict.fromkeys(texts))


def _say_result(path: Path) -> None:
    from fsdp2prof.reporters.documents import build
    from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
    from fsdp2prof.workflows.trial import trial_of_run

    try:
        document = build(trial_of_run(path))
    except Fsdp2ProfError as error:
        say(f"fsdp2prof: {error}")
        return
    text = RENDERERS["text"].render(document, RenderOptions(source=str(path), width=_WIDTH))
    say(text.rstrip("\n") if isinstance(text, str) else text.decode().rstrip("\n"))


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples=["fsdp2prof record -o runs/first -- torchrun --nproc-per-node 8 train.py"],
)
@run_directory_options
@RUN.everyday(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    help="Rank of this node, if every node of a run records into the same run directory.",
)
@RUN(
    "--try",
    "candidates",
    multiple=True,
    metavar="NAME=VALUE",
    help="Try another FSDP2 setting between steps, as `fsdp2prof try --set` does; `best` lets whatif choose.",
)
@recording_options()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def record(
    output: Path | None,
    force: bool,
    quiet: bool,
    command: tuple[str, ...],
    node_rank: int,
    candidates: tuple[str, ...],
    options: RecordOptions,
) -> int:
    """Run CMD (torchrun, accelerate launch, srun, mpirun, python, ...) and record every rank that calls
    fully_shard, without an edit to the script.

    Where every node starts its own command (torchrun --nnodes 2 --node-rank 1), record each with the same
    output on a disk they share, and with --node-rank: node 0 writes run.json, node 1 run-node-00001.json.

    The exit code is the command's own, 128+n if signal n ended it.
    """
    from fsdp2prof.recorder.launch.launcher import launch

    if node_rank and output is None:
        raise UsageError("--node-rank needs -o: the run directory that all nodes share")
    if candidates:
        named = () if candidates == ("best",) else candidates
        options.trial = TrialOptions(candidates=candidates_of(named, changes_results=False))
    path = output or default_run()
    told = None if quiet else (lambda line: say(f"fsdp2prof: {line}"))
    outcome = launch(list(command), path, options, node_rank=node_rank, force=force, told=told)
    return ended(outcome, path, quiet=quiet, always=output is None)
