"""``fsdp2prof check``: check a run's sharding, parity, balance and environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from fsdp2prof.commands.help import ANALYSIS, BATCH, CLUSTER, CONDITIONS, INPUT, MODEL, OUTPUT, Group
from fsdp2prof.commands.options import InputPath, JobChoice, complete_hardware, job_options, refuse_given
from fsdp2prof.commands.output import Output, output_options
from fsdp2prof.errors import ThresholdError, UsageError
from fsdp2prof.results.finding import SEVERITIES, Finding

_FIRST = "run"
_MOST_RANKS = 64
"""Of a parity check: processes of one machine."""


_fail_at = CONDITIONS.everyday(
    "--fail-at",
    type=click.Choice([*SEVERITIES, "never"]),
    default="high",
    help="Severity from which a finding gives exit code 3.",
)


class _RunFirst(Group):
    """A group whose first command needs no name: ``check RUN`` is ``check run RUN``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = [_FIRST, *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_RunFirst)
def check() -> None:
    """Check that a run is sharded as its mesh defines, and for known mistakes.

    `fsdp2prof check RUN` is short for `fsdp2prof check run RUN`. Exit code 3 says that something is wrong.
    """


def _fail_on(findings: Sequence[Finding], least: str) -> None:
    """Raise ``ThresholdError`` for findings that are at least so severe."""
    if least == "never":
        return
    counted = SEVERITIES[: SEVERITIES.index(least) + 1]
    if grave := [one for one in findings if one.severity in counted]:
        raise ThresholdError(f"check failed: {', '.join(dict.fromkeys(one.id for one in grave))}")


@check.command(
    short_help="A recorded run: shards, groups, replicas, setup.", examples=["fsdp2prof check runs/first"]
)
@click.argument("run", type=InputPath())
@_fail_at
@output_options()
def run(run: Path, *, fail_at: str, output: Output) -> None:
    """Check that every parameter is sharded as its mesh defines, alike on all ranks, and for known mistakes.

    RUN is the folder that `fsdp2prof record -o RUN` wrote; with `record --verify` replicas are also compared.
    """
    from fsdp2prof.workflows.check import check_run

    checked = check_run(run)
    output.render(checked)
    _fail_on(checked.findings, fail_at)


