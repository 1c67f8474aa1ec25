"""``--help``: short, under headings, with an example that parses; the page of all commands is current."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.cli import call
from support.documented import parse

from fsdp2prof.cli import cli
from fsdp2prof.commands.help import MOST_OPTIONS, Command

REPOSITORY = Path(__file__).parents[2]


def commands(group: click.Group = cli, *above: str) -> Iterator[tuple[str, Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            assert isinstance(command, Command), name
            yield " ".join([*above, name]), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_short_and_every_option_has_a_heading(name: str) -> None:
    command = COMMANDS[name]
    listed = command.listed(everything=False)
    assert len(listed) <= MOST_OPTIONS
    assert listed or not command.options
    assert all(one.group for one in command.options)
    required = [one for one in command.options if one.required]
    assert not [one.name for one in required if one not in listed]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("runs", "runs/first", "runs/second", "step-1000"):
        Path(path).mkdir()
    for path in ("baseline.json", "lengths.txt", "nccl.log"):
        Path(path).touch()
    command = COMMANDS[name]
    assert command.examples
    for example in command.examples:
        program, *words = shlex.split(example)
        assert program == "fsdp2prof"
        assert words[: len(name.split())] == name.split() or name == "check run"
        parse(words)


def test_the_other_options_are_listed_when_they_are_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    short = call(capfd, "estimate", "memory", "--help").out
    everything = call(capfd, "estimate", "memory", "--help-all").out
    for flag in ("--reduce-scatter-buffers", "--table"):
        assert flag not in short
        assert flag in everything
    for command in COMMANDS.values():
        if len(command.options) <= MOST_OPTIONS:
            assert "--help-all" not in {name for one in command.params for name in one.opts}


def test_help_fits_a_terminal_and_breaks_inside_no_option(capfd: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        more = "--help-all" if len(command.options) > MOST_OPTIONS else "--help"
        lines = call(capfd, *name.split(), more).out.splitlines()
        assert not [line for line in lines if line.startswith("  -") and len(line) > 100]
        assert not [line for line in lines if line.startswith("   ") and line.endswith("-")]


def test_names_that_an_option_had_are_accepted_and_not_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert " --rank " not in call(capfd, "analyze", "trace", "--help-all").out
    (shown,) = (one for one in COMMANDS["analyze trace"].options if one.name == "show_rank")
    assert set(shown.opts) == {"--rank", "--show-rank"}


def test_the_page_of_all_commands_is_current() -> None:
    """``python docs/site/commands.py`` writes it anew."""
    file = REPOSITORY / "docs" / "site" / "commands.py"
    spec = importlib.util.spec_from_file_location("commands_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_writes_text_in_sections_prints_one_of_them(name: str) -> None:
    known = {flag for one in COMMANDS[name].options for flag in one.opts}
    formats = next((one.type for one in COMMANDS[name].options if "--format" in one.opts), None)
    assert ("--section" in known) == (isinstance(formats, click.Choice) and "text" in formats.choices)


def test_a_wrong_section_lists_those_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    ended = call(capfd, "inspect", "mesh", "dp_shard=4", "--section", "rank")
    assert ended.code == 2
    assert "--section rank: the sections here are dimensions, ranks, groups" in ended.err
