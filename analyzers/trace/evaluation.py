"""Forwards without a backward (evaluation, generation, an output that is never used), and layers' rate.

The rate is the time from one layer to the next in a recording without step marks.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from operator import attrgetter
from statistics import quantiles

import msgspec
import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.layers import natural_key
from fsdp2prof.analyzers.trace.accounting import PRODUCTS
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.by_key import summed
from fsdp2prof.labels import is_root, parse_label
from fsdp2prof.results.step import LayerPace
from fsdp2prof.tables.columns import BoolArray, IntArray
from fsdp2prof.tables.trace import LabelTable

_NODE = "RegisterPostBackwardFunction"
"""Node of autograd that FSDP2 adds to the inputs of a unit which needs gradients."""
_EMBEDDING = "aten::embedding"
_TAKES_ROWS = {_EMBEDDING: 1, "aten::mm": PRODUCTS["aten::mm"], "aten::addmm": PRODUCTS["aten::addmm"]}
"""Operators whose input has a row for each token, and its position."""
_GROWING = 7
"""Passes in a row with as many more rows each, from which on they grow by what is generated."""
_ENDS_FORWARD = ("post_forward", "cast_forward_outputs")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Forwards without backward of models that are trained."""

    host: Intervals
    """In host time."""
    passes: list[tuple[int, int, int]]
    """Step, begin and end of each that began in a step."""


@dataclass(slots=True)
class _Pass:
    """One forward of a root, while its backward may come."""

    start: int
    end: int
    modules: Counter[str] = field(default_factory=Counter)
    """Each module that it labels, and how often it ran."""


def evaluation(tables: RankTables) -> Evaluation:
    """Return the forwards without a backward.

    A backward belongs to the latest forwards before it that ran its modules, for each module as many as it
    has ``pre_backward`` labels: a head that runs once more for its loss leaves the blocks to the forward
    before. Those with gradients enabled come first, whatever ran after them without. A model of which no
    forward has a backward (a frozen teacher) is not evaluated: it is part of the training, and left out even
    where its modules have the names of a trained model's.
    Where models are updated in turns, a backward may come after another's update.
    Neither is a forward that the recording cuts off from its backward.
    """
    labels = tables.trace.labels
    groups = [] if tables.manifest is None else tables.manifest.param_groups
    frozen = {one.root for one in groups} - {one.root for one in groups if one.requires_grad}
    trained: set[str] = set()
    open_ones: list[_Pass] = []
    current: _Pass | None = None
    in_backward, before, updated, in_turns = False, 0, 0, False
    backward: Counter[str] = Counter()
    nodes = graph_nodes(tables)
    finished = -1  # labels inside the final callback belong to the backward that it ends
    for start, end, kind, fqn in _ordered(labels, frozen):
        if start < finished:
            continue
        if kind == "root_post_backward_callback":
            if in_backward:
                in_turns |= _match(open_ones, backward, updated, nodes)
                trained |= set(backward)
            in_backward, backward, current, finished = False, Counter(), None, end
        elif "backward" in kind:
            in_backward, current = True, None
            if kind == "pre_backward" and fqn is not None:
                backward[fqn] += 1
        elif in_backward or kind in ("optimizer", "root"):
            if kind == "optimizer":
                current, before, updated = None, updated, start
        elif kind == "root_pre_forward":
            current = _Pass(start, end)
            open_ones.append(current)
        elif current is not None and fqn is not None:
            current.modules[fqn] += kind == "pre_forward"
            current.end = max(current.end, end)
        elif current is not None and kind in _ENDS_FORWARD:
            current.end = max(current.end, end)
    if in_backward:
        _match(open_ones, backward, updated, nodes)
        trained |= set(backward)
    if in_turns:  # backward of the last step's forwards may come in a step that is not recorded
        open_ones = [one for one in open_ones if one.start < before]
    last = open_ones[-1].start if open_ones and not in_backward else None
    left = [
        one
        for one in open_ones
        if _alike(trained, one.modules) and not (one.start == last and _is_cut_off(tables, one))
    ]
    starts = np.array([one.start for one in left], dtype=np.int64)
    ends = np.array([one.end for one in left], dtype=np.int64)
    rows = intervals.containing(tables.steps.start_ns, tables.steps.end_ns, starts)
    passes = [
        (int(tables.steps.step[row]), one.start, one.end)
        for row, one in zip(rows.tolist(), left, strict=True)
        if row >= 0
    ]
    return Evaluation(intervals.union(starts, ends), passes)


