"""A program as context parallelism changes it: attention over all of the sequence, while keys travel.

A rank computes the queries of its share of the sequence against the keys of all shares. With the load
balanced over the ring, causal attention does ``cp`` times what the rank's own square would take. Keys and
values of the other ranks arrive while attention runs: it takes as long as the longer of the two.

What each of the ``cp`` parts returns is merged in float32, as torch's ring attention does (``_SDPAMerger``
and ``_templated_ring_attention_backward`` in ``torch.distributed.tensor.experimental``): counted is what the
ring's last rank does, which merges whole outputs, and for which the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Kernel,
    Program,
    Wait,
    Work,
    model_flops_of,
)
from fsdp2prof.estimators.techniques.technique import About, Technique

_GROUP = "context parallel"
_NARROW, _WIDE = 2, 4
"""Bytes of an element in attention's dtype (bfloat16 or float16), and in that of the merge."""


class ContextParallel(Technique):
    """Attention around a ring (``cp``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a model whose attention cannot run so."""
        if mesh.cp > 1 and not model.ring_width:
            raise ModelError(f"mesh: cp={mesh.cp}: {model.name} {model.no_ring}")

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Attend to the keys of all ranks, while they travel."""
        if mesh.cp == 1:
            return program
        share = model.ring_share(mesh.tp, repeat_kv=policy.repeat_kv)
        elements = policy.sequences * policy.seq_len * share
        fused = policy.compile and program.guessed_fusion is None
        return with_context_parallel(program, mesh.cp, elements, fused=fused)

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """Effects left out of memory, and the costs of the ring."""
        if about == "memory" and mesh.cp > 1:
            ring = "not counted in compiled blocks" if policy.compile else "all-gathered for each attention"
            yield (
                f"context parallelism as analysed: each rank runs its {policy.seq_len // mesh.cp} of "
                f"{policy.seq_len} tokens; keys and values of the other ranks are {ring}"
            )
        elif about == "step" and mesh.cp > 1:
            yield "context parallelism: causal work balanced over the ring, keys and values overlapped"


def with_context_parallel(program: Program, cp: int, kv_elements: int, *, fused: bool) -> Program:
    """Let every attention of a program see ``cp`` times its keys.

    ``kv_elements``: elements of the keys and values of one micro-batch, all of the sequence, on one rank's
    heads. ``fused``: the blocks were captured compiled, so that a merge is one kernel.
    """
    events = 1 + max((command.event for command in program.commands if hasattr(command, "event")), default=0)
    made: list[Command] = []
    for command in program.commands:
        work = command.work if isinstance(command, Kernel) else None
        if work is None or work.kind != "attention" or not isinstance(command, Kernel):
            made.append(command)
            continue
        size = _WIDE if work.backward else _NARROW  # gradients travel in fp32
        elements = kv_elements * (2 if work.backward else 1)
        dtype = "float32" if work.backward else work.dtype
        ring = Collective(
            stream=command.stream,
            op="all_gather",
            group=_GROUP,
            mesh_dim="cp",
            group_size=cp,
            dtype=dtype,
            nelems_in=elements // cp,
            nelems_out=elements,
            payload_bytes=elements * size,
            event=events,
        )
        batch, heads, queries, keys, *depths = work.shape
        longer = replace(work, flops=work.flops * cp, shape=(batch, heads, queries, keys * cp, *depths))
        merges = ring_merges(work, cp, kv_elements // cp, fused=fused)
        made += [ring, replace(command, work=longer)]
        made += [Kernel(command.stream, op, merge) for op, merge in merges]
        made.append(Wait(command.stream, events))
        events += 1
    added = model_flops_of(made) - model_flops_of(program.commands)
    return replace(program, commands=made, model_flops=program.model_flops + added)


def ring_merges(work: Work, cp: int, kv: int, *, fused: bool) -> list[tuple[str, Work]]:
    """Operators around the parts of one attention in a ring of ``cp`` ranks.

    ``work``: the attention, whose batch, heads, queries and depths are looked at. ``kv``: elements of
    one rank's keys and values. The sums of exponents, one a row, are left out.
    """
    batch, heads, queries, _, depth, *rest = work.shape
    width = depth if work.backward or len(rest) < 2 else rest[1]
    rows = batch * heads * queries * width
    moved = _backward(rows, cp, kv) if work.backward else _forward(rows, cp, kv, fused=fused)
    return [(op, Work(kind="pointwise", dtype="float32", bytes=size)) for op, size in moved]


def _forward(rows: int, cp: int, kv: int, *, fused: bool) -> list[tuple[str, int]]:
    """Operators and the bytes that each moves; ``rows``: elements of attention's output."""
    packed = [("cat", 2 * _NARROW * kv)] * (cp - 1)
    cast = ("to", (_NARROW + _WIDE) * rows)
    merged = [("sub", 3 * _WIDE * rows), ("mul", 2 * _WIDE * rows), ("sub", 3 * _WIDE * rows)]
    later = [("fused", (_WIDE + _NARROW + _WIDE) * rows)] if fused else [cast, *merged]
    return [*packed, cast, *later * (cp - 1), cast]


def _backward(rows: int, cp: int, kv: int) -> list[tuple[str, int]]:
    """The same; its sums are one kernel each, compiled or not. ``rows``: elements of the queries."""
    packed = [("cat", 2 * _NARROW * kv)] * (cp - 1)
    added = _WIDE + _NARROW + _WIDE  # a float32 sum, what is added to it, the new sum
    first = [("zeros", _WIDE * (rows + kv)), ("add", added * kv), ("add", added * rows)]
    # Of a later part the gradients of half the keys are added, and the halves joined again.
    later = [("add", added * kv // 2), ("cat", 2 * _WIDE * kv), ("add", added * rows)]
    sent = [("cat", 2 * _WIDE * kv)] * cp
    narrowed = [("to", (_WIDE + _NARROW) * (rows + kv))]
    return [*packed, *first, *later * (cp - 1), *sent, *narrowed]
