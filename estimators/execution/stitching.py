"""Predict a deep model's memory from two shallow executions, by repeating the blocks in the middle.

Two executions of a few blocks are made, one a period of blocks deeper than the other (the period is that of
the model's layers, times K under ``every:K`` checkpointing). The shallow one is extended to the depth of the
other and compared with it, event by event. Only if they agree is it extended to the depth asked for;
otherwise a third execution, a period deeper, is compared with the second, and if these differ as well, the
model is executed in full. Sizes outside of the blocks that grow with the depth (a stack of all norms) are
extended linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile, zip_longest
from math import lcm
from typing import TypeVar

import numpy as np

from fsdp2prof.by_key import grouped
from fsdp2prof.estimators.compiler.graphs import Graphs
from fsdp2prof.estimators.config.choices import values_of
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import Execution, execute
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.sharding.wrapping import fold_blocks, names_a_block
from fsdp2prof.estimators.simulate.extend import (
    CannotRepeatError,
    Copy,
    Event,
    Renaming,
    Run,
    Tape,
    Unrolling,
    prefix_of,
)
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.labels import parse_label
from fsdp2prof.manifest import TensorInfo
from fsdp2prof.tables.allocations import AllocationTable, MemoryRecording
from fsdp2prof.tables.columns import NEVER, IntArray, Strings
from fsdp2prof.tables.trace import LabelTable

_TICK_NS = 1000
_EDGE_BLOCKS = 3
"""Blocks at both ends together that differ from those in the middle: the first and the last two."""
ATTEMPTS = 2
"""Comparisons, each of an execution with one a period deeper, before a model is executed in full."""
_FEWEST_RUNGS = 3
"""Fewest runs of a ladder through the blocks of one kind."""


def execute_stitched(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, graphs: Graphs | None = None
) -> tuple[Execution, str]:
    """Execute a model as if in full and describe how: the result and one sentence.

    ``graphs`` and the exceptions are those of :func:`~fsdp2prof.estimators.execution.engine.execute`.
    """
    full = build_model(spec, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    if mesh.pp == 1:
        full = part_of(full, mesh, policy)
    policy = fold_blocks(policy, full.blocks)

    def extended(first: Execution, second: Execution, _: int, period: int) -> Execution | None:
        growth = growth_between(first, second, period)
        if growth is None:
            return None
        return replace(extend(first, full.blocks, period, growth), parameters=full.parameters)

    made, how = run_stitched(
        lambda model: execute(model, mesh, policy, graphs=graphs), extended, spec, mesh, policy, full
    )
    return made, f"all {len(made.blocks)} blocks of the pipeline stage executed" if mesh.pp > 1 else how


_Run = TypeVar("_Run")


def run_stitched(
    run: Callable[[ModelSpec], _Run],
    extended: Callable[[_Run, _Run, int, int], _Run | None],
    spec: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    full: Model,
) -> tuple[_Run, str]:
    """Run a model as if in full, and say how: what ``run`` returns of it, and one sentence.

    ``extended`` makes the run of ``full`` from that of a few blocks and that of a period more, given both
    numbers, or returns ``None`` where these do not repeat. The policy's names are folded already.
    """
    depths, differ = depths_to_execute(spec, mesh, policy, full), ""
    if depths is not None:
        shallow, period = depths
        tried = range(shallow, shallow + ATTEMPTS * period + 1, period)
        runs = (run(spec.with_layers(blocks)) for blocks in tried)
        for blocks, (first, second) in zip(tried, pairwise(runs), strict=False):
            made = extended(first, second, blocks, period)
            if made is not None:
                return made, (
                    f"{blocks} and {blocks + period} blocks executed, found to repeat exactly, "
                    f"and repeated to {len(full.blocks)}"
                )
        differ = ": the middle ones differ"
    return run(spec), f"all {len(full.blocks)} blocks executed{differ}"


def depths_to_execute(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, full: Model
) -> tuple[int, int] | None:
    """Blocks of the shallow execution, and how many the other has more; ``None``: execute all of them.

    ``full`` is the model as built; the policy's names are folded already.
    """
    blocks, period = full.blocks, lcm(policy.ac_every or 1, full.pattern.period)
    prefetches = [*values_of(policy.forward_prefetch), *values_of(policy.backward_prefetch)]
    edge = _EDGE_BLOCKS + 2 * full.pattern.start
    edge += 2 * max(depth for depth in prefetches if isinstance(depth, int))
    edge += 4 * (policy.reduce_scatter_buffers - 1)  # each is held across two more blocks
    shallow = edge + period + (len(blocks) - edge) % period
    repeats = prefix_of(blocks) is not None and spec.kind != "factory" and not policy.other_models
    repeats = repeats and mesh.pp == 1 and not names_a_block(policy, blocks)
    return (shallow, period) if repeats and len(blocks) > 2 * shallow + period else None


def growth_between(shallow: Execution, deeper: Execution, period: int) -> dict[int, int] | None:
    """Bytes by which storages outside the blocks grow per period; ``None`` if more than that differs.

    ``deeper`` has ``period`` blocks more. The keys are rows of ``shallow``'s allocations.
    """
    extension = _extension(shallow, deeper.blocks, period, {})
    if extension is None:
        return None
    mine, theirs = extension.execution.recording, deeper.recording
    if not _same_history(mine, theirs) or not _same_labels(mine, theirs):
        return None
    differs = np.flatnonzero(mine.allocations.size != theirs.allocations.size).tolist()
    if any(extension.repeated[row] for row in differs) or _roles(extension.execution) != _roles(deeper):
        return None
    growth = theirs.allocations.size - mine.allocations.size
    return {extension.origin[row]: int(growth[row]) for row in differs}


def extend(shallow: Execution, blocks: tuple[str, ...], period: int, growth: dict[int, int]) -> Execution:
    """Extend an execution to more blocks, a multiple of ``period`` more, repeating its middle."""
    periods = (len(blocks) - len(shallow.blocks)) // period
    grown = {row: size * periods for row, size in growth.items()}
    extension = _extension(shallow, blocks, period, grown)
    assert extension is not None
    return extension.execution


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extension:
    """An extended execution and where its allocations come from."""

    execution: Execution
    origin: list[int]
    """Row of the shallow execution that each allocation copies."""
    repeated: list[bool]
    """Whether the allocation belongs to a ladder."""


def _extension(
    shallow: Execution, blocks: tuple[str, ...], period: int, growth: dict[int, int]
) -> _Extension | None:
    """Extend to ``blocks``; ``None`` if the tape refers across blocks in a way that cannot be repeated."""
    tape = read_tape(shallow)
    try:
        copies = Unrolling(tape, len(shallow.blocks), len(blocks), period).run()
    except CannotRepeatError:
        return None
    rows = len(shallow.recording.allocations)
    chosen = [copy for copy in copies if copy.origin < rows]
    rename = Renaming(blocks, len(shallow.blocks), period)
    recording = _recording(shallow.recording, copies, rename, growth)
    originals = shallow.recording.allocations.address[[copy.origin for copy in chosen]].tolist()
    tensors = grouped((tensor.address, tensor) for tensor in shallow.tensors)
    return _Extension(
        execution=Execution(
            name=shallow.name,
            parameters=shallow.parameters,
            blocks=blocks,
            recording=recording,
            tensors=[
                _renamed_tensor(tensor, copy, row + 1, rename)
                for row, (address, copy) in enumerate(zip(originals, chosen, strict=True))
                for tensor in tensors.get(address, ())
            ],
            host=frozenset(row + 1 for row, address in enumerate(originals) if address in shallow.host),
            block_of={},
        ),
        origin=[copy.origin for copy in chosen],
        repeated=[copy.repeated for copy in chosen],
    )


def _recording(
    shallow: MemoryRecording, copies: list[Copy], rename: Renaming, growth: dict[int, int]
) -> MemoryRecording:
    """Build the recording of the copies, on a clock that ticks a microsecond an event."""
    allocations, labels, steps = shallow.allocations, shallow.labels, shallow.steps
    rows, names = len(allocations), labels.name.to_list()
    made = [copy for copy in copies if copy.origin < rows]
    ranges = [copy for copy in copies if rows <= copy.origin < rows + len(labels)]
    stepped = [copy for copy in copies if copy.origin >= rows + len(labels)]
    origin = np.array([copy.origin for copy in made], dtype=np.int64)
    birth = np.array([copy.birth for copy in made], dtype=np.int64)
    death = np.array([NEVER if copy.death < 0 else copy.death for copy in made], dtype=np.int64)
    grown = np.array([growth.get(copy.origin, 0) for copy in made], dtype=np.int64)
    taken = allocations.take(origin)
    return replace(
        shallow,
        allocations=taken.with_columns(
            alloc_order=birth,
            free_order=death,
            release_order=death,
            alloc_ns=birth * _TICK_NS,
            free_ns=np.where(death == NEVER, NEVER, np.where(death == NEVER, 0, death) * _TICK_NS),
            address=np.arange(1, len(made) + 1, dtype=np.int64),
            size=taken.size + grown,
        ),
        labels=replace(
            labels,
            thread=np.zeros(len(ranges), dtype=np.int64),
            start_ns=_ticks(copy.birth for copy in ranges),
            end_ns=_ticks(copy.death for copy in ranges),
            name=Strings.intern(rename(names[copy.origin - rows] or "", copy) for copy in ranges),
        ),
        steps=replace(
            steps,
            step=steps.step[[copy.origin - rows - len(labels) for copy in stepped]],
            start_ns=_ticks(copy.birth for copy in stepped),
            end_ns=_ticks(copy.death for copy in stepped),
        ),
        events=2 * len(copies),
        end_ns=2 * len(copies) * _TICK_NS,
    )


def _ticks(times: Iterable[int]) -> IntArray:
    return np.array([time * _TICK_NS for time in times], dtype=np.int64)


def _renamed_tensor(tensor: TensorInfo, copy: Copy, address: int, rename: Renaming) -> TensorInfo:
    return TensorInfo(
        category=tensor.category,
        fqn=rename(tensor.fqn, copy),
        name=rename(tensor.name, copy),
        address=address,
        nbytes=tensor.nbytes,
    )


def _same_history(mine: MemoryRecording, theirs: MemoryRecording) -> bool:
    """Whether two histories have the same births and deaths, streams and operators."""
    ours, other = mine.allocations, theirs.allocations
    return len(ours) == len(other) and (
        np.array_equal(_ranks(ours), _ranks(other))
        and np.array_equal(ours.stream, other.stream)
        and ours.op.to_list() == other.op.to_list()
    )


def _ranks(allocations: AllocationTable) -> IntArray:
    """Positions of births and deaths among each other; orders may have gaps."""
    orders = np.concatenate([allocations.alloc_order, allocations.free_order])
    return np.asarray(np.unique(orders, return_inverse=True)[1], dtype=np.int64)


def _same_labels(mine: MemoryRecording, theirs: MemoryRecording) -> bool:
    """Whether the labels are the same and begin and end between the same allocations and frees."""
    return mine.labels.name.to_list() == theirs.labels.name.to_list() and all(
        np.array_equal(_events_before(mine, ours), _events_before(theirs, other))
        for ours, other in (
            (mine.labels.start_ns, theirs.labels.start_ns),
            (mine.labels.end_ns, theirs.labels.end_ns),
        )
    )


def _events_before(recording: MemoryRecording, times: IntArray) -> IntArray:
    allocations = recording.allocations
    freed = allocations.free_ns[allocations.free_order != NEVER]
    events = np.sort(np.concatenate([allocations.alloc_ns, freed]))
    return np.asarray(np.searchsorted(events, times), dtype=np.int64)


def _roles(execution: Execution) -> tuple[object, ...]:
    row_of = {address: row for row, address in enumerate(execution.recording.allocations.address.tolist())}
    known = sorted((row_of[t.address], t.category, t.fqn, t.name) for t in execution.tensors)
    return known, sorted(row_of[address] for address in execution.host if address in row_of)


def read_tape(execution: Execution) -> Tape:
    """Cut an execution's history into runs and find its ladders."""
    runs = _runs(execution)
    ladders = _mark_ladders(runs, len(execution.blocks), 0)
    runs = _with_gaps_closed(runs)
    _mark_ladders(runs, len(execution.blocks), ladders)
    return Tape(runs)


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
    last_end = prefetched = 0
    phase = ""
    for row, name in enumerate(labels.name.to_list()):
        label = parse_label(name or "")
        if label is None:
            continue
        kind = label.kind
        if kind in ("root_pre_forward", "pre_backward"):
            phase = kind.rpartition("pre_")[2]
        start, end = int(labels.start_ns[row]), int(labels.end_ns[row])
        if " for " in (name or ""):  # a prefetch, inside of what runs before the block
            prefetched = end
        block = None if label.fqn is None else index_of.get(label.fqn)
        if block is None or start < prefetched:
            continue
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
    """End a cell where the next one of its ladder starts, otherwise with its own last label."""
    step = 1 if cell.kind == "pre_forward" else -1
    continues = kind == cell.kind and block == cell.block + step
    return _Cell(cell.kind, cell.block, cell.start, start if continues else last_end)


def _with_gaps_closed(runs: list[Run]) -> list[Run]:
    """Join stretches between two of one block, or of neighbours, to the first of them.

    An optimizer that goes from parameter to parameter allocates tensors in between that belong to no
    block, and frees a block's last temporary after it starts on the next block.
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
