"""``fsdp2prof plan``: the best mesh, batch and policy of a training on a cluster."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.description import described_options
from fsdp2prof.commands.help import BATCH, COST, SEARCH, Command
from fsdp2prof.commands.options import MEASURED, Place, measured_of, place_options
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import UsageError
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec

if TYPE_CHECKING:
    from fsdp2prof.estimators.planner.answers import Question
    from fsdp2prof.workflows.description import Described

_SELDOM = frozenset(("mesh", "batch_size", "grad_accum", "optimizer", "loss", "compile"))
"""Of a description: --fix and --global-batch say as much."""


@click.command(
    cls=Command,
    short_help="Find the best mesh, batch and policy for a training, and explain why others lost.",
    examples=[
        "fsdp2prof plan --model llama3-8b --gpus 64 --hardware h100-sxm --global-batch 256 --seq-len 8192"
    ],
)
@described_options(
    seldom=_SELDOM | {name for name, option in options_of(PolicySpec).items() if option.planned},
    place=place_options(
        "Accelerator (h100-sxm), a YAML or JSON file that describes one, or the output of nccl-tests.",
        required=True,
        network="Network between the nodes.  [400gb-ib with several nodes]",
    ),
)
@BATCH.everyday(
    "--global-batch",
    type=click.IntRange(1),
    help="Sequences per optimizer step, over all ranks; --from-config may give it, otherwise it is needed.",
)
@MEASURED
@SEARCH.everyday(
    "--fix",
    metavar="NAME=VALUE,...",
    default="",
    help="Keep these fixed: mesh dimensions (tp=8), batch_size, grad_accum, ac, reshard, sync, "
    "offload, reduce_dtype, orig_dtype, compile, float8, forward_prefetch, backward_prefetch, pp_schedule, "
    "allocator, expert_shards.",
)
@SEARCH.everyday("--reserve", metavar="SHARE", default="10%", help="Device memory to leave free.")
@COST.everyday(
    "--price", metavar="AMOUNT", help="Price of a GPU-hour, with its currency (2.50USD): adds the cost."
)
@SEARCH.everyday(
    "--objective",
    type=click.Choice(["tokens", "cost", "memory"]),
    default="tokens",
    help="Most tokens per second, fewest GPU-hours per token, or least memory.",
)
@SEARCH.everyday(
    "--max", "most", type=click.Choice(["batch-size", "seq-len"]), help="Find the largest that fits."
)
@SEARCH.everyday("--min", "fewest", type=click.Choice(["gpus"]), help="Find the fewest, up to --gpus.")
@COST("--tokens", metavar="N", help="Tokens of the whole training (15T, 300B): adds its GPU-hours.")
@COST("--budget", type=float, help="GPU-hours available: adds how many tokens they train.")
@SEARCH(
    "--refine",
    is_flag=True,
    help="Also run prefetching, precision and compilation of the winner through the engine.",
)
@SEARCH("--no-cache", is_flag=True, help="Ignore the cached executions of earlier plans.")
@output_options()
def plan(
    described: Described,
    place: Place,
    global_batch: int | None,
    measured: tuple[str, ...],
    fix: str,
    reserve: str,
    price: str | None,
    objective: str,
    most: str | None,
    fewest: str | None,
    tokens: str | None,
    budget: float | None,
    refine: bool,
    no_cache: bool,
    output: Output,
) -> None:
    """Search mesh, micro-batch, checkpointing and resharding for the highest throughput.

    Describe the model and the batch with the options of `estimate`, or --from-config. Every configuration
    is scored from shallow executions of the model; the best one is run through the engine of `estimate`,
    which gives the same numbers. Ctrl-C ends the search with the best so far.
    """
    question = _question(most, fewest)
    if question is not None and refine:
        raise UsageError("--refine is for a plan, not for --max or --min")
    from fsdp2prof.estimators.config.measured import Measured
    from fsdp2prof.estimators.planner.request import PlanRequest, parse_fixed
    from fsdp2prof.workflows.estimate import anchors_of
    from fsdp2prof.workflows.plan_description import given_of, in_the_file

    given = given_of(described)
    gpus, global_batch = given.gpus, global_batch or given.global_batch
    if gpus is None:
        raise UsageError("plan needs --gpus: all of them together")
    if global_batch is None and most != "batch-size":
        raise UsageError("plan needs --global-batch: sequences of one optimizer step, all ranks together")
    cluster = place.cluster()
    if place.network is None and gpus > cluster.gpus_per_node:
        cluster = place._replace(network="400gb-ib").cluster()
    fixed_mesh, fixed_policy = parse_fixed(fix)
    amount, currency = _price(price)
    known = measured_of(measured, of_memory=False)
    if isinstance(known, Measured) and described.read is None:
        raise UsageError(
            "--measured NAME=NUMBER describes the run of --from-config; add that, or give a file"
        )
    from fsdp2prof.workflows.plan import plan as make

    with output.progress(f"planning {given.model.source} on {gpus:,} x {place.hardware}") as progress:
        notes: list[str] = []
        if known is not None:
            from fsdp2prof.estimators.step import anchored_on

            found = anchored_on(anchors_of(described, known), cluster, exact=isinstance(known, Measured))
            cluster = found.cluster
            notes.append(found.note)
        request = PlanRequest(
            model=given.model,
            cluster=cluster,
            gpus=gpus,
            global_batch=global_batch or gpus,
            policy=given.policy,
            fixed_mesh=fixed_mesh,
            fixed_policy=fixed_policy,
            reserve_frac=_share(reserve),
            objective=objective,  # type: ignore[arg-type]
            price_per_gpu_hour=amount,
            currency=currency,
            tokens=None if tokens is None else _count(tokens),
            budget_gpu_hours=budget,
        )
        made = make(request, question=question, progress=progress, use_cache=not no_cache, refine=refine)
    output.render(in_the_file(made, described, given.notes, notes))


def _question(most: str | None, fewest: str | None) -> Question | None:
    if most is not None and fewest is not None:
        raise UsageError("--max and --min answer different questions: give one of them")
    if most is not None:
        return "max batch-size" if most == "batch-size" else "max seq-len"
    return "min gpus" if fewest is not None else None


def _price(text: str | None) -> tuple[float | None, str | None]:
    """Return an amount and its currency, if it is named: ``2.50USD``, ``2.5 EUR``, ``$2.50``."""
    if text is None:
        return None, None
    match = re.fullmatch(r"([^\w\s.+-]?)\s*([-+]?[\d.]+|nan|inf)\s*([A-Za-z]{3}|[^\w\s.]?)", text.strip())
    try:
        amount = float(match[2]) if match else None
    except ValueError:
        amount = None
    if match is None or amount is None:
        raise UsageError(f"--price {text!r} is not an amount; write for example 2.50USD")
    return amount, match[1] or match[3] or None


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"--reserve {text!r} is not a share; write for example 10%") from None
    return value / 100 if text.endswith("%") or value > 1 else value


def _count(text: str) -> int:
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        value = round(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise UsageError(f"--tokens {text!r} is not a number of tokens; write for example 15T")
    return value
