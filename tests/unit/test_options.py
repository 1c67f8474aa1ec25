"""Options that would do nothing are refused, not ignored."""

from __future__ import annotations

import click
import pytest

from fsdp2prof.commands.options import refuse_given
from fsdp2prof.errors import UsageError


@click.command()
@click.option("--window", default="steps")
@click.option("--cache/--no-cache", default=True)
@click.option("-v", "--verbose", is_flag=True)
def command(**_: object) -> None:
    refuse_given("--window", "--cache", "--verbose", because="there is no trace")


def test_what_was_not_given_is_not_refused() -> None:
    command.main([], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--window", "steps"], "--window"),
        (["-v"], "--verbose"),
        (["-v", "--window", "trace"], "--window, --verbose"),
    ],
)
def test_what_was_given_is_named_even_if_it_is_the_default(arguments: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named} would have no effect: there is no trace$"):
        command.main(arguments, standalone_mode=False)


@pytest.mark.parametrize("flag", ["--cache", "--no-cache"])
def test_a_switch_is_refused_either_way(flag: str) -> None:
    with pytest.raises(UsageError, match=r"^--cache/--no-cache would"):
        command.main([flag], standalone_mode=False)
