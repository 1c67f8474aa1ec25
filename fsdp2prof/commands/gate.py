"""``--fail-on CONDITION``: exit code 3 if a result is worse than wanted, for continuous integration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.help import CONDITIONS, gathered
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.options import refuse_given
from fsdp2prof.files import replacing
from fsdp2prof.units import plural

if TYPE_CHECKING:
    from fsdp2prof.analyzers.fail_on import Analysis, Condition, Kind, Outcome


@dataclass(frozen=True, slots=True)
class Gate:
    """Conditions of a command, and the destinations of their outcomes."""

    conditions: Sequence[Condition]
    markdown: Path | None = None
    junit: Path | None = None

    def check(self, result: Analysis) -> None:
        """Test the conditions on a result; write the reports, then raise ``ThresholdError`` if one holds.

        The error names each condition that holds with its value. A gate that passes says on stderr how far
        each value was from failing.
        """
        if not self.conditions:
            return
        from fsdp2prof.analyzers.fail_on import judge
        from fsdp2prof.errors import ThresholdError

        outcomes = judge(self.conditions, result)
        self._write(outcomes, getattr(result, "verdict", []))
        if failures := [outcome for outcome in outcomes if outcome.failed]:
            raise ThresholdError("; ".join(map(str, failures)))
        if not click.get_current_context().params.get("quiet"):
            holds = "none fails" if any(outcome.excuse for outcome in outcomes) else "none holds"
            passed = f"passed: {plural(len(outcomes), 'condition')} tested, {holds}"
            say("\n".join([passed, *(f"  {outcome}" for outcome in outcomes)]))

    def _write(self, outcomes: Sequence[Outcome], verdict: Sequence[str]) -> None:
        from fsdp2prof.errors import InputError
        from fsdp2prof.reporters.open_metrics import junit, markdown

        try:
            if self.markdown is not None:
                with self.markdown.open("a", encoding="utf-8") as file:
                    file.write(markdown(outcomes, verdict))
            if self.junit is not None:
                with replacing(self.junit) as temporary:
                    temporary.write_bytes(junit(outcomes))
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be written ({error.strerror})") from error


def fail_on_option(of: Kind, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the option for a kind of result; the command gets one ``gate``.

    A condition that such a result cannot be tested for is refused before any work is done.
    """

    def gate(fail_on: Sequence[str], gate_markdown: Path | None, gate_junit: Path | None) -> Gate:
        if not fail_on:
            refuse_given("--gate-markdown", "--gate-junit", because="there is no --fail-on to report")
            return Gate(())
        from fsdp2prof.analyzers.fail_on import parse

        return Gate([parse(text, of) for text in fail_on], markdown=gate_markdown, junit=gate_junit)

    text = f"Exit with code 3 if this holds (on any rank), for example '{example}'. May be repeated."
    path = click.Path(dir_okay=False, path_type=Path)
    options = (
        CONDITIONS.everyday("--fail-on", multiple=True, metavar="CONDITION", help=text),
        CONDITIONS(
            "--gate-markdown",
            type=path,
            help="Append the conditions with their values to this file, for example $GITHUB_STEP_SUMMARY.",
        ),
        CONDITIONS("--gate-junit", type=path, help="Write the conditions to this file as JUnit XML."),
    )
    return gathered("gate", gate, options)
