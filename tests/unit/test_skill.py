"""The skill's commands are ones that the command line takes, and it ships with the package."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from support.cli import call
from support.skill import skill_commands

from fsdp2prof.cli import cli


@pytest.mark.parametrize("line", skill_commands())
def test_every_option_is_known(line: str) -> None:
    """Parse without running: click refuses what is no option, no choice, no argument."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None, line
        command = found
    command.make_context(command.name, words)


def test_it_is_printed_and_written(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = call(capfd, "skill")
    assert printed.code == 0
    head = re.match(r"---\nname: fsdp2prof\ndescription: (.+)\n---\n", printed.out)
    assert head is not None
    assert len(head[1]) < 1024
    target = tmp_path / "skills" / "fsdp2prof" / "SKILL.md"
    assert call(capfd, "skill", "-o", target).code == 0
    assert target.read_text() == printed.out
    call(capfd, "skill", "-o", target).refused("exists")
