"""The only path to stdout and stderr: file and trace names in messages must stay text."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from fsdp2prof.vocabulary import printable
from fsdp2prof.workflows.job.urls import shown

_CLOSED_PIPE = 128 + 13
"""Exit code of a program that SIGPIPE ended."""
_LONGEST = 4000
"""Characters of a line: a command line may have a megabyte."""


def open_streams() -> None:
    """Redirect streams that the caller closed to the null device, because the next opened file would take
    their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # open to the end


def say(text: str) -> None:
    """Write lines to stderr, their control characters made visible, copies of URLs under their URLs.

    A stderr that takes no more does not change how the command ends.
    """
    lines = [printable(line) for line in shown(text).split("\n")]
    short = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..." for line in lines]
    try:
        click.echo("\n".join(short), err=True)
    except OSError:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def show(content: str) -> None:
    """Write to stdout; a reader that went away (``| head``) ends the command as a signal would, silently."""
    try:
        click.echo(content, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(_CLOSED_PIPE) from None
