"""Classifies compute by kernel names and by the inputs of the operators that launch the kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.recorded_groups import ignored_labels
from fsdp2prof.analyzers.trace.accounting import ATTENTION, PRODUCTS, WorkTable, outermost
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.routing import of_all_experts
from fsdp2prof.backends import KERNEL_KINDS, KERNEL_PATTERNS, PRODUCT_KERNEL, moves_memory
from fsdp2prof.by_key import summed
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings
from fsdp2prof.tables.trace import EventTable

_AROUND = {"aten::_softmax": 1, "aten::_softmax_backward_data": 2}
"""Softmax operator -> number of matrix products on each side that belong to the same attention."""


def _autograd(*names: str) -> frozenset[str]:
    return frozenset(f"autograd::engine::evaluate_function: {name}Backward0" for name in names)


_SLICES = _autograd("Slice", "Select")
_ADDS = frozenset({"aten::add", "aten::add_"})
_ONE_HOT = "aten::one_hot"
_AS_IT_IS = frozenset(
    f"aten::{name}"
    for name in ("to", "_to_copy", "t", "transpose", "permute", "view", "reshape", "flatten", "unsqueeze",
                 "expand", "contiguous", "clone", "alias", "detach", "swapaxes", "mT", "_unsafe_view")
)  # fmt: skip
"""Operators that leave a matrix what it is but for its type, shape and place."""
_ATTENTION = "aten::scaled_dot_product_attention"
_MASK = 3
"""Position of its mask."""
_PRODUCT, _FACTORS = "aten::mm", 2
_LOSS, _LOSS_BACKWARD = "aten::nll_loss_forward", "aten::_log_softmax_backward_data"
_SHIFTED = 1.25
"""Times as many positions as the loss has that logits may have: the last one of a sample has no label."""
_FEW = 4
"""Times as many positions as a loss takes, of which logits are computed."""
_SUM_INPUTS = 3
"""Recorded inputs of a sum over some dimensions, at least; one over all has the tensor and a type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Operators that store a tensor many times as large as either input, only to sum it."""

    first: str
    between: frozenset[str] = frozenset()
    """Elementwise operators on the way to the sum, of which one is needed if there are any."""
    nodes: frozenset[str]
    """Autograd's ranges that work on tensors of the same size."""


_SUM = "aten::sum"
_STORED = {
    "contraction": _Stored(first="aten::mul", nodes=_autograd("Mul")),
    "distances": _Stored(
        first="aten::sub",
        between=frozenset(f"aten::{name}" for name in ("pow", "square", "abs", "mul")),
        nodes=_autograd("Pow", "Abs", "Mul", "Sub"),
    ),
}
_EXPANDED = 8
"""Times that a product is larger than either of its factors, from which on storing it is most of the work."""
_MEAN, _WITH_HEADS = "aten::mean", 4
"""Averages attention weights of this many dimensions over the heads."""
_Scores = tuple[int, int, int]
"""Scores of a batch's heads, of each query, of each key."""
_LEAST = 64
"""Least number of queries and of keys for a softmax input to count as attention scores."""


def kinds_of_compute(tables: RankTables, work: WorkTable) -> IntArray:
    """Return the position in ``KERNEL_KINDS`` of each activity, -1 for all others."""
    names = tables.trace.events.name.take(work.event)
    found = np.full(len(work), -1, dtype=np.int64)
    products = names.matches(lambda name: name in PRODUCTS or PRODUCT_KERNEL.search(name) is not None)
    update = tables.phases.phase.lookup(work.phase_row).equals("optimizer")
    found[products & update] = KERNEL_KINDS.index("update")
    if len(tables.device):
        found[names.matches(moves_memory)] = KERNEL_KINDS.index("memory")
    found[_with_a_mask(tables, work)] = KERNEL_KINDS.index("masked")
    scores, returned = _score_shapes(tables)
    if len(tables.device):
        found[_with_scores(tables, work, scores - returned)] = KERNEL_KINDS.index("scores")
    found[_with_scores(tables, work, returned)] = KERNEL_KINDS.index("returned_weights")
    found[_of_slices(tables, work)] = KERNEL_KINDS.index("sliced")
    if len(tables.device):
        for kind, pattern in KERNEL_PATTERNS.items():
            found[names.matches(partial(_matches, pattern))] = KERNEL_KINDS.index(kind)
    found[_in_double(tables, work)] = KERNEL_KINDS.index("float64")
    found[_with_one_hot(tables, work)] = KERNEL_KINDS.index("one_hot")
    found[_of_logits(tables, work)] = KERNEL_KINDS.index("ignored")
    found[_of_unused_logits(tables, work)] = KERNEL_KINDS.index("unused_logits")
    found[_of_frozen_gradients(tables, work)] = KERNEL_KINDS.index("frozen_gradient")
    found[of_all_experts(tables, work)] = KERNEL_KINDS.index("all_experts")
    for kind, stored in _STORED.items():
        found[_of_stored(tables, work, stored)] = KERNEL_KINDS.index(kind)
    return found


