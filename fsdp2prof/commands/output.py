"""Where a result goes and how it looks there: ``-o``, ``--format``, ``-v``, ``--table``, ``--sort``, ...."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from fsdp2prof.commands.help import OUTPUT, gathered
from fsdp2prof.commands.messages import say, show
from fsdp2prof.commands.options import OutputPath, refuse_given
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.files import replacing, watched
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.vocabulary import printable
from fsdp2prof.workflows.job.urls import shown, url_of

_EXTENSIONS = {renderer.extension: name for name, renderer in RENDERERS.items()} | {".htm": "html"}

_PIPED_WIDTH = 118
"""Columns of text that does not go to a terminal, unless COLUMNS says otherwise."""

_MIN_WIDTH, _MAX_WIDTH = 40, 200

_SHORT = ("text", "md")
"""Formats that have a short form."""

_QUIET = "No progress or messages on stderr."

_EVERY_S = 10.0
_FRAME_S = 0.1
"""Seconds between progress lines without a terminal."""


class Output(NamedTuple):
    """Where a command's result goes."""

    path: Path | None
    """None is stdout."""
    format: str
    force: bool
    quiet: bool
    verbose: bool = False
    brief: bool = False
    """The short form of text and Markdown."""
    section: str | None = None
    """One section of text and Markdown; None is all."""
    table: str | None = None
    """The table that CSV holds; None is the first one."""
    sort: str | None = None
    """Column by which tables are sorted; None leaves them as they are."""
    top: int | None = None
    """Rows of every table; None leaves the number to the document."""

    def render(self, result: Any, *, source: str | Path = "") -> None:
        """Write a result in the chosen format; ``source`` is the user's name for the input, the title of a
        page."""
        self.write(self.rendered(result, source=source))

    def rendered(self, result: Any, *, source: str | Path = "") -> str | bytes:
        """Return a result in the chosen format; ``source`` as for :meth:`render`.

        Raises ``UsageError`` for options that the format cannot serve.
        """
        from fsdp2prof.reporters.documents import build

        options = RenderOptions(
            source=shown(str(source)),
            verbose=self.verbose,
            brief=self.brief,
            section=self.section,
            table=self.table,
            width=_text_width(self.to_terminal),
            colour=self.to_terminal and _wants_colour(),
        )
        document = build(shown(result))
        if self.sort is not None or self.top is not None:
            from fsdp2prof.reporters.arrange import arranged

            document = arranged(document, self.sort, self.top)
        return RENDERERS[self.format].render(document, options)

    @property
    def to_terminal(self) -> bool:
        """Whether the output goes to a terminal."""
        return self.path is None and sys.stdout.isatty()

    def write(self, content: str | bytes) -> None:
        """Write the result to stdout, or to the file, which appears whole or not at all."""
        if self.path is None:
            show(content if isinstance(content, str) else content.decode())
            return
        refuse_existing(self.path, self.force)
        try:
            with replacing(self.path) as temporary:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        self.publish()
        self.tell(f"wrote {self.path}")

    def publish(self) -> None:
        """Upload the output if ``-o`` is a URL; do nothing for a path."""
        if self.path is not None and url_of(self.path) is not None:
            from fsdp2prof.workflows.job.remote import publish

            publish(self.path)

    def tell(self, text: str) -> None:
        """Report on stderr, if it is a terminal."""
        if not self.quiet and sys.stderr.isatty():
            say(text)

    @contextmanager
    def progress(self, doing: str) -> Iterator[Callable[[str], None]]:
        """Show activity and progress on stderr.

        Plain lines where colour is off; without a terminal a line every ten seconds. Call the function that
        it gives with the next thing that is done.
        """
        if self.quiet:
            yield lambda _: None
            return
        if not sys.stderr.isatty():
            with _lines(doing) as tell:
                yield tell
            return
        if not _wants_colour():
            say(doing)
            yield say
            return
        with _bar(doing) as tell:
            yield tell


@contextmanager
def _lines(doing: str) -> Iterator[Callable[[str], None]]:
    """Report activity, progress and elapsed time every ten seconds.

    Work that takes less says nothing.
    """
    from time import monotonic

    from fsdp2prof.worker_processes import repeated

    now, far, began = [doing], [""], monotonic()

    def came(count: int, of: int) -> None:
        far[0] = f", {count} of {of}"

    def tell() -> None:
        say(f"{now[0]}{far[0]} ({monotonic() - began:.0f} s)")

    with repeated(tell, _EVERY_S), watched(came):
        yield lambda text: now.__setitem__(0, text)


