"""Experts that compute all tokens although a router chooses some for each, by the shapes of products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.accounting import PRODUCTS, WorkTable
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.columns import BoolArray, IntArray

ALL_EXPERTS, CHOSEN = "all_experts", "chosen"
"""Reasons of charges that count experts."""
_TOP, _SCATTER = "aten::topk", "aten::scatter_"
_INDEX = 2
"""Position of the index among the inputs of ``scatter_``."""
_STACKED = 3
"""Dimensions of the weights of all experts in one parameter."""
_NUMBER = re.compile(r"\d+")
_NONE = -2
"""Unlike the code of any phase."""
_Shape = tuple[int, int]
_Size = tuple[int, int, int]
"""Tokens and both sizes of a weight, sorted: a product and those of its backward have the same three."""


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice for each of its tokens."""

    tokens: int
    experts: int
    chosen: int


def all_computed(tables: RankTables) -> Routing | None:
    """Return the routing of experts that each compute all tokens; None where there are none.

    Experts are weights of one shape that a unit has once for each column that ``topk`` chooses from. How many
    it chooses is the width of the indices that backward scatters gradients with, or the script its weights.
    A forward of all experts multiplies as many tokens as the router took with every weight of that shape.
    """
    routings = _routings(tables) if tables.manifest is not None else {}
    weights = _weights_of_experts(tables.manifest) if routings and tables.manifest is not None else {}
    for routing, times in routings.items():
        shapes = weights.get(routing.experts, {})
        if any(_forwards(tables, routing, one) >= times * count for one, count in shapes.items()):
            return routing
    return None


def experts_and_chosen(tables: RankTables) -> Iterator[tuple[str, int]]:
    """Yield how many experts compute all tokens, and how many are chosen, if there are any."""
    routing = all_computed(tables)
    if routing is not None:
        yield ALL_EXPERTS, routing.experts
        yield CHOSEN, routing.chosen


def of_all_experts(tables: RankTables, work: WorkTable) -> BoolArray:
    """Whether each activity is launched between the products of experts that compute all tokens."""
    found = np.zeros(len(work), dtype=np.bool_)
    routing = all_computed(tables)
    if routing is None or tables.manifest is None:
        return found
    weights = _weights_of_experts(tables.manifest)[routing.experts]
    sizes = {_sorted(routing.tokens, *shape) for shape in weights}
    events, phases = tables.trace.events, tables.phases
    event, dims = _products(tables)
    calls = np.array([_calls(one, sizes, routing.experts) for one in dims], dtype=np.int64)
    phase = phases.phase.lookup(find_rows(phases, events.thread[event], events.start_ns[event])).codes
    for thread in intervals.distinct(events.thread[event]):
        here = np.flatnonzero(events.thread[event] == thread)
        here = here[np.argsort(events.start_ns[event[here]], kind="stable")]
        run = np.where(calls[here] > 0, phase[here], _NONE)
        begins = np.append(0, np.flatnonzero(np.diff(run)) + 1)
        ends = np.append(begins[1:], len(run)) - 1
        long = np.add.reduceat(calls[here], begins) >= routing.experts
        first, last = event[here[begins[long]]], event[here[ends[long]]]
        at = np.flatnonzero(work.thread == thread)
        inside = intervals.containing(events.start_ns[first], events.end_ns[last], work.launch_ns[at])
        found[at] = inside >= 0
    return found


def _weights_of_experts(manifest: RankManifest) -> dict[int, dict[_Shape, int]]:
    """Return experts -> shape of their weights, the smaller size first -> all weights of it in their unit.

    Experts are parameters that differ in a number of their name, or one with a dimension for them.
    """
    found: dict[int, dict[_Shape, int]] = {}
    for group in manifest.param_groups:
        alike: Counter[tuple[str, _Shape]] = Counter()
        in_all: Counter[_Shape] = Counter()
        for one in group.parameters:
            *stack, least, most = *one.global_shape[:-2], *sorted((1, 1, *one.global_shape)[-2:])
            weights = prod(stack)
            in_all[least, most] += weights
            names = [one.fqn[: at.start()] + one.fqn[at.end() :] for at in _NUMBER.finditer(one.fqn)]
            for name in [one.fqn] if stack else names:
                alike[name, (least, most)] += weights
        for (_, shape), count in alike.items():
            if count > 1:
                found.setdefault(count, {})[shape] = in_all[shape]
    return found


