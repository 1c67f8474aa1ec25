"""``fsdp2prof compare``: what changed from one run, trace, recording or estimate to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fsdp2prof.commands.options import JobChoice, Output, job_options, numbers_option, output_options

__all__ = ["compare"]


@click.command(short_help="What changed from one run, trace or estimate to another.")
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@job_options
@numbers_option("--steps", "Traced steps to compare")
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CONDITION",
    help="Exit with code 3 if this holds, for example 'step_time_frac>0.05'. May be repeated.",
)
@output_options()
def compare(
    before: Path,
    after: Path,
    *,
    choice: JobChoice,
    steps: frozenset[int] | None,
    fail_on: Sequence[str],
    output: Output,
) -> None:
    """What changed from A to B: step time, exposed communication by layer, bytes on the wire, peak memory.

    A and B are each a run directory, a trace or a folder of traces, a memory snapshot, an estimate (a run
    that `estimate memory --save-run` wrote), or the JSON of `analyze` or `estimate`. What both know is
    compared; of a run against an estimate it is said what is exactly equal.
    """
    from fsdp2prof.analyzers.fail_on import check, parse
    from fsdp2prof.errors import ThresholdError
    from fsdp2prof.workflows import compare as comparing

    conditions = [parse(text) for text in fail_on]
    with output.progress(f"comparing {before} with {after}"):
        comparison = comparing.compare(
            before, after, ranks=choice.ranks, steps=steps, iteration=choice.iteration, cache=True
        )
    output.render(comparison)
    if failures := check(conditions, comparison):
        raise ThresholdError("; ".join(map(str, failures)))