@check.command(
    short_help="Sharded against unsharded training: every loss, gradient and parameter.",
    examples=["fsdp2prof check parity --model train:model --batch train:batch --world-size 4"],
)
@MODEL.everyday(
    "--model",
    required=True,
    metavar="PKG:FUNCTION",
    help="Function that returns the module, or (module, loss).",
)
@MODEL.everyday(
    "--batch",
    required=True,
    metavar="PKG:FUNCTION",
    help="batch(index, rank, world_size) of one micro-batch.",
)
@CLUSTER.everyday(
    "--world-size",
    type=click.IntRange(1, _MOST_RANKS),
    metavar="N",
    help="Number of ranks; by default that of --mesh.",
)
@CLUSTER.everyday("--mesh", help="For example dp_replicate=2,dp_shard=2.  [dp_shard=N]")
@CLUSTER.everyday(
    "--shard",
    metavar="PKG:FUNCTION",
    help="shard(module, mesh) calls fully_shard; by default on every member of a list, and on the root. "
    "With ep in the mesh: shard(module, mesh, experts).",
)
@BATCH.everyday("--steps", type=click.IntRange(1), default=3)
@BATCH.everyday("--micro-batches", type=click.IntRange(1), default=1, help="Micro-batches of each step.")
@BATCH("--seed", type=int, default=0)
@CLUSTER.everyday("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@CLUSTER("--timeout", type=click.FloatRange(min=1), default=300.0, help="Time limit in seconds.")
@output_options()
def parity(
    model: str,
    batch: str,
    *,
    world_size: int | None,
    mesh: str | None,
    shard: str | None,
    steps: int,
    micro_batches: int,
    seed: int,
    device: str,
    timeout: float,
    output: Output,
) -> None:
    """Train plain on one process and under fully_shard on several, with the same weights and data.

    Every loss, full gradient and parameter is compared, with a tolerance by dtype, and the first that differs
    is named. Ranks are processes of this machine, with gloo on the CPU or NCCL on --device cuda.
    """
    from fsdp2prof.workflows.check import check_parity

    sizes = _sizes(mesh, world_size)
    ranks = math.prod(size for name, size in sizes.items() if name != "ep")
    if ranks > _MOST_RANKS:
        raise UsageError(f"--mesh: {ranks} ranks on one machine are more than {_MOST_RANKS}")
    with output.progress(f"training {model} on {ranks} ranks"):
        found = check_parity(
            model=model,
            batch=batch,
            shard=shard,
            mesh=sizes,
            steps=steps,
            micro_batches=micro_batches,
            seed=seed,
            device=device,
            timeout_s=timeout,
        )
    output.render(found)
    if found.first is not None:
        raise ThresholdError(
            f"parity failed: {found.first.kind} {found.first.name} of step {found.first.step}"
        )


@check.command(
    short_help="A recorded run: is the work balanced between ranks?",
    examples=["fsdp2prof check balance runs/first"],
)
@click.argument("run", type=InputPath())
@job_options
@INPUT(
    "--lengths",
    type=InputPath(),
    metavar="FILE",
    help="Document lengths in tokens, in training order: adds padding and tokens per rank.",
)
@INPUT("--batch-size", type=click.IntRange(1), default=1, help="Documents per micro-batch.")
@INPUT(
    "--seq-len",
    type=click.IntRange(1),
    help="Tokens every document is padded to; by default the longest of its micro-batch.",
)
@ANALYSIS("--window", type=click.IntRange(1), default=1000, help="Last watched steps to compare.")
@_fail_at
@output_options()
def balance(
    run: Path,
    *,
    choice: JobChoice,
    lengths: Path | None,
    batch_size: int,
    seq_len: int | None,
    window: int,
    fail_at: str,
    output: Output,
) -> None:
    """Show how evenly the work of a step is distributed over the ranks, and the cost of waiting for the
    slowest.

    RUN was recorded with --watch (every step counts), or with traces (the traced steps count).
    """
    from fsdp2prof.workflows.balance import check_balance

    if lengths is None:
        refuse_given("--batch-size", "--seq-len", because="they are of the documents that --lengths names")
    with output.progress(f"comparing the ranks of {run}"):
        found = check_balance(
            choice.open(run), lengths=lengths, batch_size=batch_size, seq_len=seq_len, steps=window
        )
    output.render(found)
    _fail_on(found.findings, fail_at)


def _sizes(mesh: str | None, world_size: int | None) -> dict[str, int]:
    """Dimensions of the mesh with more than one rank, in its order; ``dp_shard`` always, ``ep`` last."""
    from fsdp2prof.estimators.config.mesh import MeshSpec

    if mesh is None:
        return {"dp_shard": world_size or 2}
    spec = MeshSpec.parse(mesh)
    if world_size is not None and world_size != spec.world_size:
        raise UsageError(f"--mesh has {spec.world_size} ranks, --world-size says {world_size}; give one")
    if (ranks := spec.fsdp_size * spec.tp) % spec.ep:
        raise UsageError(f"--mesh: ep={spec.ep} does not divide the {ranks} ranks of dp_shard x cp x tp")
    sizes = {name: size for name, size in spec.sizes().items() if size > 1 or name == "dp_shard"}
    return sizes | ({"ep": spec.ep} if spec.ep > 1 else {})


@check.command(
    short_help="The ranks of a launch command: can they train together?",
    context_settings={"allow_interspersed_args": False},
    examples=["fsdp2prof check env -- torchrun --nproc-per-node 8"],
)
@CLUSTER.everyday(
    "--mesh", help="Dimensions over which sums are checked, for example dp_replicate=2,dp_shard=4."
)
@CLUSTER.everyday("--world-size", type=click.IntRange(1), metavar="N", help="Number of ranks expected.")
@CLUSTER.everyday(
    "--hardware",
    shell_complete=complete_hardware,
    help="Accelerator (h100-sxm), or a file that describes one, to compare the bandwidth within a node with.",
)
@OUTPUT(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    show_default=False,
    help="Folder for recordings, on a disk that all ranks share; by default the current folder.",
)
@CLUSTER("--timeout", type=click.FloatRange(min=1), default=300.0, help="Time limit in seconds.")
@output_options()
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- LAUNCHER...")
def env(
    *,
    mesh: str | None,
    world_size: int | None,
    hardware: str | None,
    folder: Path,
    timeout: float,
    command: tuple[str, ...],
    output: Output,
) -> None:
    """Run a launch command with a probe in place of the training, and check its ranks.

    LAUNCHER is everything before your script: torchrun --nproc-per-node 8, or srun python. Checks
    rendezvous, devices, versions, variables, sums over every mesh dimension, bandwidth, clocks, the disk
    for recordings, and NCCL's transports between hosts.
    """
    from fsdp2prof.estimators.config.hardware import HardwareSpec
    from fsdp2prof.workflows.check import check_environment

    sizes = (
        "" if mesh is None else ",".join(f"{name}={size}" for name, size in _sizes(mesh, world_size).items())
    )
    expected = None
    if hardware is not None:
        spec = HardwareSpec.parse(hardware)
        expected = round(spec.node_bus_bytes_per_s(world_size or 8))
    with output.progress("probing the ranks"):
        found = check_environment(
            list(command),
            folder=folder.absolute(),
            mesh=sizes,
            world_size=world_size,
            expected_bytes_per_s=expected,
            timeout_s=timeout,
        )
    output.render(found)
    _fail_on(found.findings, "high")
