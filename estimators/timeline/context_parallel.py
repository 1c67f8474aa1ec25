"""A program as context parallelism changes it: attention over all of the sequence, while keys travel.

A rank computes the queries of its share of the sequence against the keys of all shares. With the load
balanced over the ring, causal attention does ``cp`` times what the rank's own square would take. Keys and
values of the other ranks arrive while attention runs: it takes as long as the longer of the two.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.estimators.timeline.commands import Collective, Command, Kernel, Program, Wait
from fsdp2prof.estimators.timeline.model_flops import model_flops_of

__all__ = ["with_context_parallel"]

_GROUP = "context parallel"


def with_context_parallel(program: Program, cp: int, kv_elements: int) -> Program:
    """Let every attention of a program see ``cp`` times its keys.

    ``kv_elements``: elements of the keys and values of one micro-batch, all of the sequence, on one rank's
    heads.
    """
    events = 1 + max((command.event for command in program.commands if hasattr(command, "event")), default=0)
    made: list[Command] = []
    for command in program.commands:
        work = command.work if isinstance(command, Kernel) else None
        if work is None or work.kind != "attention" or not isinstance(command, Kernel):
            made.append(command)
            continue
        size = 4 if work.backward else 2  # gradients travel in fp32
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
        made += [ring, replace(command, work=longer), Wait(command.stream, events)]
        events += 1
    added = model_flops_of(made) - model_flops_of(program.commands)
    return replace(program, commands=made, model_flops=program.model_flops + added)
