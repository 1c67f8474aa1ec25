"""The order of a pipeline's work, by torch's own schedules.

``torch.distributed.pipelining`` writes a schedule of several stages a rank down before it runs it: for each
rank the forwards and backwards of its stages, or the two parts of a backward. Here its classes are given
stages without modules, and asked for that order. Of its schedules with one stage a rank, which are loops, the
order is written here. A rank r of P holds the stages r, r + P, r + 2P, ..., or r and 2P - 1 - r in a V.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.pipeline import (
    PipelineSchedule,
    ScheduleRule,
    ZeroBubble,
    schedule_rule,
    stages_of,
)

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")

_ROUNDS = 4
_GATHERED_STAGES = 3

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""A forward, a whole backward, the gradients of a stage's input, those of its weights."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage's work on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int


Order: TypeAlias = tuple[StageWork, ...]
"""The actions of one rank, in order."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Most micro-batches of single stages that are in flight at once on a rank."""

    forwards: int
    """Whose forward has run and whose backward, or the first part of it, has not."""
    weights: int
    """Micro-batches whose weight gradients are the only part still to come."""
    alive: int
    """Whose forward has run and whose backward has not ended."""


@lru_cache(maxsize=1024)
def order_of(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> tuple[Order, ...]:
    """Return the actions of every rank, in order.

    Raises ``ModelError`` for a number of micro-batches that the schedule does not accept.
    """
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(ranks, rank, micro_batches) for rank in range(ranks))
    if schedule == "gpipe":
        return tuple(
            tuple(StageWork(rank, kind, batch) for kind in ("F", "B") for batch in range(micro_batches))
            for rank in range(ranks)
        )
    return _by_torch(schedule_rule(schedule), stages_of(schedule), ranks, micro_batches)


