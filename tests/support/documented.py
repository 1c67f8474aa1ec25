"""The commands that README and docs/ tell people to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from fsdp2prof.cli import cli

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documented_commands() -> list[tuple[str, list[str]]]:
    """Return page and words of every ``$ fsdp2prof ...``, each command once, without comments and pipes."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for words in _commands(page.read_text(encoding="utf-8")):
            found.setdefault(tuple(words), page.name)
    return [(page, list(words)) for words, page in found.items()]


def _commands(text: str) -> Iterator[list[str]]:
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ fsdp2prof "):
                lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|")
                lexer.whitespace_split = True
                words = list(lexer)
                end = words.index("|") if "|" in words else len(words)
                yield words[1:end]


def parse(words: list[str]) -> None:
    """Parse a command as the shell would give it, without running it. Raises click's ``UsageError``."""
    command: click.Command = cli
    parent: click.Context | None = None
    rest = list(words)
    while isinstance(command, click.Group):
        context = command.make_context(command.name or "", [], parent=parent, resilient_parsing=True)
        _, below, rest = command.resolve_command(context, rest)
        assert below is not None, f"no command {' '.join(words)}"
        command, parent = below, context
    command.make_context(command.name or "", rest, parent=parent)
