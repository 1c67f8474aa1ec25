"""Options of every command that analyses traces, gathered into the one value the analysis takes.

``--fail-on CONDITION`` gives exit code 3 if a result is worse than wanted, for continuous integration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp2prof.commands.help import ANALYSIS, CONDITIONS, gathered
from fsdp2prof.commands.messages import say
from fsdp2prof.commands.options import complete_hardware, numbers_option, refuse_given
from fsdp2prof.errors import UsageError
from fsdp2prof.files import replacing
from fsdp2prof.units import plural

if TYPE_CHECKING:
    from fsdp2prof.analyzers.fail_on import Analysis, Condition, Kind, Outcome
    from fsdp2prof.analyzers.steps import Window
    from fsdp2prof.workflows.job.job_files import JobFiles
    from fsdp2prof.workflows.ranks.one_rank import TraceOptions

cluster_option = ANALYSIS(
    "--cluster",
    metavar="WHERE",
    callback=lambda _, __, value: value and _cluster_address(value),
    help="Read ranks on Dask workers: local, or a Dask scheduler such as tcp://HOST:8786.",
)
"""Where ranks are reduced; the command gets ``cluster: str | None``."""


def _cluster_address(value: str) -> str:
    from fsdp2prof.workflows.ranks.cluster import check_address

    return check_address(value)


_OPTIONS = (
    ANALYSIS(
        "--window",
        type=click.Choice(["steps", "trace"]),
        default="steps",
        help="Analyse each training step, or the whole trace as one.",
    ),
    numbers_option("--steps", "Steps to analyse", everyday=True),
    ANALYSIS.everyday(
        "--tokens-per-step",
        "tokens",
        type=click.IntRange(min=1),
        help="Tokens per step over all ranks: adds tokens/s.",
    ),
    ANALYSIS.everyday(
        "--hardware",
        metavar="NAME",
        shell_complete=complete_hardware,
        help="Accelerator, for example h100-sxm: adds MFU and bandwidth relative to its peak.",
    ),
    ANALYSIS(
        "--threshold",
        "thresholds",
        multiple=True,
        metavar="NAME=VALUE",
        help="Threshold of a finding, for example min_cost_frac=0.005. May be repeated.",
    ),
    ANALYSIS(
        "-j",
        "--jobs",
        "workers",
        type=click.IntRange(min=1),
        help="Processes that share the ranks; by default chosen by input size.",
    ),
)


WHOLE_ANALYSIS = (
    "--window",
    "--tokens-per-step",
    "--hardware",
    "--threshold",
    "--jobs",
    "--cluster",
)
"""Flags of these options, but for ``--steps``."""


def _trace_options(
    window: Window,
    steps: frozenset[int] | None,
    tokens: int | None,
    hardware: str | None,
    thresholds: Sequence[str],
    workers: int | None,
) -> TraceOptions:
    from fsdp2prof.analyzers.ledger.thresholds import parse_thresholds
    from fsdp2prof.workflows.ranks.one_rank import references

    if window == "trace" and steps is not None:
        raise UsageError("--window trace takes the whole trace as one step: leave out --steps")
    compared = references(tokens_per_step=tokens, hardware=hardware, thresholds=parse_thresholds(thresholds))
    return {"window": window, "steps": steps, "workers": workers, "references": compared}


trace_options = gathered("options", _trace_options, _OPTIONS)
"""Options of an analysis of traces; the command gets one ``options: TraceOptions``, complete."""


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--cluster`` to a command that has the options, and to its ``options``."""

    @wraps(command)
    def with_cluster(*args: Any, options: TraceOptions, cluster: str | None, **rest: Any) -> None:
        options["cluster"] = cluster
        command(*args, options=options, **rest)

    return cluster_option(with_cluster)


def refuse_without_traces(job: JobFiles) -> None:
    """Refuse trace options for an input that contains no trace."""
    if not job.traces.files:
        refuse_given("--steps", *WHOLE_ANALYSIS, because=f"{job.path} holds no trace")


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
        from fsdp2prof.results.ledger import PART

        outcomes = judge(self.conditions, result)
        self._write(outcomes, getattr(result, "verdict", []))
        if failures := [outcome for outcome in outcomes if outcome.failed]:
            raise ThresholdError("; ".join(map(str, failures)))
        if not click.get_current_context().params.get("quiet"):
            holds = "none fails" if any(outcome.excuse for outcome in outcomes) else "none holds"
            passed = f"passed: {plural(len(outcomes), 'condition')} tested, {holds}"
            left_out = [line for line in getattr(result, "verdict", []) if line.startswith(PART)]
            say("\n".join([passed, *(f"  {outcome}" for outcome in outcomes), *left_out]))

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
