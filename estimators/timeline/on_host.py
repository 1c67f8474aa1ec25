"""A program on a CPU: the host computes every operator itself, and a collective blocks it until it is over.

So FSDP2 runs on gloo: its streams do nothing, and nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    HostWait,
    Kernel,
    Leave,
    Program,
)
from fsdp2prof.estimators.simulate.streams import Timeline
from fsdp2prof.estimators.timeline.as_trace import STEP, Rows, groups_of, inputs_of, metadata_of, table_of
from fsdp2prof.tables.trace import Trace

_ISSUES = {
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_reduce": "c10d::allreduce_",
}
_RUNS = {
    "all_gather": "gloo:all_gather",
    "reduce_scatter": "gloo:all_reduce",
    "all_reduce": "gloo:all_reduce",
}
_WORKER = 1


def blocking(program: Program) -> Program:
    """Return the program as a CPU runs it; unchanged commands are the same objects."""
    made: list[Command] = []
    for event, command in enumerate(program.commands):
        if isinstance(command, Collective):
            made.append(replace(command, stream=0, event=event))
            made.append(HostWait(0, event, "wait"))
        elif isinstance(command, (Kernel, Enter, Leave)):
            made.append(command)
    return replace(program, commands=made, streams=1)


def host_trace_of(
    program: Program,
    timeline: Timeline,
    computing_ns: Callable[[Command], int],
    *,
    source: str,
    world_size: int,
) -> Trace:
    """Return the trace that a profiler would have written of a simulated step on a CPU.

    ``computing_ns`` is the part of the host's time for a command that its operator takes, at the end.
    """
    rows = Rows()
    opened: list[tuple[str, int]] = []
    sequence: dict[str, int] = {}
    issued: tuple[int, Collective] | None = None
    host, host_end = timeline.host_ns.tolist(), timeline.host_end_ns.tolist()
    start, end = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    for position, command in enumerate(program.commands):
        if isinstance(command, Enter):
            opened.append((command.name, host[position]))
        elif isinstance(command, Leave):
            name, since = opened.pop()
            rows.host(name, "user_annotation", since, host_end[position])
        elif isinstance(command, Kernel):
            computes = computing_ns(command)
            if computes:
                begin, inputs = host_end[position] - computes, inputs_of(command)
                rows.host(command.op, "cpu_op", begin, host_end[position], inputs=inputs)
        elif isinstance(command, Collective):
            issued = position, command
        elif isinstance(command, HostWait) and issued is not None:
            at, collective = issued
            args: dict[str, Any] = metadata_of(collective, sequence)
            name = _ISSUES.get(collective.op, f"c10d::{collective.op}_")
            rows.host(name, "cpu_op", host[at], host_end[position], args=args)
            runs = _RUNS.get(collective.op, f"gloo:{collective.op}")
            rows.host(runs, "user_annotation", start[at], end[at], args=args, thread=_WORKER)
            issued = None
    rows.host(f"ProfilerStep#{STEP}", "user_annotation", 0, max(host_end, default=0))
    return table_of(rows.rows, groups_of(program, "gloo"), source, world_size, "cpu", "")