def _routings(tables: RankTables) -> Counter[Routing]:
    """Count the routers' choices in forward."""
    events, phases, shapes = tables.trace.events, tables.phases, tables.trace.shapes
    names = events.name.take(shapes.event)
    scattered = map(_scattered, shapes.dims.take(np.flatnonzero(names.equals(_SCATTER))).to_list())
    chosen = {(tokens, experts): number for tokens, experts, number in filter(None, set(scattered))}
    rows = np.flatnonzero(names.equals(_TOP)) if chosen else np.empty(0, dtype=np.int64)
    event = shapes.event[rows]
    place = find_rows(phases, events.thread[event], events.start_ns[event])
    rows = rows[phases.phase.lookup(place).equals("forward")]
    found: Counter[Routing] = Counter()
    for scores in (_sizes(dims)[0] for dims in shapes.dims.take(rows).to_list()):
        tokens, experts = prod(scores[:-1]), scores[-1] if scores else 0
        if (tokens, experts) in chosen:
            found[Routing(tokens, experts, chosen[tokens, experts])] += 1
    return found


@lru_cache(maxsize=4096)
def _scattered(dims: str | None) -> tuple[int, int, int] | None:
    """Return tokens, columns and columns scattered to of a scatter along the last of its dimensions."""
    inputs = _sizes(dims)
    if len(inputs) <= _INDEX:
        return None
    into, index = inputs[0], inputs[_INDEX]
    if len(into) < 2 or len(index) != len(into) or index[:-1] != into[:-1] or index[-1] >= into[-1]:
        return None
    return prod(into[:-1]), into[-1], index[-1]


def _forwards(tables: RankTables, routing: Routing, shape: _Shape) -> int:
    """Return how often forward multiplies all tokens with a weight of this shape."""
    events, phases = tables.trace.events, tables.phases
    event, dims = _products(tables)
    place = find_rows(phases, events.thread[event], events.start_ns[event])
    forward = phases.phase.lookup(place).equals("forward").tolist()
    sizes = {_sorted(routing.tokens, *shape)}
    return sum(
        _calls(one, sizes, routing.experts) for one, inside in zip(dims, forward, strict=True) if inside
    )


def _products(tables: RankTables) -> tuple[IntArray, list[list[list[int]]]]:
    """Return the events of all products, and their two factors."""
    shapes = tables.trace.shapes
    names = tables.trace.events.name.take(shapes.event)
    rows = np.flatnonzero(names.matches(PRODUCTS.__contains__))
    both = zip(names.take(rows).to_list(), shapes.dims.take(rows).to_list(), strict=True)
    return shapes.event[rows], [_factors(name or "", dims) for name, dims in both]


@lru_cache(maxsize=4096)
def _factors(name: str, dims: str | None) -> list[list[int]]:
    return _sizes(dims)[PRODUCTS[name] :][:2]


def _calls(factors: list[list[int]], sizes: set[_Size], experts: int) -> int:
    """Return how many products of these sizes a call computes: one, or one for each expert."""
    if len(factors) != 2 or len(factors[0]) < 2 or len(factors[0]) != len(factors[1]):
        return 0
    batch = prod(factors[0][:-2])
    (rows, inner), columns = factors[0][-2:], factors[1][-1]
    return batch if batch in (1, experts) and _sorted(rows, inner, columns) in sizes else 0


def _sorted(*sizes: int) -> _Size:
    least, middle, most = sorted(sizes)
    return least, middle, most


def _sizes(dims: str | None) -> list[list[int]]:
    """Return the sizes of each input; none of what is not a tensor."""
    inputs: list[Any] = msgspec.json.decode(dims or "[[]]")
    return [[*_integers(one)] if isinstance(one, list) else [] for one in inputs] or [[]]


def _integers(shape: list[Any]) -> Iterator[int]:
    return (size for size in shape if isinstance(size, int))
