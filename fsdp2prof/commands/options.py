"""Options that verbs share: where the result goes, in which format, and which ranks and steps are read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.files import replacing

__all__ = ["Output", "numbers_option", "output_options", "refuse_given"]

_EXTENSIONS = {".txt": "text", ".json": "json", ".csv": "csv", ".html": "html", ".htm": "html"}

_CLOSED_PIPE = 128 + 13
"""Exit code of a program that SIGPIPE ended."""

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where a command's result goes."""

    path: Path | None
    """None is stdout."""
    format: str
    force: bool
    quiet: bool

    @property
    def to_terminal(self) -> bool:
        """Whether a person reads the result on a terminal."""
        return self.path is None and sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write the result: to stdout, or to the file, which appears whole or not at all."""
        if self.path is None:
            _print(text)
            return
        _refuse_existing(self.path, self.force)
        try:
            with replacing(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        if not self.quiet and sys.stderr.isatty():
            click.echo(f"wrote {self.path}", err=True)

    @contextmanager
    def progress(self, doing: str) -> Iterator[None]:
        """Show what is being done on stderr, if a person is looking."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(doing)):
            yield


def output_options(*formats: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``-o``, ``-f``, ``-q`` and, for several formats, ``--format``; the command gets one ``output``.

    The format is the first of ``formats`` unless ``--format`` or the extension of ``-o`` says otherwise. An
    existing file is refused before any work is done, unless ``-f`` is given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_output(
            *args: Any,
            output_path: Path | None,
            force: bool,
            quiet: bool,
            output_format: str | None = None,
            **rest: Any,
        ) -> None:
            chosen = _choose_format(output_path, output_format, formats)
            if output_path is not None:
                _refuse_existing(output_path, force)
            output = Output(path=output_path, format=chosen, force=force, quiet=quiet)
            command(*args, output=output, **rest)

        options = [
            click.option(
                "-o",
                "--output",
                "output_path",
                type=click.Path(path_type=Path),
                help="Write to this file instead of stdout.",
            ),
            click.option("-f", "--force", is_flag=True, help="Overwrite an existing output file."),
            click.option("-q", "--quiet", is_flag=True, help="No progress or messages on stderr."),
        ]
        if len(formats) > 1:
            text = f"Output format; else the extension of -o decides, else {formats[0]}."
            options.insert(
                1, click.option("--format", "output_format", type=click.Choice(formats), help=text)
            )
        decorated: Callable[..., None] = with_output
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def numbers_option(flag: str, what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option taking ``all`` (its default) or ``0,3,8-11``; the command gets None or a frozenset."""
    return click.option(
        flag, default="all", callback=_numbers, metavar="LIST", help=f"{what}: all, or for example 0,3,8-11."
    )


def refuse_given(*flags: str, because: str) -> None:
    """Refuse options of the running command that have no effect here and yet were given.

    ``flags`` are their long names, ``because`` says why they have none. Raises ``UsageError``.
    """
    context = click.get_current_context()
    given = [
        "/".join(named)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and (named := [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag in flags])
    ]
    if given:
        raise UsageError(f"{', '.join(given)} would have no effect: {because}")


def _numbers(_: click.Context, __: click.Parameter, value: str) -> frozenset[int] | None:
    if value == "all":
        return None
    chosen: set[int] = set()
    for item in value.split(","):
        match = _RANGE.match(item.strip())
        if match is None:
            raise click.BadParameter(
                f"{item!r} is not a number or a range; write all, or for example 0,3,8-11"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise click.BadParameter(f"{item!r} runs backwards")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def _choose_format(path: Path | None, chosen: str | None, formats: Sequence[str]) -> str:
    if chosen is None and path is not None:
        guessed = _EXTENSIONS.get(path.suffix.lower())
        if guessed is None:
            known = " ".join(f".{name}" for name in ("txt", "json", "csv", "html"))
            raise UsageError(f"{path}: no format known for {path.suffix!r}; use one of {known}, or --format")
        chosen = guessed
    chosen = chosen or formats[0]
    if chosen not in formats:
        raise UsageError(f"{path}: this command writes {', '.join(formats)}, not {chosen}")
    if chosen == "html" and path is None:
        raise UsageError("an HTML report needs a file to go to: add -o report.html")
    return chosen


def _print(text: str) -> None:
    """Write to stdout; a reader that went away (``| head``) ends the command as a signal would, silently."""
    try:
        click.echo(text, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(_CLOSED_PIPE) from None


def _refuse_existing(path: Path, force: bool) -> None:
    if path.is_dir():
        raise InputError(f"{path}: a folder; -o takes a file")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; add -f to overwrite it")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: its folder does not exist")
