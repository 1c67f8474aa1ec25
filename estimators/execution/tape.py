"""An execution as one sequence of events, cut into the stretches that repeat from block to block.

Every allocation, label and step is a *thing* that is born and dies; the tape lists births and deaths in
order. A *run* is a stretch of the tape that belongs to one block or to none. Consecutive runs of blocks 0, 1,
2, ... (or backwards) form a *ladder*: the blocks' forward, their backward, the optimizer's work on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile, zip_longest

import numpy as np

from fsdp2prof.estimators.execution.engine import Execution
from fsdp2prof.labels import parse_label
from fsdp2prof.tables import NEVER, LabelTable

__all__ = ["Event", "Run", "Tape", "read_tape"]

_FEWEST_RUNGS = 3
"""Of a ladder through the blocks of one kind."""


@dataclass(frozen=True, slots=True)
class Event:
    """A thing is born or dies. Things are numbered: allocations by row, then labels, then steps."""

    thing: int
    birth: bool


@dataclass(slots=True)
class Run:
    """A stretch of the tape; ``ladder`` is null outside of every ladder."""

    key: object
    block: int | None
    events: list[Event]
    ladder: int | None = None


@dataclass(frozen=True, slots=True)
class Tape:
    """Runs in order, and where each thing is born: run, and how many are born in it before.

    Deaths do not count, since what blocks of a kind share dies in one of them.
    """

    runs: list[Run]
    births: dict[int, tuple[int, int]]


def read_tape(execution: Execution) -> Tape:
    """Cut an execution's history into runs and find its ladders."""
    runs = _runs(execution)
    ladders = _mark_ladders(runs, len(execution.blocks), 0)
    runs = _with_gaps_closed(runs)
    _mark_ladders(runs, len(execution.blocks), ladders)
    births = {
        event.thing: (index, position)
        for index, run in enumerate(runs)
        for position, event in enumerate(event for event in run.events if event.birth)
    }
    return Tape(runs, births)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A block's forward or backward on the host's clock, from its first label to the next block's."""

    kind: str
    block: int
    start: int
    end: int


def _runs(execution: Execution) -> list[Run]:
    cells = _cells(execution.recording.labels, execution.blocks)
    starts = np.array([cell.start for cell in cells], dtype=np.int64)
    addresses = execution.recording.allocations.address.tolist()
    block_of: dict[int, int | None] = {
        thing: execution.block_of.get(address) for thing, address in enumerate(addresses)
    }
    runs: list[Run] = []
    for time, event in _events(execution):
        at = int(np.searchsorted(starts, time, side="right")) - 1
        inside = at >= 0 and time < cells[at].end
        if inside and event.birth:
            block_of[event.thing] = cells[at].block
        block = cells[at].block if inside else block_of.get(event.thing)
        key = at if inside else ("own", block, event.birth)
        if not runs or runs[-1].key != key:
            runs.append(Run(key, block, []))
        runs[-1].events.append(event)
    return runs


def _events(execution: Execution) -> Iterator[tuple[int, Event]]:
    """Yield the births and deaths of all things in order, with their time."""
    recording = execution.recording
    allocations, labels, steps = recording.allocations, recording.labels, recording.steps
    births = [allocations.alloc_ns, labels.start_ns, steps.start_ns]
    deaths = [allocations.free_ns, labels.end_ns, steps.end_ns]
    rows, marks = len(allocations), len(labels) + len(steps)
    thing = np.arange(rows + marks)
    dies = np.concatenate([allocations.free_order != NEVER, np.ones(marks, dtype=np.bool_)])
    times = np.concatenate([*births, np.concatenate(deaths)[dies]])
    # Among equal times allocations and frees keep their own order, between the labels that begin and end.
    order = np.concatenate([allocations.alloc_order, np.full(marks, -1)])
    order_of_death = np.concatenate([allocations.free_order, np.full(marks, NEVER)])[dies]
    ranks = np.concatenate([order, order_of_death])
    things = np.concatenate([thing, thing[dies]]).tolist()
    for index in np.lexsort((ranks, times)).tolist():
        yield int(times[index]), Event(things[index], index < len(thing))


