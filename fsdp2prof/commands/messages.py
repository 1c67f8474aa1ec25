"""The one way to stderr: what is said there holds names of files and traces, which must stay text."""

from __future__ import annotations

import click

from fsdp2prof.vocabulary import printable
from fsdp2prof.workflows.job.urls import shown

__all__ = ["say"]


def say(text: str) -> None:
    """Write lines to stderr, their control characters made visible, copies of URLs under their URLs."""
    click.echo("\n".join(map(printable, shown(text).split("\n"))), err=True)
