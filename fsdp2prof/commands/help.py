"""Output of ``--help``: an example, then everyday options under headings; ``--help-all`` lists all
options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

_Decorated = TypeVar("_Decorated", bound="Callable[..., Any] | click.Command")

MOST_OPTIONS = 15
"""Options that ``--help`` lists of one command."""


class Option(click.Option):
    """An option under a heading."""

    def __init__(
        self,
        declarations: Sequence[str],
        *,
        group: str = "",
        everyday: bool = False,
        former: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        if former:
            declarations = [*declarations, declarations[-1].lstrip("-").replace("-", "_")]
        attributes.setdefault("show_default", attributes.get("default") not in (None, ""))
        super().__init__([*former, *declarations], **attributes)
        self.group = group
        """The heading."""
        self.everyday = everyday
        """Whether ``--help`` lists it where a command has more than :data:`MOST_OPTIONS`."""
        self.former = frozenset(former)
        """Names that it had; accepted, not listed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return its names and its help, without the names that it had."""
        names = self.opts
        self.opts = [name for name in names if name not in self.former]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


class Heading(NamedTuple):
    """A heading of help; calling it adds an option below it, as ``click.option`` does."""

    title: str

    def __call__(self, *declarations: str, **attributes: Any) -> Callable[[_Decorated], _Decorated]:
        """Add an option that ``--help-all`` lists; attributes are those of :class:`Option`."""
        return click.option(*declarations, cls=Option, group=self.title, **attributes)

    def everyday(self, *declarations: str, **attributes: Any) -> Callable[[_Decorated], _Decorated]:
        """Add an option that ``--help`` lists, too."""
        return self(*declarations, everyday=True, **attributes)


ANALYSIS = Heading("Analysis")
BATCH = Heading("Batch")
CLUSTER = Heading("Cluster")
CONDITIONS = Heading("Conditions")
COST = Heading("Cost")
INPUT = Heading("Input")
MEASUREMENT = Heading("Measurement")
MESH = Heading("Mesh")
MODEL = Heading("Model")
OUTPUT = Heading("Output")
RUN = Heading("Run")
SEARCH = Heading("Search")
SHOWN_PART = Heading("Shown part")
SOFTWARE = Heading("Software")


def with_options(options: Iterable[Callable[[Any], Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    """Add several options to a command, in the order its help shows them."""
    for add in reversed([*options]):
        command = add(command)
    return command


def gathered(
    name: str, make: Callable[..., Any], options: Iterable[Callable[[Any], Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options to a command, which receives one value instead: the result of ``make`` for their values.

    ``make`` has an argument named after each option; one with a default may be missing.
    """
    names = [one for one in signature(make).parameters if one != "self"]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_value(*args: Any, **rest: Any) -> Any:
            values = {one: rest.pop(one) for one in names if one in rest}
            return command(*args, **{name: make(**values)}, **rest)

        return with_options(options, with_value)

    return decorate


class Command(click.Command):
    """A command whose help begins with examples and lists its options under headings."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.examples = examples
        if len(self.options) > MOST_OPTIONS:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_print_everything,
                    help=f"Show all {len(self.options)} options and exit.",
                )
            )

    @property
    def options(self) -> list[Option]:
        """The options that help lists, under their headings."""
        return [one for one in self.params if isinstance(one, Option) and not one.hidden]

    def listed(self, *, everything: bool) -> list[Option]:
        """Return the options that ``--help`` lists, or ``--help-all``."""
        everything = everything or len(self.options) <= MOST_OPTIONS
        return [one for one in self.options if everything or one.everyday]

    def get_help(self, ctx: click.Context) -> str:
        """Return the help; its lines break at spaces, never inside an option or a value."""
        return super().get_help(ctx).replace(_UNBROKEN, "-")

    def get_full_help(self, ctx: click.Context) -> str:
        """Return what ``--help-all`` prints."""
        ctx.meta[_EVERYTHING] = True
        return self.get_help(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description of the command, and examples."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; a heading has the position of its first option."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.listed(everything=ctx.meta.get(_EVERYTHING, False)):
            if record := one.get_help_record(ctx):
                groups.setdefault(one.group, []).append(record)
        for other in self.get_params(ctx):
            if (
                isinstance(other, click.Option)
                and not isinstance(other, Option)
                and (record := other.get_help_record(ctx))
            ):
                groups.setdefault("Help", []).append(record)
        for group, records in groups.items():
            with formatter.section(group or "Options"):
                formatter.write_dl([(option, text.replace("-", _UNBROKEN)) for option, text in records])


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where its name is left out before a path, or misspelt, say which there are."""
        if self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            close = get_close_matches(args[0], names, n=2) or [
                name for name in names if args[0].startswith(name)
            ]
            if close:
                raise click.UsageError(f"no command {args[0]!r}: did you mean {' or '.join(close)}?", ctx)
            if Path(args[0]).exists():
                said = f"no command before {args[0]}: {ctx.command_path} {'|'.join(names)}"
                raise click.UsageError(said, ctx)
        return super().resolve_command(ctx, args)


_UNBROKEN = "\u2011"
"""A hyphen at which no line ends."""
_EVERYTHING = "fsdp2prof.help_all"


def _print_everything(context: click.Context, _: click.Parameter, chosen: bool) -> None:
    if chosen:
        assert isinstance(context.command, Command)
        click.echo(context.command.get_full_help(context))
        context.exit()
