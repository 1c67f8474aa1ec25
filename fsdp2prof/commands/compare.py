"""``fsdp2prof compare``: what changed from one run, trace, recording or estimate to another."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.gate import Gate, fail_on_option
from fsdp2prof.commands.options import JobChoice, Output, job_options, numbers_option, output_options

__all__ = ["compare"]


@click.command(short_help="What changed from one run, trace or estimate to another.")
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@job_options
@numbers_option("--steps", "Traced steps to compare")
@fail_on_option("comparison", "step_time_frac>0.05")
@click.option("-v", "--verbose", is_flag=True, help="Every layer, rank and setting, nothing folded.")
@output_options("text", "json", "csv")
def compare(
    before: Path,
    after: Path,
    *,
    choice: JobChoice,
    steps: frozenset[int] | None,
    gate: Gate,
    verbose: bool,
    output: Output,
) -> None:
    """What changed from A to B: step time, exposed communication by layer, bytes on the wire, peak memory.

    A and B are each a run directory, a trace or a folder of traces, a memory snapshot, an estimate (a run
    that `estimate memory --save-run` wrote), or the JSON of `analyze` or `estimate`. What both know is
    compared; of a run against an estimate it is said what is exactly equal.
    """
    from fsdp2prof.workflows import compare as comparing

    with output.progress(f"comparing {before} with {after}"):
        comparison = comparing.compare(
            before, after, ranks=choice.ranks, steps=steps, iteration=choice.iteration, cache=True
        )
    if output.format == "json":
        from fsdp2prof.reporters import jsonreport

        output.write(jsonreport.render(comparison))
    elif output.format == "csv":
        from fsdp2prof.reporters.csvreport import render_run_comparison

        output.write(render_run_comparison(comparison))
    else:
        from fsdp2prof.reporters.compare_text import compare_view
        from fsdp2prof.reporters.terminal import render

        output.write(render(compare_view(comparison, every=verbose), to_terminal=output.to_terminal))
    gate.check(comparison)