def _cells(labels: LabelTable, blocks: tuple[str, ...]) -> list[_Cell]:
    """Find every block's forwards and backwards from the labels that begin them."""
    index_of = {fqn: index for index, fqn in enumerate(blocks)}
    found: list[_Cell] = []
    last_end = 0
    phase = ""
    for row, name in enumerate(labels.name.to_list()):
        label = parse_label(name or "")
        if label is None:
            continue
        kind = label.kind
        if kind in ("root_pre_forward", "pre_backward"):
            phase = kind.rpartition("pre_")[2]
        block = None if label.fqn is None or " for " in (name or "") else index_of.get(label.fqn)
        if block is None:
            continue
        start, end = int(labels.start_ns[row]), int(labels.end_ns[row])
        again = bool(found) and (found[-1].kind, found[-1].block) == (kind, block)  # its experts' group
        if kind == f"pre_{phase}" and not again:  # a forward recomputed in backward begins no cell
            if found:
                found[-1] = _closed(found[-1], kind, block, start, last_end)
            found.append(_Cell(kind, block, start, NEVER))
        last_end = end
    if found:
        found[-1] = _closed(found[-1], "", -1, NEVER, last_end)
    return found


def _closed(cell: _Cell, kind: str, block: int, start: int, last_end: int) -> _Cell:
    """End a cell where the next one of its ladder starts, else with its own last label."""
    step = 1 if cell.kind == "pre_forward" else -1
    continues = kind == cell.kind and block == cell.block + step
    return _Cell(cell.kind, cell.block, cell.start, start if continues else last_end)


def _with_gaps_closed(runs: list[Run]) -> list[Run]:
    """Join what lies between two stretches of one block, or of neighbours, to the first of them.

    An optimizer that goes from parameter to parameter makes things in between that belong to none, and frees
    a block's last temporary when it already works on the next block.
    """
    joined: list[Run] = []
    for run, following in zip_longest(runs, runs[1:]):
        if joined and _continues(joined[-1], run, following):
            joined[-1].events.extend(run.events)
        else:
            joined.append(run)
    return joined


def _continues(before: Run, run: Run, following: Run | None) -> bool:
    if before.block is None or before.ladder is not None or run.ladder is not None:
        return False
    if run.block == before.block:
        return True
    if following is None or following.block is None or following.ladder is not None:
        return False
    if run.block is None:
        return abs(following.block - before.block) <= 1
    return following.block == before.block and not any(event.birth for event in run.events)


def _mark_ladders(runs: list[Run], blocks: int, ladders: int) -> int:
    """Number, from ``ladders`` on, every sequence of runs that goes through the blocks up or down.

    Through all of them, or through those of one kind: every d-th block from one of the first on.
    """
    index = 0
    while index < len(runs):
        length = _ladder_length(runs, index, blocks)
        for run in runs[index : index + length]:
            run.ladder = ladders
        ladders += length > 0
        index += max(length, 1)
    return ladders


def _ladder_length(runs: list[Run], index: int, blocks: int) -> int:
    """Rungs of the ladder that begins with a run, 0 if none does."""
    free = [run.block for run in runs[index : index + blocks] if run.ladder is None]
    if free in (list(range(blocks)), list(range(blocks - 1, -1, -1))):
        return blocks
    climbed = [block for block in takewhile(lambda block: block is not None, free) if block is not None]
    if len(climbed) < _FEWEST_RUNGS:
        return 0
    step = climbed[1] - climbed[0]
    pairs = pairwise(climbed)
    length = 1 + sum(1 for _ in takewhile(lambda pair: pair[1] - pair[0] == step, pairs))
    low, high = sorted((climbed[0], climbed[length - 1]))
    reaches_both = step != 0 and low < max(abs(step), _FEWEST_RUNGS) and high + abs(step) >= blocks
    return length if reaches_both and length >= _FEWEST_RUNGS else 0
