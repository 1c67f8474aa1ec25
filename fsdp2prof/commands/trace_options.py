"""Options of every command that analyses traces, gathered into the one value the analysis takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from fsdp2prof.commands.help import ANALYSIS, gathered
from fsdp2prof.commands.options import complete_hardware, numbers_option, refuse_given
from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
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
