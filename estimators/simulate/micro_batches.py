"""A step of many micro-batches from one of three: the middle one's commands and times, repeated.

The first micro-batch begins with streams that the optimizer left, the last may reduce what all of them
accumulated; those between do the same after each other. So three are captured and simulated, and the middle
one is repeated for all that are left out, each as much later as the last one begins after it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.program import Program, ends_of_backward
from fsdp2prof.estimators.simulate.streams import Timeline
from fsdp2prof.tables.columns import IntArray

CAPTURED_MICRO_BATCHES = 3
"""Most that are executed without a pipeline, for memory as for time: the first, one between, the last."""


def captured_policy(mesh: MeshSpec, policy: PolicySpec) -> PolicySpec:
    """Return the policy to capture: of many micro-batches three; a pipeline's schedule is captured whole."""
    if mesh.pp > 1 or policy.grad_accum <= CAPTURED_MICRO_BATCHES:
        return policy
    return replace(policy, grad_accum=CAPTURED_MICRO_BATCHES)


def for_all_micro_batches(program: Program, policy: PolicySpec, captured: PolicySpec) -> Program:
    """Return the program of a policy, captured with fewer micro-batches, with its tokens and its work."""
    more = policy.grad_accum - captured.grad_accum
    if not more:
        return program
    return replace(
        program,
        left_out=more,
        tokens=program.tokens * policy.grad_accum // captured.grad_accum,
        model_flops=program.model_flops * policy.grad_accum // captured.grad_accum,
    )


def with_all_commands(program: Program) -> Program:
    """Return a program with the commands of every micro-batch; to count them, not to simulate."""
    if not program.left_out:
        return program
    first, middle, _ = _ends_of_backwards(program)
    commands = program.commands
    return replace(
        program,
        commands=[*commands[:middle], *commands[first:middle] * program.left_out, *commands[middle:]],
        left_out=0,
    )


def repeated(program: Program, timeline: Timeline) -> tuple[Program, Timeline]:
    """Put the micro-batches that were left out into a program and its times; for a trace, not to simulate.

    Events keep the numbers of the micro-batch that is repeated.
    """
    if not program.left_out:
        return program, timeline
    first, middle, last = _ends_of_backwards(program)
    later = np.arange(1, program.left_out + 1)
    shared = min(middle - first, last - middle)  # the forwards are alike, and begin both

    def period(times: IntArray) -> int:
        ours, theirs = times[first : first + shared], times[middle : middle + shared]
        both = (ours >= 0) & (theirs >= 0)
        return int(np.median((theirs - ours)[both][: max(1, int(both.sum()) // 3)])) if both.any() else 0

    host, device = period(timeline.host_ns), period(timeline.start_ns)

    def longer(times: IntArray, step: int) -> IntArray:
        again = np.tile(times[first:middle], len(later)) + np.repeat(later * step, middle - first)
        again = np.where(np.tile(times[first:middle], len(later)) < 0, -1, again)
        rest = np.where(times[middle:] < 0, -1, times[middle:] + len(later) * step)
        return np.concatenate([times[:middle], again, rest])

    return (
        with_all_commands(program),
        Timeline(
            host_ns=longer(timeline.host_ns, host),
            host_end_ns=longer(timeline.host_end_ns, host),
            start_ns=longer(timeline.start_ns, device),
            end_ns=longer(timeline.end_ns, device),
        ),
    )


def _ends_of_backwards(program: Program) -> list[int]:
    """Positions after each of three micro-batches."""
    return [end + 1 for end in ends_of_backward(program.commands)]
