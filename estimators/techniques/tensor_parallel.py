"""Tensor parallelism: what it asks of a model, and how its asynchronous kind changes a program.

For asynchronous tensor parallelism the compiler cuts a product that follows an all-gather, or precedes a
reduce-scatter, into as many chunks as there are ranks, and sends the others' chunks over symmetric memory
meanwhile: a rank starts on the chunk that it has, and its last chunk waits for the last one to arrive. What
only rearranges gathered or reduced chunks (a sequence dimension behind the batch's) is part of the same
operator and falls away. Source: "Introducing Async Tensor Parallelism in PyTorch"
(discuss.pytorch.org/t/209487), ``torch._inductor.fx_passes.micro_pipeline_tp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import values_of
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import Collective, Command, Kernel, Program, Wait
from fsdp2prof.estimators.techniques.technique import About, Technique


class AsyncTensorParallel(Technique):
    """Products in chunks beside tensor parallelism's collectives (``async_tp``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse it without tensor parallelism, and for models whose plan is not the built-in one."""
        if policy.async_tp and mesh.tp == 1:
            raise ModelError("async_tp needs tensor parallelism: add tp to the mesh")
        plan = model.tensor_parallel
        if policy.async_tp and plan is not None and not plan.is_analysed:
            raise ModelError(f"async_tp: modelled for dense built-in models, not {model.name}")
        if policy.async_tp and policy.sequence_parallel is False:
            raise ModelError(
                "async_tp overlaps the gathers and scatters of sequence parallelism: leave "
                "sequence_parallel=false out"
            )

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Cut products, and send their chunks beside them."""
        return with_async_tensor_parallel(program, mesh.tp) if policy.async_tp else program

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """Effects left out of memory, and the costs of chunks."""
        if about == "memory" and policy.async_tp:
            yield "asynchronous tensor parallelism: memory as without it, its symmetric buffers left out"
        elif about == "step" and policy.async_tp:
            yield (
                f"async_tp: products beside tensor-parallel gathers and scatters run in {mesh.tp} chunks, "
                "each slowed as beside any collective"
            )


def with_async_tensor_parallel(program: Program, ranks: int) -> Program:
    """Let products run beside the tensor-parallel all-gathers and reduce-scatters that they are next to."""
    commands: list[Command] = []
    for command in program.commands:
        scatters = isinstance(command, Collective) and command.op == "reduce_scatter"
        if scatters and _overlaps(command):
            _behind_the_first_chunk(commands, command, ranks)
        else:
            commands.append(command)
    return replace(program, commands=_waits_after_products(commands, ranks))


def _overlaps(command: Command) -> bool:
    """Whether a collective is tensor parallelism's, on its communicator's own stream."""
    return isinstance(command, Collective) and command.mesh_dim == "tp" and command.event >= 0


def _waits_after_products(commands: list[Command], ranks: int) -> list[Command]:
    """Move each wait for an all-gather before the last chunk of the product that follows."""
    gathers = {
        c.event for c in commands if isinstance(c, Collective) and c.op == "all_gather" and _overlaps(c)
    }
    made: list[Command] = []
    held: list[Command] = []
    """The wait, and the commands that rearrange the chunks after it."""
    for command in commands:
        if isinstance(command, Wait) and command.event in gathers:
            made += held
            held = [command]
        elif not held or _does_nothing(command) or _casts(command):
            made.append(command)
        elif _is_product(command):
            *rest, last = _cut(command, ranks)
            made += [*rest, held[0], last]
            held = []
        elif len(held) == 1 and _rearranges(command):
            held.append(command)
        else:
            made += [*held, command]
            held = []
    return [*made, *held]


def _behind_the_first_chunk(commands: list[Command], collective: Command, ranks: int) -> None:
    """Add a reduce-scatter, behind the first chunk of the product before it if nothing is between."""
    at = _last_work(commands, len(commands))
    rearranged = at if at >= 0 and _rearranges(commands[at]) else -1
    if rearranged >= 0:
        at = _last_work(commands, at)
    if at < 0 or not _is_product(commands[at]):
        commands.append(collective)
        return
    if rearranged >= 0:
        del commands[rearranged]
    first, *rest = _cut(commands[at], ranks)
    commands[at : at + 1] = [first, collective, *rest]


def _last_work(commands: list[Command], end: int) -> int:
    """Position of the last command before ``end`` that is more than a view; -1 if there is none."""
    at = end - 1
    while at >= 0 and _does_nothing(commands[at]):
        at -= 1
    return at


def _does_nothing(command: Command) -> bool:
    return isinstance(command, Kernel) and command.work is None


def _casts(command: Command) -> bool:
    """Whether a command casts for a float8 product; torchao's parallel layers cast before they gather."""
    return isinstance(command, Kernel) and command.op == "float8_cast"


def _rearranges(command: Command) -> bool:
    """Whether a command only moves elements on the compute stream."""
    return (
        isinstance(command, Kernel)
        and command.stream == 0
        and command.work is not None
        and command.work.kind == "copy"
    )


def _is_product(command: Command) -> bool:
    return isinstance(command, Kernel) and command.work is not None and command.work.kind == "matmul"


def _cut(command: Command, ranks: int) -> list[Command]:
    """Return the chunks of a product, a part of its rows each, with separate waves of tiles."""
    assert isinstance(command, Kernel)
    work = command.work
    assert work is not None
    batch, m, n, k = work.shape
    cuts = [m * part // ranks for part in range(ranks + 1)]
    return [
        replace(
            command,
            work=replace(
                work,
                flops=work.flops * end // m - work.flops * start // m,
                bytes=work.bytes * end // m - work.bytes * start // m,
                shape=(batch, end - start, n, k),
            ),
        )
        for start, end in pairwise(cuts)
        if end > start
    ]


class TensorParallelism(Technique):
    """The ranks of ``tp``, by the model's own plan."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a model without a plan, or one that the plan does not divide."""
        if mesh.tp == 1:
            if policy.sequence_parallel is not None:
                raise ModelError("sequence_parallel needs tensor parallelism: add tp to the mesh")
            return
        plan = model.tensor_parallel
        if plan is None:
            raise ModelError(f"mesh: tp={mesh.tp}: {model.name} {model.no_tensor_parallel}")
        if mesh.ep > 1:
            plan = plan.with_experts_apart(model.experts)
        if policy.sequence_parallel and model.config is None:
            raise ModelError(
                f"sequence_parallel: the plan of {model.name} keeps norms and residuals whole: leave it out"
            )
        if refusal := plan.refusal(mesh.tp):
            raise ModelError(f"mesh: {refusal}")
        if any(isinstance(value, int) for value in values_of(policy.reshard)):
            raise ModelError("reshard to a number of ranks is not supported by FSDP2 with tensor parallelism")
