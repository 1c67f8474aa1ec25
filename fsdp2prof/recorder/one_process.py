"""A training command as one process: what a rehearsal starts instead of a launcher and its ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from fsdp2prof.errors import InputError, UsageError

_STARTS_SEVERAL = (
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
    "deepspeed",
    "horovodrun",
    "lightning",
    "fabric",
)
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def as_one_process(command: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the command without torchrun around it, and the ranks per node that torchrun was told.

    Raises ``UsageError`` for a launcher whose processes cannot be read from its command line, ``InputError``
    for a torchrun that is not there.
    """
    name = Path(command[0]).name
    if name == "torchrun":
        return _of_torchrun(_python_beside(command[0]), command[1:])
    module = _module_of_python(command)
    if module in _TORCHRUN_MODULES:
        at = command.index("-m")
        return _of_torchrun(command[:at], command[at + 2 :])
    if name in _STARTS_SEVERAL or module in ("accelerate.commands.launch", "deepspeed.launcher.runner"):
        raise UsageError(
            f"{name} starts processes itself, but a rehearsal runs one: give the command that it starts, "
            "-- python train.py"
        )
    return list(command), None


def _module_of_python(command: Sequence[str]) -> str | None:
    if not Path(command[0]).name.startswith("python") or "-m" not in command[:-1]:
        return None
    at = command.index("-m")
    before = command[1:at]
    return command[at + 1] if all(argument.startswith("-") for argument in before) else None


def _python_beside(torchrun: str) -> list[str]:
    """The interpreter of the environment that torchrun belongs to."""
    found = shutil.which(torchrun)
    if found is None:
        raise InputError(f"{torchrun}: command not found")
    python = Path(found).parent / "python"
    return [str(python) if python.exists() else "python"]


def _of_torchrun(python: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], int | None]:
    from torch.distributed.run import get_args_parser

    try:
        given = get_args_parser().parse_args(list(arguments))
    except SystemExit as error:
        raise UsageError("torchrun refuses these options (above): correct them") from error
    per_node = str(given.nproc_per_node)
    start = [] if given.no_python else [*python, "-m"] if given.module else list(python)
    script = [given.training_script, *given.training_script_args]
    return [*start, *script], int(per_node) if per_node.isdigit() else None
