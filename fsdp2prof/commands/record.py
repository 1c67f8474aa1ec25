"""``fsdp2prof record``: run a training command and record its FSDP2 ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
import msgspec

from fsdp2prof.commands.messages import say
from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import RecordOptions

__all__ = ["record"]


def _option(field: msgspec.inspect.Field) -> Callable[[Any], Any]:
    """The command-line option of one field of ``RecordOptions``."""
    described = field.type
    assert isinstance(described, msgspec.inspect.Metadata)
    assert described.extra_json_schema is not None
    flag = f"--{field.name.replace('_', '-')}"
    attributes: dict[str, Any] = {
        "help": described.extra_json_schema["description"],
        "default": field.default,
        "show_default": field.default is not None,
    }
    if isinstance(field.default, bool):
        return click.option(f"{flag}/{flag.replace('--', '--no-', 1)}", **attributes)
    return click.option(flag, type=str if isinstance(field.default, str) else int, **attributes)


def _recording_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add an option for each field of ``RecordOptions``; the command gets one ``options``."""
    names = RecordOptions.__struct_fields__

    @wraps(command)
    def with_options(**arguments: Any) -> int:
        chosen = {name: arguments.pop(name) for name in names}
        return command(options=RecordOptions(**chosen), **arguments)

    described = msgspec.inspect.type_info(RecordOptions)
    assert isinstance(described, msgspec.inspect.StructType)
    decorated: Callable[..., int] = with_options
    for field in reversed(described.fields):
        decorated = _option(field)(decorated)
    return decorated


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Run directory; by default runs/ and the time."
)
@click.option("-f", "--force", is_flag=True, help="Record anew into an existing run directory.")
@click.option("-q", "--quiet", is_flag=True, help="No messages on stderr.")
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which node this is, where every node of a run records into the same run directory.",
)
@_recording_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def record(
    output: Path | None,
    force: bool,
    quiet: bool,
    command: tuple[str, ...],
    node_rank: int,
    options: RecordOptions,
) -> int:
    """Run CMD (torchrun, accelerate launch, srun, mpirun, python, ...) and record every rank that calls
    fully_shard, without an edit to the script.

    Where every node starts its own command (torchrun --nnodes 2 --node-rank 1), record each with the same
    output on a disk they share, and with --node-rank: node 0 writes run.json, node 1 run-node-00001.json.

    The exit code is the command's own, 128+n if signal n ended it.
    """
    from fsdp2prof.recorder.launcher import launch

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