@contextmanager
def _bar(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner, with a bar once the work reports progress."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from fsdp2prof.worker_processes import repeated

    columns = SpinnerColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(escape(printable(shown(doing))), total=None)

        def came(done: int, of: int) -> None:
            if len(progress.columns) == len(columns):
                progress.columns = (*columns, BarColumn(), MofNCompleteColumn())
            progress.update(task, completed=done, total=of)

        with repeated(progress.refresh, _FRAME_S), watched(came):
            yield lambda text: progress.update(task, description=escape(printable(shown(text))))


def output_options(
    *formats: str, beside: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add where and how the result is written (``-o``, ``--format``, ``-v``, ...) as one ``output``.

    Without ``formats`` it is every one there is. The first is the default unless ``--format`` or the
    extension of ``-o`` says otherwise. An existing file is refused before any work is done, unless ``-f`` is
    given. ``beside``: without ``-o`` the command finds a place beside its input. Text and Markdown are short
    unless ``--full``, ``-v`` or ``--section`` is given.
    """
    formats = formats or tuple(RENDERERS)

    def output(
        output_path: Path | None,
        force: bool,
        quiet: bool,
        output_format: str | None = None,
        output_verbose: bool = False,
        output_full: bool = False,
        output_section: str | None = None,
        output_table: str | None = None,
        output_sort: str | None = None,
        output_top: int | None = None,
    ) -> Output:
        chosen = _choose_format(output_path, output_format, formats, beside=beside)
        if chosen != "csv":
            refuse_given("--table", because="it selects the table of CSV output; add --format csv")
        if chosen != "text":
            refuse_given("--verbose", because=f"{chosen} output leaves nothing out")
        if chosen not in _SHORT:
            refuse_given("--full", "--section", because=f"{chosen} output holds everything")
        if output_section is not None:
            refuse_given("--full", because="--section prints one part")
        if chosen == "json":
            refuse_given("--sort", "--top", because="json output holds every row, in its own order")
        if output_path is not None:
            refuse_existing(output_path, force)
        elif not beside:
            refuse_given("--force", because="it overwrites the file of -o, which is not given")
        return Output(
            path=output_path,
            format=chosen,
            force=force,
            quiet=quiet,
            verbose=output_verbose,
            brief=not (output_full or output_verbose),
            section=output_section,
            table=output_table,
            sort=output_sort,
            top=output_top,
        )

    return gathered("output", output, _options(formats, beside=beside))


def destination_options(what: str, *, required: bool = False) -> Callable[..., Callable[..., None]]:
    """Add ``-o``, ``-f`` and ``-q`` to a command with its own output format; it gets one ``output``.

    ``what`` is the help of ``-o``. An existing file is not refused here, because the command may write a
    folder.
    """

    def output(output_path: Path | None, force: bool, quiet: bool) -> Output:
        if output_path is None:
            refuse_given("--force", because="it overwrites the file of -o, which is not given")
        elif not force:
            _refuse_existing_url(output_path)
        return Output(path=output_path, format="", force=force, quiet=quiet)

    path = OutputPath()
    options = (
        OUTPUT.everyday("-o", "--output", "output_path", type=path, required=required, help=what),
        OUTPUT("-f", "--force", is_flag=True, help="Overwrite an existing file."),
        OUTPUT("-q", "--quiet", is_flag=True, help=_QUIET),
    )
    return gathered("output", output, options)


def _options(formats: Sequence[str], *, beside: bool) -> list[Callable[[Any], Any]]:
    """Return the options of a command that writes these formats, in the order its help shows them."""
    path = OutputPath()
    where = "Write to this file" + ("; by default one beside RUN." if beside else " instead of stdout.")
    options = [OUTPUT.everyday("-o", "--output", "output_path", type=path, help=where)]
    if len(formats) > 1:
        text = f"Output format; by default that of the extension of -o, otherwise {formats[0]}."
        options.append(OUTPUT.everyday("--format", "output_format", type=click.Choice(formats), help=text))
    if "text" in formats:
        text = "Show every rank, step, layer and setting; fold nothing."
        options.append(OUTPUT("-v", "--verbose", "output_verbose", is_flag=True, help=text))
        text = "Print every section of the text or Markdown, instead of one screen."
        options.append(OUTPUT("--full", "output_full", is_flag=True, help=text))
        text = "Print one section of the text or Markdown; a wrong name lists them."
        options.append(OUTPUT("--section", "output_section", metavar="NAME", help=text))
    if "text" in formats or "csv" in formats:
        text = "Sort tables that have this column by it: exposed_ns, layer:asc, ...; a wrong name lists them."
        options.append(OUTPUT("--sort", "output_sort", metavar="COLUMN", help=text))
        rows = click.IntRange(min=1)
        options.append(OUTPUT("--top", "output_top", type=rows, metavar="N", help="Rows of a table."))
    if "csv" in formats:
        text = "Table to write as CSV, instead of the first; a wrong name lists them."
        options.append(OUTPUT("--table", "output_table", metavar="NAME", help=text))
    return [
        *options,
        OUTPUT("-f", "--force", is_flag=True, help="Overwrite an existing output file."),
        OUTPUT("-q", "--quiet", is_flag=True, help=_QUIET),
    ]


def _wants_colour() -> bool:
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


def _choose_format(path: Path | None, chosen: str | None, formats: Sequence[str], *, beside: bool) -> str:
    if chosen is None and path is not None:
        guessed = _EXTENSIONS.get(path.suffix.lower())
        if guessed is None:
            known = " ".join(RENDERERS[name].extension for name in formats)
            raise UsageError(f"{path}: no format known for {path.suffix!r}; use one of {known}, or --format")
        chosen = guessed
    chosen = chosen or formats[0]
    if chosen not in formats:
        raise UsageError(f"{path}: this command writes {', '.join(formats)}, not {chosen}")
    if RENDERERS[chosen].page and path is None and not beside:
        raise UsageError(f"a page is written to a file: add -o report{RENDERERS[chosen].extension}")
    return chosen


def refuse_existing(path: Path, force: bool) -> None:
    """Raise ``InputError`` for a file that is not to be written: it exists, or its folder does not."""
    if path.is_dir():
        raise InputError(f"{path}: a folder; -o takes a file")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; add -f to overwrite it")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: its folder does not exist")
    if not force:
        _refuse_existing_url(path)


def _refuse_existing_url(path: Path) -> None:
    if url_of(path) is not None:
        from fsdp2prof.workflows.job.remote import refuse_existing_url

        refuse_existing_url(path)
