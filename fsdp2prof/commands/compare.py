"""``fsdp2prof compare``: changes from one run, trace, recording or estimate to another."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.help import OUTPUT, Command
from fsdp2prof.commands.options import InputPath, JobChoice, job_options, numbers_option, refuse_given
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.commands.trace_options import Gate, cluster_option, fail_on_option


@click.command(
    cls=Command,
    short_help="Compare two runs, traces or estimates.",
    examples=[
        "fsdp2prof compare runs/first runs/second",
        "fsdp2prof compare baseline.json runs/second --fail-on 'step_time_frac>0.05'",
    ],
)
@click.argument("before", type=InputPath(), metavar="A")
@click.argument("after", type=InputPath(), metavar="B")
@job_options
@numbers_option("--steps", "Traced steps to compare")
@cluster_option
@OUTPUT.everyday(
    "--write-baseline",
    is_flag=True,
    help="Instead of comparing, write the sums of B to A: a baseline to commit with the code.",
)
@fail_on_option("comparison", "step_time_frac>0.05")
@output_options()
def compare(
    before: Path,
    after: Path,
    *,
    choice: JobChoice,
    steps: frozenset[int] | None,
    cluster: str | None,
    write_baseline: bool,
    gate: Gate,
    output: Output,
) -> None:
    """Show the changes from A to B: step time, exposed communication, bytes on the wire, peak memory.

    A and B are each a run directory, a trace or a folder of traces, a memory snapshot, an estimate (a run
    that `estimate memory --save-run` wrote), or the JSON of `analyze` or `estimate`. Values known on both
    sides are compared; for a run and an estimate, exact equalities are listed. A may be a baseline written
    by `compare A B --write-baseline`; then sums are compared, not layers.
    """
    from fsdp2prof.workflows import compare as comparing

    chosen: comparing.Chosen = {
        "ranks": choice.ranks,
        "steps": steps,
        "iteration": choice.iteration,
        "cluster": cluster,
    }
    if write_baseline:
        refuse_given("--fail-on", because="--write-baseline compares nothing")
        with output.progress(f"summing up {after}"):
            baseline = comparing.write_baseline(before, after, **chosen)
        output.render(baseline)
        output.tell(f"wrote the baseline {before}")
        return
    with output.progress(f"comparing {before} with {after}"):
        comparison = comparing.compare(before, after, **chosen)
    output.render(comparison)
    gate.check(comparison)
