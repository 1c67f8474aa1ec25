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

_CELL = re.compile(r"^\|.*", re.MULTILINE)
_SPAN = re.compile(r"`(fsdp2prof [^`]*)`")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    (fsdp2prof .*(?:\\\n.*)*)", re.MULTILINE)


def documented_commands() -> list[tuple[str, list[str]]]:
    """Return page and words of every command that README and docs/ print, each once, without pipes."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for words in _commands(page.read_text(encoding="utf-8")):
            found.setdefault(tuple(words), page.name)
        if page.name in ("README.md", "symptoms.md"):
            for words in _commands_of_tables(page.read_text(encoding="utf-8")):
                found.setdefault(tuple(words), page.name)
    return [(page, list(words)) for words, page in found.items()]


def _commands(text: str) -> Iterator[list[str]]:
    for language, block in [*_BLOCK.findall(text), *(("", block) for block in _INDENTED.findall(text))]:
        prompt = "" if language == "" else "$ "
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(f"{prompt}fsdp2prof "):
                lexer = shlex.shlex(line[len(prompt) :], posix=True, punctuation_chars="|")
                lexer.whitespace_split = True
                words = list(lexer)
                end = words.index("|") if "|" in words else len(words)
                yield words[1:end]


def _commands_of_tables(text: str) -> Iterator[list[str]]:
    for line in _CELL.findall(text):
        for command in _SPAN.findall(line):
            yield shlex.split(command.replace("...", "train.py"))[1:]


def parse(words: list[str]) -> None:
    """Parse a command as the shell would give it, without running it. Raises click's ``UsageError``.

    What is in a store, which would be asked for it, is taken for a local path.
    """
    command: click.Command = cli
    parent: click.Context | None = None
    rest = [re.sub(r"^(s3|gs)://", "", word) for word in words]
    while isinstance(command, click.Group):
        context = command.make_context(command.name or "", [], parent=parent, resilient_parsing=True)
        _, below, rest = command.resolve_command(context, rest)
        assert below is not None, f"no command {' '.join(words)}"
        command, parent = below, context
    command.make_context(command.name or "", rest, parent=parent)