@lru_cache(maxsize=1 << 15)
def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.search(name) is not None


def _in_double(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity is of an operator that takes a tensor in float64.

    A tensor of no dimension does not count: it leaves the result in the type of the others.
    """
    shapes, events = tables.trace.shapes, tables.trace.events
    rows = np.flatnonzero(shapes.types.matches(lambda types: "double" in types))
    rows = rows[events.name.take(shapes.event[rows]).matches(lambda name: name.startswith("aten::"))]
    inputs = zip(shapes.types.take(rows).to_list(), shapes.dims.take(rows).to_list(), strict=True)
    event = shapes.event[rows[np.array([_takes_double(*one) for one in inputs], dtype=np.bool_)]]
    return _launched_in(events, event, work)


def _launched_in(events: EventTable, event: IntArray, work: WorkTable) -> BoolArray:
    """Return whether the work was launched within one of these host events, by its own thread."""
    found = np.zeros(len(work), dtype=np.bool_)
    for thread in intervals.distinct(events.thread[event]):
        mine = event[events.thread[event] == thread]
        spans = intervals.union(events.start_ns[mine], events.end_ns[mine])
        at = np.flatnonzero(work.thread == thread)
        found[at] = intervals.containing(spans.start, spans.end, work.launch_ns[at]) >= 0
    return found


@lru_cache(maxsize=4096)
def _takes_double(types: str | None, dims: str | None) -> bool:
    kinds: list[Any] = msgspec.json.decode(types or "[]")
    return any(
        "double" in kind and isinstance(shape, list) and len(shape) > 0
        for kind, shape in zip(kinds, msgspec.json.decode(dims or "[]"), strict=False)
    )


def _with_one_hot(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity makes a one-hot matrix that the next operator multiplies, or multiplies it.

    Products of backward are known by the size of the matrix.
    """
    events, sizes = tables.trace.events, set[tuple[int, ...]]()
    operators = np.flatnonzero(events.name.matches(lambda name: name.startswith("aten::")))
    made = operators[events.name.take(operators).equals(_ONE_HOT)]
    found = np.zeros(len(work), dtype=np.bool_)
    for thread in intervals.distinct(events.thread[made]) if len(made) else ():
        rows = outermost(events, operators[events.thread[operators] == thread])
        names = events.name.take(rows)
        begins = np.flatnonzero(names.equals(_ONE_HOT))
        takers = np.append(np.flatnonzero(~names.matches(_AS_IT_IS.__contains__)), len(rows))
        ends = takers[np.searchsorted(takers, begins, side="right")]
        pairs = []
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            factors = _multiplied(tables, int(rows[first]), int(rows[last])) if last < len(rows) else []
            if factors:
                pairs.append((rows[first], rows[last]))
                sizes |= {size for one in factors for size in (tuple(one), tuple(one[::-1]))}
        first, last = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        spans = intervals.union(events.start_ns[first], events.end_ns[last])
        at = np.flatnonzero(work.thread == thread)
        found[at] = intervals.containing(spans.start, spans.end, work.launch_ns[at]) >= 0
    if sizes:
        backward = tables.phases.phase.lookup(work.phase_row).equals("backward")
        found |= _launched_in(events, _products_with(tables, sizes), work) & backward
    return found


def _products_with(tables: RankTables, sizes: Container[tuple[int, ...]]) -> IntArray:
    """Return the products of two matrices of which one has any of some sizes."""
    shapes = tables.trace.shapes
    rows = np.flatnonzero(tables.trace.events.name.take(shapes.event).equals(_PRODUCT))
    taking = [any(one in sizes for one in _shapes(dims)) for dims in shapes.dims.take(rows).to_list()]
    return shapes.event[rows[np.array(taking, dtype=np.bool_)]]


def _multiplied(tables: RankTables, making: int, taking: int) -> list[list[int]]:
    """Return the factors of the second of two operators that are the matrix which the first makes."""
    scattered = [shapes[0] for _, shapes in _calls_in(tables, making, {"aten::scatter_"}) if shapes]
    if not scattered or len(scattered[0]) < 2:
        return []
    size, classes = prod(scattered[0]), scattered[0][-1]
    return [
        factor
        for name, shapes in _calls_in(tables, taking, PRODUCTS)
        for factor in shapes[PRODUCTS[name] :][:2]
        if prod(factor) == size and classes in factor[-2:]
    ]


def _calls_in(
    tables: RankTables, operator: int, names: Container[str]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield name and recorded shapes of an operator itself and those inside that have one of some names."""
    events, shapes = tables.trace.events, tables.trace.shapes
    begins = events.start_ns[shapes.event]
    first, last = np.searchsorted(begins, (events.start_ns[operator], events.end_ns[operator]))
    for row in range(int(first), int(last)):
        event = int(shapes.event[row])
        name = events.name[event]
        if name is not None and name in names and events.thread[event] == events.thread[operator]:
            yield name, _tensors(shapes.dims[row] or "[]")


def _of_stored(tables: RankTables, work: WorkTable, kind: _Stored) -> BoolArray:
    """Whether each activity stores a tensor of two expanded ones that is then summed, or their gradients.

    ``(a.unsqueeze(i) * b.unsqueeze(j)).sum(k)`` is a matrix product, and ``(a - b).pow(2).sum(k)`` needs
    one. Backward computes tensors of the same size again, and sums them for each of the two.
    """
    events, shapes = tables.trace.events, tables.trace.shapes
    names = events.name.take(shapes.event)
    rows = np.flatnonzero(names.matches({kind.first, *kind.between, _SUM}.__contains__))
    dims = dict(zip(shapes.event[rows].tolist(), shapes.dims.take(rows).to_list(), strict=True))
    pairs = list(_then_summed(tables, dims, kind))
    stored = {size for _, _, size in pairs}
    nodes = np.flatnonzero(events.name.matches(kind.nodes.__contains__)) if stored else rows[:0]
    large = [event for event, sizes in dims.items() if not stored.isdisjoint(_shapes(sizes))]
    event = np.array(large, dtype=np.int64)
    found = np.zeros(len(work), dtype=np.bool_)
    for thread in intervals.distinct(events.thread[event]):
        mine = nodes[events.thread[nodes] == thread]
        mine = mine[np.argsort(events.start_ns[mine], kind="stable")]
        inside = events.start_ns[event[events.thread[event] == thread]]
        nth = intervals.containing(events.start_ns[mine], events.end_ns[mine], inside)
        mine = mine[intervals.distinct(nth[nth >= 0])]
        here = [(first, last) for first, last, _ in pairs if events.thread[first] == thread]
        first, last = np.array(here, dtype=np.int64).reshape(-1, 2).T
        spans = intervals.union(
            np.concatenate([events.start_ns[first], events.start_ns[mine]]),
            np.concatenate([events.end_ns[last], events.end_ns[mine]]),
        )
        at = np.flatnonzero(work.thread == thread)
        found[at] = intervals.containing(spans.start, spans.end, work.launch_ns[at]) >= 0
    return found


def _then_summed(
    tables: RankTables, dims: dict[int, str | None], kind: _Stored
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield each operator on expanded tensors, the sum of its result that comes next, and its size."""
    events = tables.trace.events
    large = [event for event, sizes in dims.items() if _expanded(sizes or "[]") is not None]
    firsts = np.array(large, dtype=np.int64)
    firsts = firsts[events.name.take(firsts).equals(kind.first)]
    operators = np.flatnonzero(events.name.matches(lambda name: name.startswith("aten::")))
    for thread in intervals.distinct(events.thread[firsts]):
        rows = outermost(events, operators[events.thread[operators] == thread])
        rows = rows[~events.name.take(rows).matches(_AS_IT_IS.__contains__)]
        starts = np.flatnonzero(np.isin(rows, firsts))
        for at in starts.tolist():
            last = at + (2 if kind.between else 1)
            if last >= len(rows) or (kind.between and events.name[int(rows[at + 1])] not in kind.between):
                continue
            size, summing = _expanded(dims[int(rows[at])] or "[]"), int(rows[last])
            if events.name[summing] == _SUM and size == _summed(dims.get(summing) or "[]") and size:
                yield int(rows[at]), summing, size


@lru_cache(maxsize=4096)
def _shapes(dims: str | None) -> list[tuple[int, ...]]:
    return [tuple(one) for one in _tensors(dims or "[]")]


@lru_cache(maxsize=4096)
def _expanded(dims: str) -> tuple[int, ...] | None:
    """Return the shape of a product that is many times as large as either factor; None of others."""
    factors = _shapes(dims)
    if len(factors) != 2:
        return None
    try:
        product = np.broadcast_shapes(*factors)
    except ValueError:
        return None
    return product if prod(product) >= _EXPANDED * max(map(prod, factors)) > 0 else None


@lru_cache(maxsize=4096)
def _summed(dims: str) -> tuple[int, ...] | None:
    """Return the shape of what a sum over some dimensions takes; None of a sum of everything."""
    inputs: list[Any] = msgspec.json.decode(dims)
    return next(iter(_shapes(dims)), None) if len(inputs) >= _SUM_INPUTS else None


def _of_slices(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity belongs to the gradient of a slice that autograd adds to that of another.

    Backward of ``x[i]`` and ``x[a:b]`` fills a tensor as large as ``x``; autograd adds it in the same range.
    """
    events = tables.trace.events
    nodes = np.flatnonzero(events.name.matches(_SLICES.__contains__))
    found = np.zeros(len(work), dtype=np.bool_)
    if not len(nodes):
        return found
    adds = np.flatnonzero(events.name.matches(_ADDS.__contains__))
    for thread in intervals.distinct(events.thread[nodes]):
        mine = nodes[events.thread[nodes] == thread]
        mine = mine[np.argsort(events.start_ns[mine], kind="stable")]
        ranges = events.start_ns[mine], events.end_ns[mine]
        added = intervals.containing(*ranges, events.start_ns[adds[events.thread[adds] == thread]])
        joins = np.isin(np.arange(len(mine)), added)
        at = np.flatnonzero(work.thread == thread)
        row = intervals.containing(*ranges, work.launch_ns[at])
        found[at] = (row >= 0) & joins[row]
    return found


def _with_a_mask(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity is of attention with a boolean mask of all pairs that samples and heads share."""
    events, shapes = tables.trace.events, tables.trace.shapes
    names = events.name.take(shapes.event)
    rows = np.flatnonzero(names.equals(_ATTENTION))
    tokens = [
        _masked_tokens(*one)
        for one in zip(shapes.dims.take(rows).to_list(), shapes.types.take(rows).to_list(), strict=True)
    ]
    masks = {(one, one) for one in tokens if one}
    forward = shapes.event[rows[np.array([one > 0 for one in tokens], dtype=np.bool_)]]
    rows = np.flatnonzero(names.matches(_is_backward)) if masks else rows[:0]
    taking = [any(one[-2:] in masks for one in _shapes(shapes.dims[row])[3:]) for row in rows.tolist()]
    event = np.concatenate([forward, shapes.event[rows[np.array(taking, dtype=np.bool_)]]])
    return _launched_in(events, event, work)


def _is_backward(name: str) -> bool:
    attention = ATTENTION.fullmatch(name)
    return attention is not None and attention[1] is not None


@lru_cache(maxsize=4096)
def _masked_tokens(dims: str | None, types: str | None) -> int:
    """Return the tokens of self-attention with a boolean mask for all samples and heads; 0 of any other."""
    inputs: list[Any] = msgspec.json.decode(dims or "[]")
    kinds: list[Any] = msgspec.json.decode(types or "[]")
    if len(inputs) <= _MASK or len(kinds) <= _MASK or kinds[_MASK] != "bool":
        return 0
    query, key, mask = inputs[0], inputs[1], inputs[_MASK]
    if not all(isinstance(one, list) and len(one) > 1 for one in (query, key, mask)):
        return 0
    tokens: int = query[-2]
    square = tokens >= _LEAST and key[-2] == tokens and mask[-2:] == [tokens, tokens]
    return tokens if square and prod(mask[:-2]) == 1 else 0


def _of_frozen_gradients(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity is of the product that computes the gradient of a frozen matrix in backward.

    Gradients (out, tokens) times activations (tokens, in) have the shape of the weight. A product whose inner
    size is that of a parameter beside either outer size may be another one, and does not count.
    """
    events, shapes = tables.trace.events, tables.trace.shapes
    weights = (
        [one for group in tables.manifest.param_groups for one in group.parameters] if tables.manifest else []
    )
    trained = {tuple(one.global_shape) for one in weights if one.requires_grad}
    frozen = {tuple(one.global_shape) for one in weights if not one.requires_grad} - trained
    if not trained or not frozen:
        return np.zeros(len(work), dtype=np.bool_)
    rows = np.flatnonzero(events.name.take(shapes.event).equals(_PRODUCT))
    sizes = [_shapes(one) for one in shapes.dims.take(rows).to_list()]
    mine = np.array([makes_gradient(one, frozen, trained) for one in sizes], dtype=np.bool_)
    backward = tables.phases.phase.lookup(work.phase_row).equals("backward")
    return _launched_in(events, shapes.event[rows[mine]], work) & backward


def makes_gradient(
    factors: list[tuple[int, ...]], wanted: Container[tuple[int, ...]], known: Container[tuple[int, ...]]
) -> bool:
    """Whether a product of two matrices has a wanted shape, and neither factor has a known or wanted one."""
    if len(factors) != _FACTORS or any(len(one) != _FACTORS for one in factors):
        return False
    (rows, inner), (_, columns) = factors
    sides = [(rows, inner), (inner, rows), (inner, columns), (columns, inner)]
    made = [(rows, columns), (columns, rows)]
    return any(one in wanted for one in made) and not any(one in wanted or one in known for one in sides)


def _of_logits(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity computes logits, their loss or gradients, where the loss ignores most labels.

    A loss of few more positions than have labels may be of these alone.
    """
    labels = None if tables.manifest is None else ignored_labels(tables.manifest)
    if labels is None:
        return np.zeros(len(work), dtype=np.bool_)
    selected = _SHIFTED * labels.positions * (1 - labels.ignored_frac)
    shapes = tables.trace.shapes
    names = tables.trace.events.name.take(shapes.event)
    losses = shapes.dims.take(np.flatnonzero(names.equals(_LOSS))).to_list()
    scores = [one[0] for one in map(_shapes, losses) if one and len(one[0]) == _FACTORS]
    logits = frozenset(one for one in scores if one[0] > selected)
    if not logits:
        return np.zeros(len(work), dtype=np.bool_)
    rows = np.flatnonzero(shapes.dims.matches(partial(has_logits, logits)))
    rows = rows[names.take(rows).matches(lambda name: name.startswith("aten::"))]
    return _launched_in(tables.trace.events, shapes.event[rows], work)


def has_logits(logits: frozenset[tuple[int, ...]], dims: str) -> bool:
    """Whether an input or the product of two has the size of some logits, or a few positions more."""
    inputs = [one for one in _shapes(dims) if len(one) > 1]
    made = [(one[0], other[-1]) for one, other in pairwise(inputs) if one[-1] == other[0]]
    turned = [(one[1], one[0]) for one in (*inputs, *made) if len(one) == _FACTORS]
    return any(
        one[-1] == classes and positions <= prod(one[:-1]) <= _SHIFTED * positions
        for one in (*inputs, *made, *turned)
        for positions, classes in logits
    )


def _of_unused_logits(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity computes logits of which the loss takes few positions, or their gradients.

    Backward says which logits have a loss: the weight's gradient is a product with all of them. A product of
    the loss's own positions is the head; then others with as many columns are not.
    """
    shapes = tables.trace.shapes
    names = tables.trace.events.name.take(shapes.event)
    losses, made = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for gradient, count in _first_shapes(shapes.dims.take(np.flatnonzero(names.equals(_LOSS_BACKWARD)))):
        if len(gradient) == _FACTORS:
            losses[gradient[0], gradient[1]] += count * gradient[0]
    taken = summed((classes, positions) for (_, classes), positions in losses.items())
    rows = np.flatnonzero(names.equals(_PRODUCT)) if taken else np.empty(0, dtype=np.int64)
    for gradient, count in _first_shapes(shapes.dims.take(rows)):
        if len(gradient) == _FACTORS and gradient[0] in taken:
            made[gradient[1], gradient[0]] += count * gradient[1]
    computed = summed((classes, positions) for (_, classes), positions in made.items())
    few = {classes for classes, positions in computed.items() if taken[classes] * _FEW <= positions}
    few -= {classes for _, classes in losses.keys() & made.keys()}
    logits = frozenset(size for size in made if size[1] in few)
    if not logits:
        return np.zeros(len(work), dtype=np.bool_)
    rows = np.flatnonzero(shapes.dims.matches(partial(has_logits, logits)))
    return _launched_in(tables.trace.events, shapes.event[rows], work)


def _first_shapes(dims: Strings) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the shape of the first input of each distinct row, and how many rows have it."""
    codes, counts = np.unique(dims.codes[dims.codes >= 0], return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        yield next(iter(_shapes(dims.values[code])), ()), count


def _score_shapes(tables: RankTables) -> tuple[set[_Scores], set[_Scores]]:
    """Return the shapes of attention scores, and of those whose weights are averaged over their heads.

    The softmax input is the scores, (..., queries, keys). ``nn.MultiheadAttention`` averages the weights,
    (batch, heads, queries, keys), to return them.
    """
    shapes = tables.trace.shapes
    names = tables.trace.events.name.take(shapes.event)

    def inputs(matching: BoolArray) -> Iterator[list[int]]:
        dims = set(shapes.dims.take(np.flatnonzero(matching)).to_list())
        return (one for one in map(_scores, dims) if one is not None)

    scores = set(map(_flat, inputs(names.matches(_AROUND.__contains__))))
    if not scores:
        return scores, scores
    averaged = {_flat(one) for one in inputs(names.equals(_MEAN)) if len(one) == _WITH_HEADS}
    return scores, scores & averaged


def _with_scores(tables: RankTables, work: WorkTable, scores: set[_Scores]) -> BoolArray:
    """Whether each activity was launched between the two matrix products around an attention's softmax.

    One product computes the ``scores`` and the other uses them, with the leading dimensions flattened;
    scaling, masking, casts and dropout run in between.
    """
    events, shapes = tables.trace.events, tables.trace.shapes
    names = events.name.take(shapes.event)
    found = np.zeros(len(work), dtype=np.bool_)
    if not scores:
        return found
    near = shapes.dims.matches(partial(_touches, scores))
    near &= names.matches(lambda name: name in _AROUND or name in PRODUCTS)
    rows = np.flatnonzero(near)
    for thread in intervals.distinct(events.thread[shapes.event[rows]]):
        mine = rows[events.thread[shapes.event[rows]] == thread]
        mine = mine[np.argsort(events.start_ns[shapes.event[mine]], kind="stable")]
        ends = np.array([*_attentions(names.take(mine).to_list())], dtype=np.int64).reshape(-1, 2)
        event = shapes.event[mine]
        spans = intervals.union(events.start_ns[event[ends[:, 0]]], events.end_ns[event[ends[:, 1]]])
        at = np.flatnonzero(work.thread == thread)
        found[at] = intervals.containing(spans.start, spans.end, work.launch_ns[at]) >= 0
    return found


def _attentions(names: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yield the positions of the first and last operator around each softmax; names are in launch order."""
    for at, name in enumerate(names):
        products = _AROUND.get(name or "", 0)
        if products:
            before = [name in _AROUND for name in names[max(0, at - products) : at]]
            after = [name in _AROUND for name in names[at + 1 : at + 1 + products]]
            if not any(before) and not any(after):
                yield at - len(before), at + len(after)


def _scores(dims: str | None) -> list[int] | None:
    tensors = _tensors(dims or "[]")
    shape = tensors[0] if tensors else []
    return shape if len(shape) > 2 and min(shape[-2:]) >= _LEAST else None


def _tensors(dims: str) -> list[list[int]]:
    """Return the recorded shapes of an operator's inputs."""
    inputs: list[Any] = msgspec.json.decode(dims)
    return [one for one in inputs if isinstance(one, list) and one and all(isinstance(n, int) for n in one)]


def _flat(shape: list[int]) -> _Scores:
    return prod(shape[:-2]), shape[-2], shape[-1]


def _touches(scores: set[_Scores], dims: str) -> bool:
    """Whether an input, or the product of the last two, has the shape of the scores or its transpose."""
    shapes = [_flat(one) for one in _tensors(dims) if len(one) > 2]
    known = scores | {(batch, keys, queries) for batch, queries, keys in scores}
    if any(one in known for one in shapes):
        return True
    return len(shapes) > 1 and (shapes[-2][0], shapes[-2][1], shapes[-1][2]) in known