def enough_micro_batches(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> int:
    """Return the smallest number of micro-batches with the same waits, and the same number in flight.

    After :data:`_ROUNDS` whole rounds a schedule repeats itself, except one that runs all forwards first.
    """
    rest = micro_batches % ranks
    if schedule in ("1f1b", "zbv") or not rest:
        return min(micro_batches, _ROUNDS * ranks + rest)
    return micro_batches


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> Order:
    """As in ``Schedule1F1B``: P - r forwards, then a backward and a forward alternately."""
    ahead = min(ranks - rank, micro_batches)
    order = [StageWork(rank, "F", batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        order.append(StageWork(rank, "B", batch))
        if ahead + batch < micro_batches:
            order.append(StageWork(rank, "F", ahead + batch))
    return tuple(order)


def _by_torch(rule: ScheduleRule, stages_per_rank: int, ranks: int, micro_batches: int) -> tuple[Order, ...]:
    """Ask torch's class for its order."""
    from torch.distributed.pipelining import schedules

    known = getattr(schedules, rule.torch_class, None)
    if known is None:
        raise ModelError(f"pp_schedule: this torch has no {rule.torch_class}")
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=index * ranks,
            group=None,
            has_backward=True,
            submod=None,
        )
        for index in range(stages_per_rank)
    ]
    # What the ranks send each other is worked out at length, and not asked for here.
    silent = type(rule.torch_class, (known,), {"_prepare_schedule_with_comms": lambda *_, **__: None})
    try:
        schedule = silent(stages, n_microbatches=micro_batches)
    except ValueError:
        rounds = max(1, micro_batches // ranks)
        raise ModelError(
            f"pp_schedule: {rule.title} over {ranks} ranks has rounds of equally many micro-batches: "
            f"{micro_batches} do not fill {rounds}"
        ) from None
    return tuple(
        tuple(_work(action) for action in schedule.pipeline_order[rank] if action is not None)
        for rank in range(ranks)
    )


def _work(action: object) -> StageWork:
    match = _ACTION.fullmatch(str(action))
    if match is None:
        raise ModelError(f"pp_schedule: torch's schedule has a step that is not modelled: {action}")
    kind: Kind = match[2]  # type: ignore[assignment]
    return StageWork(int(match[1]), kind, int(match[3]))


def rank_of_stage(schedule: PipelineSchedule, ranks: int, stage: int) -> int:
    """Return the rank that holds a stage."""
    around, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule_rule(schedule).is_v and around % 2 else place


def stages_of_rank(schedule: PipelineSchedule, ranks: int, rank: int) -> list[int]:
    """Return the stages that a rank holds."""
    count = ranks * stages_of(schedule)
    return [stage for stage in range(count) if rank_of_stage(schedule, ranks, stage) == rank]


def neighbours_of(schedule: PipelineSchedule, ranks: int, rank: int) -> tuple[int, int]:
    """Return how many of a rank's stages receive from a stage before, and from one after, on other ranks."""
    last, own = ranks * stages_of(schedule) - 1, stages_of_rank(schedule, ranks, rank)
    before = sum(stage > 0 and stage - 1 not in own for stage in own)
    after = sum(stage < last and stage + 1 not in own for stage in own)
    return before, after


def gathered_at(order: Order) -> list[tuple[list[int], list[int]]]:
    """Return the stages to reshard and to gather before each action of a rank with several stages.

    As in torch's ``_add_unshard_reshard``: gathered are the next three that it works on.
    """
    gathered: list[int] = []
    changes = []
    for at in range(len(order)):
        soon = list(dict.fromkeys(work.stage for work in order[at:]))[:_GATHERED_STAGES]
        dropped = [stage for stage in gathered if stage not in soon]
        fetched = [stage for stage in soon if stage not in gathered]
        gathered = [stage for stage in gathered if stage in soon] + fetched
        changes.append((dropped, fetched))
    return changes


@dataclass(frozen=True, slots=True)
class Alike:
    """What decides the commands of a stage's work on a micro-batch.

    A forward leaves its parameters sharded, a backward gathered; the first backward makes the gradients that
    others add to; FSDP prefetches for a backward from the forward before the one that it belongs to.
    """

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
    rest_of: Alike | None
    """Of the weights' part of a backward: what decides the input's part."""


def alike_work(order: Order) -> list[Alike]:
    """Return what decides the commands of each work of a rank's order."""
    before: dict[int, str] = {}
    forwards: dict[int, list[int]] = defaultdict(list)
    made: Counter[int] = Counter()
    inputs: dict[tuple[int, int], Alike] = {}
    ends = {work.stage: at for at, work in enumerate(order)}
    found = []
    for at, (work, changes) in enumerate(zip(order, gathered_at(order), strict=True)):
        stage, kind = work.stage, work.kind
        # The first stage leaves its whole backward for later: it has no input to make a gradient for.
        runs_backward = kind == "B" or kind == ("W" if stage == 0 else "I")
        begins = runs_backward and forwards[stage].pop() == 0
        found.append(
            Alike(
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


def fewest_micro_batches(
    schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int, *, in_memory: bool = False
) -> int:
    """Return the smallest number of micro-batches with which a rank does all kinds of work of a schedule.

    ``in_memory`` asks for as much of it in flight, too, and for all where parts of backwards of several
    stages take turns: the allocator's blocks depend on their order then.
    """
    if in_memory and isinstance(schedule, ZeroBubble):
        return micro_batches
    order = order_of(schedule, ranks, micro_batches)[rank]
    wanted, most = set(alike_work(order)), in_flight(order)
    for count in range(ranks + micro_batches % ranks, micro_batches, ranks):
        fewer = order_of(schedule, ranks, count)[rank]
        if wanted <= set(alike_work(fewer)) and (not in_memory or in_flight(fewer) == most):
            return count
    return micro_batches


def in_flight(order: Order) -> InFlight:
    """Return how much of a rank's work is under way at most, at any time."""
    forwards = weights = 0
    most = InFlight(0, 0, 0)
    for work in order:
        forwards += {"F": 1, "B": -1, "I": -1}.get(work.kind, 0)
        weights += {"I": 1, "W": -1}.get(work.kind, 0)
        most = InFlight(
            max(most.forwards, forwards), max(most.weights, weights), max(most.alive, forwards + weights)
        )
    return most


def waiting_ns(orders: tuple[Order, ...], rank: int, durations_ns: Mapping[Kind, int]) -> int:
    """Return how long a rank waits for others in a step whose stages all take the same time.

    A forward waits for that of the previous stage, a backward for that of the next stage; transfers
    between stages take no time. The first stage has no input to compute gradients for: its weights' part
    is its whole backward, as torch runs it.
    """
    last = max(work.stage for order in orders for work in order)
    done: dict[StageWork, int] = {}
    at = [0] * len(orders)
    clock = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for index, order in enumerate(orders):
            while at[index] < len(order):
                work = order[at[index]]
                ready = _ready(work, last, done)
                if ready is None:
                    break
                clock[index] = max(clock[index], ready) + _lasts(work, durations_ns)
                done[work] = clock[index]
                at[index] += 1
                moved = True
    if any(place < len(order) for place, order in zip(at, orders, strict=True)):
        raise ModelError("pp_schedule: torch's order waits for itself with these micro-batches")
    return max(clock) - sum(_lasts(work, durations_ns) for work in orders[rank])


def _lasts(work: StageWork, durations_ns: Mapping[Kind, int]) -> int:
    if work.stage == 0 and work.kind in ("I", "W"):
        return 0 if work.kind == "I" else durations_ns["B"]
    return durations_ns[work.kind]


def _ready(work: StageWork, last: int, done: Mapping[StageWork, int]) -> int | None:
    """Time when the input of a stage's work is available; None if not known yet."""
    times = [_first_done(work.stage, kinds, work.micro_batch, done) for kinds in _own_needs(work)]
    if work.kind == "F" and work.stage:
        times.append(_first_done(work.stage - 1, ("F",), work.micro_batch, done))
    if work.kind in ("B", "I") and work.stage < last:
        times.append(_first_done(work.stage + 1, ("B", "I"), work.micro_batch, done))
    return None if None in times else max((time for time in times if time is not None), default=0)


def _own_needs(work: StageWork) -> tuple[tuple[Kind, ...], ...]:
    """Work on the same micro-batch that a stage must have done before."""
    if work.kind == "F":
        return ()
    return (("I",),) if work.kind == "W" else (("F",),)


def _first_done(
    stage: int, kinds: tuple[Kind, ...], micro_batch: int, done: Mapping[StageWork, int]
) -> int | None:
    return next((done[work] for kind in kinds if (work := StageWork(stage, kind, micro_batch)) in done), None)
