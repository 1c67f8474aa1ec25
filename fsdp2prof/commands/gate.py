"""``--fail-on CONDITION``: exit code 3 if a result is worse than wanted, for continuous integration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fsdp2prof.analyzers.fail_on import Analysis, Condition, Kind

__all__ = ["Gate", "fail_on_option"]


@dataclass(frozen=True, slots=True)
class Gate:
    """The conditions a command was given."""

    conditions: Sequence[Condition]

    def check(self, result: Analysis) -> None:
        """Raise ``ThresholdError`` if a condition holds, naming each with its value."""
        from fsdp2prof.analyzers.fail_on import check
        from fsdp2prof.errors import ThresholdError

        if failures := check(self.conditions, result):
            raise ThresholdError("; ".join(map(str, failures)))


def fail_on_option(of: Kind, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the option for a kind of result; the command gets one ``gate``.

    A condition that such a result cannot be tested for is refused before any work is done.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_gate(*args: Any, fail_on: Sequence[str], **rest: Any) -> None:
            from fsdp2prof.analyzers.fail_on import parse

            command(*args, gate=Gate([parse(text, of) for text in fail_on]), **rest)

        text = f"Exit with code 3 if this holds (on any rank), for example '{example}'. May be repeated."
        return click.option("--fail-on", multiple=True, metavar="CONDITION", help=text)(with_gate)

    return decorate
