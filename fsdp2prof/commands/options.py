"""Options that verbs share: where the result goes, in which format, and which ranks and steps are read."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fsdp2prof.commands.messages import say
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.files import replacing
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.vocabulary import printable

if TYPE_CHECKING:
    from fsdp2prof.workflows.job_files import JobFiles

__all__ = [
    "JobChoice",
    "Output",
    "job_options",
    "numbers_option",
    "one_of",
    "output_options",
    "refuse_given",
]

_EXTENSIONS = {renderer.extension: name for name, renderer in RENDERERS.items()} | {".htm": "html"}

_PIPED_WIDTH = 118
"""Columns of text that does not go to a terminal, unless COLUMNS says otherwise."""

_MIN_WIDTH, _MAX_WIDTH = 40, 200

_CLOSED_PIPE = 128 + 13
"""Exit code of a program that SIGPIPE ended."""

_FILE_OPTIONS = (
    click.option(
        "-o",
        "--output",
        "output_path",
        type=click.Path(path_type=Path),
        help="Write to this file instead of stdout.",
    ),
    click.option("-f", "--force", is_flag=True, help="Overwrite an existing output file."),
    click.option("-q", "--quiet", is_flag=True, help="No progress or messages on stderr."),
)

_DOCUMENT_OPTIONS = (
    click.option(
        "-v",
        "--verbose",
        "output_verbose",
        is_flag=True,
        help="Text with every rank, step, layer and setting, nothing folded.",
    ),
    click.option(
        "--table",
        "output_table",
        metavar="NAME",
        help="Which table CSV output holds, instead of the first; a wrong name lists them.",
    ),
)

_MOST_NUMBERS = 1 << 20
"""A million ranks or steps: more than any job has."""

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where a command's result goes."""

    path: Path | None
    """None is stdout."""
    format: str
    force: bool
    quiet: bool
    verbose: bool = False
    table: str | None = None
    """The table that CSV holds; None is the first one."""

    def render(self, result: Any, *, source: str | Path = "") -> None:
        """Write a result in the chosen format; ``source`` is what the user named, the title of a page."""
        options = RenderOptions(
            source=str(source),
            verbose=self.verbose,
            table=self.table,
            width=_text_width(self.to_terminal),
            colour=self.to_terminal and wants_colour(),
        )
        self.write(RENDERERS[self.format].render(build(result), options))

    @property
    def to_terminal(self) -> bool:
        """Whether a person reads the result on a terminal."""
        return self.path is None and sys.stdout.isatty()

    def write(self, content: str | bytes) -> None:
        """Write the result: to stdout, or to the file, which appears whole or not at all."""
        if self.path is None:
            _print(content)
            return
        _refuse_existing(self.path, self.force)
        try:
            with replacing(self.path) as temporary:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        if not self.quiet and sys.stderr.isatty():
            say(f"wrote {self.path}")

    @contextmanager
    def progress(self, doing: str) -> Iterator[None]:
        """Show what is being done on stderr, if a person is looking; one plain line where colour is off."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        if not wants_colour():
            say(doing)
            yield
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(printable(doing))):
            yield


def output_options(*formats: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add where and how the result is written (``-o``, ``--format``, ``-v``, ...) as one ``output``.

    Without ``formats`` it is every one there is. The first is the default unless ``--format`` or the
    extension of ``-o`` says otherwise. An existing file is refused before any work is done, unless ``-f`` is
    given.
    """
    rendered = not formats
    formats = formats or tuple(RENDERERS)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_output(
            *args: Any,
            output_path: Path | None,
            force: bool,
            quiet: bool,
            output_format: str | None = None,
            output_verbose: bool = False,
            output_table: str | None = None,
            **rest: Any,
        ) -> None:
            chosen = _choose_format(output_path, output_format, formats)
            if chosen != "csv":
                refuse_given("--table", because="it chooses the table of CSV output; add --format csv")
            if chosen != "text":
                refuse_given("--verbose", because=f"{chosen} output leaves nothing out")
            if output_path is None:
                refuse_given("--force", because="it overwrites the file of -o, which is not given")
            if output_path is not None:
                _refuse_existing(output_path, force)
            output = Output(
                path=output_path,
                format=chosen,
                force=force,
                quiet=quiet,
                verbose=output_verbose,
                table=output_table,
            )
            command(*args, output=output, **rest)

        decorated: Callable[..., None] = with_output
        options = [*_FILE_OPTIONS, *(_DOCUMENT_OPTIONS if rendered else ())]
        if len(formats) > 1:
            options.insert(1, _format_option(formats))
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def numbers_option(flag: str, what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option taking ``all`` (its default) or ``0,3,8-11``; the command gets None or a frozenset."""
    return click.option(
        flag, default="all", callback=_numbers, metavar="LIST", help=f"{what}: all, or for example 0,3,8-11."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChoice:
    """Which of a job's files a command reads."""

    ranks: frozenset[int] | None
    """None is all."""
    iteration: int | None
    """None is the newest."""

    def open(self, path: Path) -> JobFiles:
        """Find the chosen files at a path; raises ``InputError`` for what is not there."""
        from fsdp2prof.workflows.job_files import open_job

        return open_job(path, ranks=self.ranks, iteration=self.iteration)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what chooses among the files of a job; the command gets one ``choice``."""

    @wraps(command)
    def with_choice(*args: Any, ranks: frozenset[int] | None, iteration: int | None, **rest: Any) -> None:
        command(*args, choice=JobChoice(ranks=ranks, iteration=iteration), **rest)

    iteration = click.option(
        "--iteration",
        type=click.IntRange(min=0),
        metavar="N",
        help="Which profiling cycle of a folder that holds several (iteration_N); by default the newest.",
    )
    return numbers_option("--ranks", "Ranks to read")(iteration(with_choice))


def one_of(chosen: Collection[int] | None, flag: str, what: str) -> int | None:
    """Return the one rank or step that was chosen, None for none; several raise ``UsageError``."""
    if chosen is not None and len(chosen) != 1:
        raise UsageError(f"{flag} looks at one {what}: give --{what}s one number")
    return None if chosen is None else min(chosen)


def refuse_given(*flags: str, because: str) -> None:
    """Refuse options of the running command that have no effect here and yet were given.

    ``flags`` are their long names, of a switch the first; ``because`` says why they have none. Raises
    ``UsageError``.
    """
    context = click.get_current_context()
    given = [
        "/".join(names[-1] for names in (parameter.opts, parameter.secondary_opts) if names)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and not set(parameter.opts).isdisjoint(flags)
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
        if high - low >= _MOST_NUMBERS:
            raise click.BadParameter(f"{item!r} is more than {_MOST_NUMBERS} numbers")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def _format_option(formats: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    text = f"Output format; else the extension of -o decides, else {formats[0]}."
    return click.option("--format", "output_format", type=click.Choice(formats), help=text)


def wants_colour() -> bool:
    """Whether escape codes are welcome: not with ``NO_COLOR`` or on a terminal that knows none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _text_width(to_terminal: bool) -> int:
    """Columns of text: those of ``COLUMNS`` or of the terminal, within reason."""
    fallback = (_PIPED_WIDTH, 24)
    if to_terminal:
        width = shutil.get_terminal_size(fallback).columns
    else:
        asked = os.environ.get("COLUMNS", "")
        width = int(asked) if asked.isdecimal() and int(asked) else _PIPED_WIDTH
    return max(_MIN_WIDTH, min(width, _MAX_WIDTH))


def _choose_format(path: Path | None, chosen: str | None, formats: Sequence[str]) -> str:
    if chosen is None and path is not None:
        guessed = _EXTENSIONS.get(path.suffix.lower())
        if guessed is None:
            known = " ".join(RENDERERS[name].extension for name in formats)
            raise UsageError(f"{path}: no format known for {path.suffix!r}; use one of {known}, or --format")
        chosen = guessed
    chosen = chosen or formats[0]
    if chosen not in formats:
        raise UsageError(f"{path}: this command writes {', '.join(formats)}, not {chosen}")
    if RENDERERS[chosen].page and path is None:
        raise UsageError(f"a page needs a file to go to: add -o report{RENDERERS[chosen].extension}")
    return chosen


def _print(content: str | bytes) -> None:
    """Write to stdout; a reader that went away (``| head``) ends the command as a signal would, silently."""
    try:
        click.echo(content, nl=False)
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
