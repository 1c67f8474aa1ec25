"""A pipeline's step of many micro-batches from one of few: the work of the schedule that is alike, repeated.

What a stage issues for a micro-batch depends on what it did before: a forward leaves its parameters sharded,
a backward gathered; the first backward makes the gradients that others add to; FSDP prefetches for a backward
from the forward before the one that it belongs to. So a schedule of so few micro-batches is executed that all
work of the whole one has its like in it, and each work of the whole one is a copy of that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.extend import CannotRepeatError
from fsdp2prof.estimators.simulate.extend_commands import renumbered
from fsdp2prof.estimators.simulate.program import Collective, Command, Enter, Record
from fsdp2prof.estimators.techniques.pipeline_order import Order, StageWork, gathered_at, order_of
from fsdp2prof.labels import PIPELINE_ACTION

_ACTION = re.compile(rf"({re.escape(PIPELINE_ACTION)}\d+[A-Z])\d+")


@dataclass(frozen=True, slots=True)
class _Alike:
    """What decides the commands of a stage's work on a micro-batch."""

    stage: int
    kind: str
    before: str | None
    """Kind of the stage's work before it."""
    made: int
    """Gradients of the stage's weights that were made before: none, those that are added to, or more."""
    last: bool
    """The stage does nothing after it but reduce its gradients."""
    begins: bool
    """A backward that FSDP takes for that of the stage's first forward: it counts them down from the last."""
    changes: tuple[tuple[int, ...], ...]
    """Stages that are resharded and gathered before it."""
    rest_of: _Alike | None
    """Of the weights' part of a backward: what decides the input's part."""


_Segments: TypeAlias = dict[_Alike, list[Command]]


def fewer_micro_batches(mesh: MeshSpec, policy: PolicySpec) -> PolicySpec:
    """Return the policy with as few micro-batches as have all kinds of work of its own schedule.

    Equal to ``policy`` without a pipeline.
    """
    if mesh.pp == 1:
        return policy
    wanted = set(_alike(_order(mesh, policy)))
    for count in range(mesh.pp + policy.pipelined % mesh.pp, policy.pipelined, mesh.pp):
        fewer = replace(policy, grad_accum=count * policy.pp_runs)
        if wanted <= set(_alike(_order(mesh, fewer))):
            return fewer
    return policy


def with_all_micro_batches(
    commands: Sequence[Command], begins: Sequence[int], mesh: MeshSpec, fewer: PolicySpec, policy: PolicySpec
) -> list[Command]:
    """Return the commands of a step of ``policy`` from those of one with ``fewer`` micro-batches.

    ``begins`` are the positions at which each work of its schedule begins, and where the schedule ends, run
    by run. Raises ``CannotRepeatError`` if work that should be alike is not.
    """
    executed, order = _order(mesh, fewer), _order(mesh, policy)
    alike, each = _alike(executed), len(executed) + 1
    made, at, events = list(commands[: begins[0]]), begins[0], 0
    events = _events(made)
    for run in range(policy.pp_runs):
        edges = begins[run * each : (run + 1) * each]
        segments: _Segments = {}
        for key, start, end in zip(alike, edges[:-1], edges[1:], strict=True):
            own = _unnamed(renumbered(commands[start:end]))
            if segments.setdefault(key, own) != own:
                raise CannotRepeatError
        for key, work in zip(_alike(order), order, strict=True):
            made += _named(renumbered(segments[key], events), work)
            events += _events(segments[key])
        at = edges[-1]
    rest = renumbered(commands[at:], events)
    return [*made, *rest]


def _order(mesh: MeshSpec, policy: PolicySpec) -> Order:
    return order_of(policy.pp_schedule, mesh.pp, policy.pipelined)[policy.pp_stage]


def _alike(order: Order) -> list[_Alike]:
    before: dict[int, str] = {}
    forwards: dict[int, list[int]] = defaultdict(list)
    made: Counter[int] = Counter()
    inputs: dict[tuple[int, int], _Alike] = {}
    ends = {work.stage: at for at, work in enumerate(order)}
    found = []
    for at, (work, changes) in enumerate(zip(order, gathered_at(order), strict=True)):
        stage, kind = work.stage, work.kind
        # The first stage leaves its whole backward for later: it has no input to make a gradient for.
        runs_backward = kind == "B" or kind == ("W" if stage == 0 else "I")
        begins = runs_backward and forwards[stage].pop() == 0
        found.append(
            _Alike(
                stage=stage,
                kind=kind,
                before=before.get(stage),
                made=min(made[stage], 2),
                last=at == ends[stage],
                begins=begins,
                changes=tuple(map(tuple, changes)),
                rest_of=inputs.get((stage, work.micro_batch)) if kind == "W" else None,
            )
        )
        if kind == "I":
            inputs[stage, work.micro_batch] = found[-1]
        if kind == "F":
            forwards[stage].append(work.micro_batch)
        made[stage] += kind in "BW"
        if stage or kind != "I":
            before[stage] = kind
    return found


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
