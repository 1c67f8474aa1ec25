"""A pipeline's step of many micro-batches from one of few: the work of the schedule that is alike, repeated.

A schedule of so few micro-batches is executed that all work of the whole one has its like in it, and each of
these is a copy of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.extend import CannotRepeatError
from fsdp2prof.estimators.simulate.extend_commands import renumbered
from fsdp2prof.estimators.simulate.program import Collective, Command, Enter, Record
from fsdp2prof.estimators.techniques.pipeline_order import (
    Alike,
    Order,
    StageWork,
    alike_work,
    fewest_micro_batches,
    order_of,
)
from fsdp2prof.labels import PIPELINE_ACTION

_ACTION = re.compile(rf"({re.escape(PIPELINE_ACTION)}\d+[A-Z])\d+")


_Segments: TypeAlias = dict[Alike, list[Command]]


def fewer_micro_batches(mesh: MeshSpec, policy: PolicySpec) -> PolicySpec:
    """Return the policy with as few micro-batches as have all kinds of work of its own schedule.

    Equal to ``policy`` without a pipeline.
    """
    if mesh.pp == 1:
        return policy
    count = fewest_micro_batches(policy.pp_schedule, mesh.pp, policy.pp_stage, policy.pipelined)
    return replace(policy, grad_accum=count * policy.pp_runs)


def with_all_micro_batches(
    commands: Sequence[Command], begins: Sequence[int], mesh: MeshSpec, fewer: PolicySpec, policy: PolicySpec
) -> list[Command]:
    """Return the commands of a step of ``policy`` from those of one with ``fewer`` micro-batches.

    ``begins`` are the positions at which each work of its schedule begins, and where the schedule ends, run
    by run. Raises ``CannotRepeatError`` if work that should be alike is not.
    """
    executed, order = _order(mesh, fewer), _order(mesh, policy)
    alike, each = alike_work(executed), len(executed) + 1
    made = renumbered(commands[: begins[0]])
    events = _events(made)
    for run in range(policy.pp_runs):
        edges = begins[run * each : (run + 1) * each]
        segments: _Segments = {}
        for key, start, end in zip(alike, edges[:-1], edges[1:], strict=True):
            own = _unnamed(renumbered(commands[start:end]))
            if segments.setdefault(key, own) != own:
                raise CannotRepeatError
        for key, work in zip(alike_work(order), order, strict=True):
            made += _named(renumbered(segments[key], events), work)
            events += _events(segments[key])
    return [*made, *renumbered(commands[begins[-1] :], events)]


def _order(mesh: MeshSpec, policy: PolicySpec) -> Order:
    return order_of(policy.pp_schedule, mesh.pp, policy.pipelined)[policy.pp_stage]


def _events(commands: Sequence[Command]) -> int:
    return sum(isinstance(one, (Record, Collective)) and one.event >= 0 for one in commands)


def _unnamed(commands: Sequence[Command]) -> list[Command]:
    """Leave the micro-batch out of the label of a schedule's action."""
    return [
        Enter(_ACTION.sub(r"\1", one.name)) if isinstance(one, Enter) and _ACTION.fullmatch(one.name) else one
        for one in commands
    ]


def _named(commands: Sequence[Command], work: StageWork) -> Iterator[Command]:
    action = f"{PIPELINE_ACTION}{work.stage}{work.kind}"
    for one in commands:
        is_action = isinstance(one, Enter) and one.name == action
        yield Enter(f"{action}{work.micro_batch}") if is_action else one
