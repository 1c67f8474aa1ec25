"""The order of a pipeline's work, by torch's own schedules.

``torch.distributed.pipelining`` writes an interleaved schedule down before it runs it: for each rank the
forwards and backwards of its stages. Here its classes are given stages without modules, and asked for that
order. A rank r of P holds the stages r, r + P, r + 2P, ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from fsdp2prof.errors import ModelError

__all__ = ["StageWork", "interleaved_order", "most_in_flight", "waiting_ns"]

_ACTION = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, slots=True)
class StageWork:
    """One forward or backward of one stage's micro-batch."""

    stage: int
    backward: bool
    micro_batch: int


@lru_cache(maxsize=256)
def interleaved_order(
    ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[StageWork, ...], ...]:
    """Return what every rank does, in order, under interleaved 1F1B.

    Raises ``ModelError`` for a number of micro-batches that the schedule does not take.
    """
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=index * ranks,
            group=None,
            has_backward=True,
        )
        for index in range(stages_per_rank)
    ]
    try:
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=micro_batches)
    except ValueError:
        rounds = max(1, micro_batches // ranks)
        raise ModelError(
            f"pp_schedule: interleaved 1F1B over {ranks} ranks has rounds of equally many micro-batches: "
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
    return StageWork(int(match[1]), match[2] == "B", int(match[3]))


def most_in_flight(order: tuple[StageWork, ...]) -> int:
    """Return the most forwards of single stages whose backward has not run, at any time on one rank."""
    alive = most = 0
    for work in order:
        alive += -1 if work.backward else 1
        most = max(most, alive)
    return most


def waiting_ns(
    orders: tuple[tuple[StageWork, ...], ...], rank: int, forward_ns: int, backward_ns: int
) -> int:
    """Return how long a rank waits for others in a step whose stages all take equally long.

    A forward waits for that of the stage before, a backward for that of the stage after; what stages send
    each other takes no time.
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
                clock[index] = max(clock[index], ready) + (backward_ns if work.backward else forward_ns)
                done[work] = clock[index]
                at[index] += 1
                moved = True
    own = sum(backward_ns if work.backward else forward_ns for work in orders[rank])
    return max(clock) - own


def _ready(work: StageWork, last: int, done: dict[StageWork, int]) -> int | None:
    """When what a stage's work needs is there; None while it is not known."""
    if work.backward:
        needs = [StageWork(work.stage, False, work.micro_batch)]
        if work.stage < last:
            needs.append(StageWork(work.stage + 1, True, work.micro_batch))
    else:
        needs = [StageWork(work.stage - 1, False, work.micro_batch)] if work.stage else []
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0)
