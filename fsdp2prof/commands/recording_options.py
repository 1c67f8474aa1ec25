"""Recording options shared by the verbs that start a training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fsdp2prof.commands.help import RUN, Heading, with_options
from fsdp2prof.commands.messages import say
from fsdp2prof.manifest import RecordOptions

if TYPE_CHECKING:
    from fsdp2prof.recorder.launch.launcher import Outcome


def run_directory_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``-o``, ``-f`` and ``-q``: the run directory, and messages on stderr."""
    given = (
        RUN.everyday(
            "-o",
            "--output",
            type=click.Path(path_type=Path),
            help="Run directory; by default runs/ and the time.",
        ),
        RUN.everyday("-f", "--force", is_flag=True, help="Overwrite an existing run directory."),
        RUN("-q", "--quiet", is_flag=True, help="No messages on stderr."),
    )
    return with_options(given, command)


def default_run() -> Path:
    """Run directory of a run that was given none: ``runs/`` and the time."""
    return Path("runs", time.strftime("%Y%m%d-%H%M%S"))


def ended(
    outcome: Outcome, path: Path, *, quiet: bool, always: bool, result: Callable[[Path], None] | None = None
) -> int:
    """Print the messages of a finished run, its ``result``, and on a terminal the next command.

    Returns the command's own exit code, whatever fails here.
    """
    try:
        if not quiet:
            for message in outcome.info.messages:
                say(f"fsdp2prof: {message}")
            if sys.stderr.isatty() or always:
                say(f"fsdp2prof: {path} is {outcome.info.state}; see `fsdp2prof analyze run {path}`")
            if result is not None:
                result(path)
    except Exception as error:
        with suppress(Exception):
            say(f"fsdp2prof: {path}: its result cannot be shown ({type(error).__name__}: {error})")
    return outcome.exit_code


_HEADINGS = {
    "Steps": ("wait", "warmup", "active", "at_step", "every", "on_slow", "on_demand", "signal", "max_size"),
    "Content": ("memory", "memory_steps", "summary", "max_trace_size", "ranks", "shapes", "verify", "stacks"),
    "Every step": ("watch", "hang_after"),
}
_GROUPS = {name: heading for heading, names in _HEADINGS.items() for name in names}
_EVERYDAY = frozenset(
    (
        "active",
        "at_step",
        "every",
        "on_slow",
        "on_demand",
        "memory",
        "summary",
        "ranks",
        "stacks",
        "watch",
        "hang_after",
    )
)


def _option(field: msgspec.inspect.Field) -> Callable[[Any], Any]:
    """The command-line option of one field of ``RecordOptions``."""
    described = field.type
    assert isinstance(described, msgspec.inspect.Metadata)
    assert described.extra_json_schema is not None
    flag = f"--{field.name.replace('_', '-')}"
    attributes: dict[str, Any] = {
        "help": described.extra_json_schema["description"],
        "default": field.default,
        "everyday": field.name in _EVERYDAY,
    }
    add = Heading(_GROUPS[field.name])
    if isinstance(field.default, bool):
        return add(f"{flag}/{flag.replace('--', '--no-', 1)}", **attributes)
    return add(flag, type=_click_type(described.type), **attributes)


class _Factor(click.ParamType[float]):
    """``1.3x`` or ``1.3``."""

    name = "factor"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            return float(str(value).removesuffix("x"))
        except ValueError:
            self.fail(f"{value!r} is not a factor; write for example 1.3x", parameter, context)


def _click_type(kind: msgspec.inspect.Type) -> Any:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    if any(isinstance(one, msgspec.inspect.StrType) for one in kinds):
        return str
    return _Factor() if any(isinstance(one, msgspec.inspect.FloatType) for one in kinds) else int


def recording_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add an option for each field of ``RecordOptions``, but some; the command gets one ``options``."""
    described = msgspec.inspect.type_info(RecordOptions)
    assert isinstance(described, msgspec.inspect.StructType)
    added = [
        field
        for field in described.fields
        if field.name not in without and isinstance(field.type, msgspec.inspect.Metadata)
    ]

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def with_recording(**arguments: Any) -> int:
            chosen = {field.name: arguments.pop(field.name) for field in added}
            return command(options=RecordOptions(**chosen), **arguments)

        return with_options(map(_option, added), with_recording)

    return decorate
