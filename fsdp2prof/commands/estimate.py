"""``fsdp2prof estimate``: memory, communication and checkpoint of a run that has not happened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp2prof.commands.description import PLACE_NAMES, described_options
from fsdp2prof.commands.help import BATCH, CLUSTER, INPUT, MODEL, OUTPUT, Group
from fsdp2prof.commands.options import IN_A_NODE, MEASURED, Place, measured_of, refuse_given
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import UsageError
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec

if TYPE_CHECKING:
    from fsdp2prof.workflows.description import Described

_OF_ANY_STEP = {"--grad-accum", "--sync"}
"""Policy that does not change the parameter groups."""

_MEMORY_ALONE = frozenset(name for name, declared in options_of(PolicySpec).items() if declared.memory_only)
_OF_A_CHECKPOINT = frozenset(
    (
        "expert_shards",
        "extra_model",
        "lora",
        "optimizer",
        "optimizer_impl",
        "orig_dtype",
        "pp_schedule",
        "pp_stage",
        "seq_len",
        "trainable",
    )
)
"""Policy options that affect a checkpoint: parameters and state, their dtypes and ranks."""


@click.group(cls=Group)
def estimate() -> None:
    """Estimate memory, communication, step time or checkpoints of a run that has not happened.

    The model is a built-in name (llama3-8b), a Hugging Face config.json, or package.module:factory. Nothing
    is downloaded and no GPU is needed.
    """


_TRAINING = click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
"""A training that is run for its estimate."""


@estimate.command(
    examples=[
        "fsdp2prof estimate memory --model llama3-8b --mesh dp_shard=8 --seq-len 8192 --hardware h100-sxm"
    ]
)
@described_options(unlisted=PLACE_NAMES - {"hardware"})
@_TRAINING
@MEASURED
@OUTPUT(
    "--save-run",
    type=click.Path(path_type=Path),
    help="Also write the predicted allocations and collectives as a run for analyze, report and compare.",
)
@output_options()
def memory(
    described: Described,
    place: Place,
    measured: tuple[str, ...],
    save_run: Path | None,
    output: Output,
) -> None:
    """Estimate peak reserved and active memory of a rank by executing the model on fake tensors.

    Instead of a model, `-- torchrun train.py ...` runs the training itself as rank 0 of --world-size, on
    tensors without data, until its third step; so does --from-run without --model, by the recorded command.
    """
    known = measured_of(measured, of_memory=True)
    with output.progress("executing the model on fake tensors") as tell:
        from fsdp2prof.workflows.estimate import estimate_memory

        result = estimate_memory(described, measured=known, save=save_run, progress=tell)
    output.render(result)


@estimate.command(examples=["fsdp2prof estimate comm --model qwen2-7b --mesh dp_replicate=2,dp_shard=8"])
@described_options(unlisted=PLACE_NAMES | _MEMORY_ALONE)
@_TRAINING
@BATCH(
    "--weight-sync",
    metavar="engines=N,tp=K,per=...",
    help="Also the transfer of weights to inference engines: engines=2,tp=4,per=layer,"
    "bandwidth=50GB, or colocated.",
)
@output_options()
def comm(described: Described, place: Place, weight_sync: str | None, output: Output) -> None:
    """Estimate bytes and counts of every collective of a step, per layer, phase, op, mesh dim and dtype.

    With --from-run and without --model, the recorded parameter groups are used. Instead of a model, `--
    torchrun train.py ...` runs the training itself as rank 0 of --world-size, on tensors without data.
    """
    from fsdp2prof.workflows.estimate import estimate_communication

    if described.is_recorded_only and described.rehearsal is None:
        others = sorted({f"--{name.replace('_', '-')}" for name in options_of(PolicySpec)} - _OF_ANY_STEP)
        because = "without --model the recorded parameter groups are used as they are"
        refuse_given(
            *("--layers", "--mesh", "--config", "--stack", "--weight-sync", "--from-config", "--world-size"),
            *others,
            because=because,
        )
    output.render(estimate_communication(described, weight_sync=weight_sync))


@estimate.command(
    examples=[
        "fsdp2prof estimate step --model llama3-8b --mesh dp_shard=64 --seq-len 8192 --hardware h100-sxm"
    ]
)
@described_options(unlisted=_MEMORY_ALONE)
@MEASURED
@CLUSTER(
    "--copy-engine-gathers",
    is_flag=True,
    help="Parameters are gathered within a node by copy engines, which slow no kernel, instead of kernels.",
)
@CLUSTER(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="A recorded run of the same model, whose measured times replace modelled ones where they apply.",
)
@MODEL(
    "--execution-trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead of --model: the operators of a PyTorch execution trace of one rank under FSDP2.",
)
@OUTPUT(
    "--save-run",
    type=click.Path(path_type=Path),
    help="Also write the predicted step as a run for analyze, report and compare.",
)
@output_options()
def step(
    described: Described,
    place: Place,
    measured: tuple[str, ...],
    copy_engine_gathers: bool,
    calibrate: Path | None,
    execution_trace: Path | None,
    save_run: Path | None,
    output: Output,
) -> None:
    """Estimate the time of a training step, its breakdown, and its exposed communication.

    The commands of the step are captured from FSDP2 itself and run through a simulation of the streams.
    """
    from fsdp2prof.workflows.estimate import estimate_step

    known = measured_of(measured, of_memory=False)
    if known is not None and (calibrate is not None or execution_trace is not None):
        raise UsageError("--measured would have no effect beside --calibrate or --execution-trace")
    if execution_trace is not None:
        refuse_given("--model", "--calibrate", because="the operators are those of --execution-trace")
        described = described.of_execution_trace(execution_trace)
    spec = described.spec()
    if spec.hardware is None and calibrate is None:
        raise UsageError("estimate step needs an accelerator: add --hardware, for example h100-sxm")
    cluster = None
    if spec.hardware is None:
        because = "without --hardware the CPUs of the calibrating run are taken"
        refuse_given(*IN_A_NODE, "--copy-engine-gathers", because=because)
    else:
        cluster = place.cluster(spec.hardware, copy_engine_gathers=copy_engine_gathers)
    doing = "executing" if execution_trace is None else "simulating"
    with output.progress(f"{doing} {spec.model.source}"):
        result = estimate_step(
            described,
            cluster,
            calibrate=calibrate,
            execution_trace=execution_trace,
            measured=known,
            save=save_run,
        )
    output.render(result)


@estimate.command(examples=["fsdp2prof estimate checkpoint --model llama3-70b --mesh dp_shard=64"])
@described_options(unlisted=PLACE_NAMES | (options_of(PolicySpec).keys() - _OF_A_CHECKPOINT))
@CLUSTER.everyday("--bandwidth", help="Write bandwidth per rank and second, for example 2GB.")
@output_options()
def checkpoint(described: Described, place: Place, bandwidth: str | None, output: Output) -> None:
    """Estimate the size of a distributed checkpoint and the time to write it."""
    from fsdp2prof.units import parse_bytes
    from fsdp2prof.workflows.estimate import estimate_checkpoint

    rate = None if bandwidth is None else parse_bytes(bandwidth.removesuffix("/s"))
    output.render(estimate_checkpoint(described, bandwidth_bytes_per_s=rate))


@estimate.command(examples=["fsdp2prof estimate packing --lengths lengths.txt --seq-len 8192"])
@INPUT(
    "--lengths",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="File of document lengths in tokens, one per line.",
)
@BATCH.everyday("--seq-len", type=click.IntRange(1), required=True, help="Tokens per sequence.")
@BATCH("--batch-size", type=click.IntRange(1), default=1, help="Sequences per batch.")
@output_options()
def packing(lengths: Path, seq_len: int, batch_size: int, output: Output) -> None:
    """Estimate the cost of padding: padded, padded to the longest in a batch, packed, and concatenated
    documents."""
    from fsdp2prof.workflows.estimate import estimate_packing

    output.render(estimate_packing(lengths, seq_len=seq_len, batch_size=batch_size))