def keeps_graph(tables: RankTables, start: IntArray, end: IntArray) -> BoolArray:
    """Whether each pass ran with gradients enabled: FSDP2 puts a node of its own in the graph then."""
    nodes = graph_nodes(tables)
    kept: BoolArray = np.searchsorted(nodes, end) > np.searchsorted(nodes, start)
    return kept


def graph_nodes(tables: RankTables) -> IntArray:
    """When each FSDP unit whose inputs need gradients ran forward."""
    events = tables.trace.events
    return np.sort(events.start_ns[events.name.equals(_NODE)])


def repeated_rows(tables: RankTables, passes: Sequence[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """Return step -> rows (tokens) that passes compute, and those of them that an earlier pass computed.

    The rows of a pass are those of its first product or embedding. Where each of many passes has as many more
    than the one before, as in generation without a cache, its first rows are those of the one before.
    """
    events, shapes = tables.trace.events, tables.trace.shapes
    known = np.flatnonzero(events.name.take(shapes.event).matches(_TAKES_ROWS.__contains__))
    begins = events.start_ns[shapes.event[known]]
    found: dict[int, list[int]] = defaultdict(list)
    for step, start, end in passes:
        first = int(np.searchsorted(begins, start))
        if first < len(known) and begins[first] < end:
            row = int(known[first])
            found[step].append(_rows(events.name[int(shapes.event[row])] or "", shapes.dims[row] or "[]"))
    return {step: (sum(rows), _again(rows)) for step, rows in found.items()}


def _rows(name: str, dims: str) -> int:
    factor = msgspec.json.decode(dims)[_TAKES_ROWS[name]]
    if not isinstance(factor, list) or not all(isinstance(size, int) for size in factor):
        return 0
    return prod(factor if name == _EMBEDDING else factor[:-1])


def _again(rows: Sequence[int]) -> int:
    """Sum the rows that were there in the pass before, in runs that grow evenly."""
    more = [later - earlier for earlier, later in pairwise(rows)]
    total, first = 0, 0
    for at in range(len(more) + 1):
        if at == len(more) or more[at] != more[first]:
            if at > first and more[first] > 0 and at - first >= _GROWING:
                total += sum(rows[first:at])
            first = at
    return total


def _alike(modules: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two passes share modules: the root's name is the same in every model."""
    one, other = set(modules), set(others)
    return bool((one - {""} or one) & (other - {""} or other))


def _is_cut_off(tables: RankTables, one: _Pass) -> bool:
    """Whether the recording ends with a forward, so that its backward may be missing."""
    work = tables.work
    return not len(work) or int(work.launch_ns.max()) <= one.end or not len(tables.steps)


def _match(open_ones: list[_Pass], backward: Counter[str], updated: int, nodes: IntArray) -> bool:
    """Take away the forwards that a backward belongs to: those with ``nodes`` of a graph, the latest first.

    Returns whether one of them came before the last ``updated``: models are updated in turns.
    """
    if not backward:
        return False
    in_turns = False
    left = Counter(backward)
    begins, ends = ([at(one) for one in open_ones] for at in (attrgetter("start"), attrgetter("end")))
    bare = np.searchsorted(nodes, begins) == np.searchsorted(nodes, ends)
    order = sorted(range(len(open_ones)), key=lambda at: (bool(bare[at]), -at))
    for one in [open_ones[at] for at in order]:
        if _alike(left, one.modules):
            open_ones.remove(one)
            in_turns |= one.start < updated
            left -= Counter({module: max(1, count) for module, count in one.modules.items()})
    return in_turns


def _ordered(labels: LabelTable, frozen: Collection[int]) -> list[tuple[int, int, str, str | None]]:
    """Return FSDP's labels in time order, without those of frozen roots: start, end, kind, module."""
    parsed = [parse_label(name) for name in labels.name.values]
    known = np.array([label is not None for label in parsed] + [False], dtype=np.bool_)
    rows = np.flatnonzero(known[labels.name.codes])
    rows = rows[np.argsort(labels.start_ns[rows], kind="stable")]
    found = []
    left_out = -1
    for row in rows.tolist():
        label = parsed[int(labels.name.codes[row])]
        assert label is not None
        start, end = int(labels.start_ns[row]), int(labels.end_ns[row])
        if label.kind == "root" and label.root in frozen:
            left_out = max(left_out, end)
        if start >= left_out:
            found.append((start, end, label.kind, label.fqn))
    return found


_ENOUGH = 3
"""Intervals from which quartiles say something."""


def layer_paces(tables: RankTables) -> list[LayerPace] | None:
    """Return the time from one forward of repeated layers to the next; None if windows are whole steps.

    A recording without step marks is complete if it holds complete passes: it begins with a root's
    forward, and every layer ran forward equally often. Otherwise its length is that of the capture, not of
    a step. Without FSDP labels this is unknown, and the list is empty.
    """
    if len(tables.steps):
        return None
    labels = tables.trace.labels
    parsed = [parse_label(name) for name in labels.name.values]
    begins: list[tuple[int, str]] = []
    first: str | None = None
    for row in np.argsort(labels.start_ns, kind="stable").tolist():
        label = parsed[int(labels.name.codes[row])]
        if label is None:
            continue
        first = first or label.kind
        if label.kind in ("pre_forward", "module_forward") and label.fqn and not is_root(label.fqn):
            begins.append((int(labels.start_ns[row]), label.fqn))
    counts = summed((fqn, 1) for _, fqn in begins)
    if first == "root_pre_forward" and len(set(counts.values())) == 1:
        return None
    found = (_pace(tables, begins, layer, names) for layer, names in _families(counts).items())
    return [pace for pace in found if pace is not None]


def _families(names: Iterable[str]) -> dict[str, list[str]]:
    """Return layers that differ in one number, by their name with a star there: ``block.*.layer.0``."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=natural_key):
        for number in re.finditer(r"\d+", name):
            found[f"{name[: number.start()]}*{name[number.end() :]}"].append(name)
    return found


def _pace(
    tables: RankTables, begins: Sequence[tuple[int, str]], layer: str, names: Sequence[str]
) -> LayerPace | None:
    position = {name: i for i, name in enumerate(names)}
    mine = [(start, position[fqn]) for start, fqn in begins if fqn in position]
    work = tables.work.take(~(tables.work.is_fsdp | tables.work.is_memcpy))
    order = np.argsort(work.launch_ns, kind="stable")
    rows = np.searchsorted(work.launch_ns[order], [start for start, _ in mine])
    started = [int(work.start_ns[order[row]]) if row < len(order) else None for row in rows.tolist()]
    times = [
        later - earlier
        for (earlier, one), (later, other) in pairwise(
            zip(started, (place for _, place in mine), strict=True)
        )
        if earlier is not None and later is not None and other == one + 1 and later > earlier
    ]
    if len(times) < _ENOUGH:
        return None
    lower, middle, upper = quantiles(times, n=4, method="inclusive")
    return LayerPace(
        layer=layer,
        intervals=len(times),
        median_ns=middle,
        lower_quartile_ns=lower,
        upper_quartile_ns=upper,
    )
