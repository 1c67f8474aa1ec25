"""A compiled graph that runs on fake tensors: what inductor's program allocates, and when it lets go.

Which tensors of a compiled graph exist, which kernels make them, and in which order.

After inductor's rules, as its sources say them (``ir.StorageBox.should_realize_on_reuse``,
``graph.GraphLowering.run_node``, ``scheduler.Scheduler.fuse_nodes``):

- a loop is computed where it is read, unless its result must be in memory: it is returned, an extern
  operator reads it, it is a reduction, or it is read several times and computing it takes much;
- loops over the same elements that read each other's results or the same tensors become one kernel;
- a result that only its own kernel reads is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fsdp2prof.estimators.compiler.graph import (
    Kind,
    base_of,
    is_item,
    kind_of,
    nbytes,
    needs_memory,
    numel,
    reduced,
    value_of,
)
from fsdp2prof.estimators.compiler.graphs import launched

_READS_WORTH_KEEPING = 4
"""``config.realize_reads_threshold``: tensors that a loop reads, beyond which it is not computed twice."""
_OPERATORS_WORTH_KEEPING = 30
"""``config.realize_opcount_threshold``."""
_MOST_READS = 8
"""``config.realize_acc_reads_threshold``."""
_MOST_FUSED = 64
"""``config.max_fusion_size``."""
_ENOUGH_RESULTS = 264
"""Twice the multiprocessors of an H100: a reduction to fewer results is cut in two kernels if it is long."""
_LONG = 8192
"""Elements of a long one. Source of both: ``choices.InductorChoices.reduction_split_factor``."""


@dataclass(slots=True, eq=False)
class Kernel:
    """One launch: an extern operator, or loops over the same elements."""

    nodes: list[Node]
    """One extern operator, or loops, in the graph's order."""
    results: list[Node]
    """Tensors that the kernel makes: its loops, or the selected outputs of an operator with several."""
    order: int
    """Position of its first node in the graph."""
    is_extern: bool
    reads: set[Node]
    """Tensors in memory before it, if it does not make them itself."""
    writes: list[Node] = field(default_factory=list)
    """Results that are in memory after it."""


def kernels_of(graph: Graph) -> list[Kernel]:
    """Return the kernels of a graph in the order of their launch."""
    realized = _realized(graph)
    kernels = [
        Kernel(
            nodes=[node],
            order=order,
            is_extern=kind_of(node) is Kind.EXTERN,
            reads=reads,
            results=_results(node),
        )
        for order, (node, reads) in enumerate(realized.items())
    ]
    kernels = _fused(kernels)
    wanted = {base_of(node) for node in graph.find_nodes(op="output")[0].all_input_nodes}
    ordered = _in_order(kernels)
    for kernel in ordered:
        others = set().union(*(other.reads for other in kernels if other is not kernel))
        kernel.writes = [
            node for node in kernel.results if kernel.is_extern or node in wanted or node in others
        ]
        kernel.reads -= set(kernel.results)
    return ordered


def _results(node: Node) -> list[Node]:
    """The tensors that an operator makes: it, or the results picked from it."""
    return [result for user in node.users if is_item(user) for result in _results(user)] or [node]


def _realized(graph: Graph) -> dict[Node, set[Node]]:
    """Every operator that has a kernel, and the tensors in memory that it reads."""
    found: dict[Node, set[Node]] = {}
    inlined: dict[Node, tuple[set[Node], int]] = {}
    for node in graph.nodes:
        kind = kind_of(node)
        if kind in (Kind.GIVEN, Kind.VIEW, Kind.OUTPUT):
            continue
        reads: set[Node] = set()
        operators = 1
        for source in map(base_of, node.all_input_nodes):
            if source in inlined:
                reads |= inlined[source][0]
                operators += inlined[source][1]
            else:
                reads.add(source)
        if kind is Kind.LOOP and not _is_kept(node, reads, operators):
            inlined[node] = (reads, operators)
        else:
            found[node] = reads
    return found


def _is_kept(node: Node, reads: set[Node], operators: int) -> bool:
    users, must = _users(node)
    if must or len(reads) > _MOST_READS:
        return True
    much = len(reads) > _READS_WORTH_KEEPING or operators > _OPERATORS_WORTH_KEEPING
    return users > 1 and much


def _users(node: Node) -> tuple[int, bool]:
    """How many operators read a tensor, through views too, and whether one needs it in memory."""
    count, must = 0, False
    for user in node.users:
        kind = kind_of(user)
        if kind is Kind.VIEW:
            more, needed = _users(user)
            count, must = count + more, must or needed or needs_memory(user)
        else:
            count, must = count + 1, must or kind in (Kind.EXTERN, Kind.OUTPUT)
    return count, must


def _fused(kernels: list[Kernel]) -> list[Kernel]:
    """Fuse kernels, those that share most bytes first, until no two can be fused."""
    merged = list(kernels)
    position = {node: index for index, node in enumerate(kernels[0].nodes[0].graph.nodes)} if kernels else {}
    again = True
    while again:
        again = False
        maker = {node: kernel for kernel in merged for node in kernel.results}
        loops = [kernel for kernel in merged if not kernel.is_extern]
        pairs = [
            (shared, first, second)
            for first, second in combinations(loops, 2)
            if (shared := _shared_bytes(first, second))
            and _same_loop(first, second)
            and not (_waits_for(first, second) or _waits_for(second, first))
        ]
        gone: set[int] = set()
        for _, first, second in sorted(pairs, key=lambda pair: (-pair[0], pair[1].order, pair[2].order)):
            if id(first) in gone or id(second) in gone or _between(first, second, maker):
                continue
            first.nodes = sorted([*first.nodes, *second.nodes], key=position.__getitem__)
            first.order = min(first.order, second.order)
            first.results = sorted([*first.results, *second.results], key=position.__getitem__)
            first.reads |= second.reads
            gone.add(id(second))
            maker.update(dict.fromkeys(second.results, first))
            again = True
        merged = [kernel for kernel in merged if id(kernel) not in gone]
    return merged


def _shared_bytes(first: Kernel, second: Kernel) -> int:
    """Bytes of the tensors that two kernels have in common, read or written."""
    common = (first.reads | set(first.results)) & (second.reads | set(second.results))
    return sum(nbytes(node) for node in common)


def _same_loop(first: Kernel, second: Kernel) -> bool:
    """Whether one kernel can go over the elements of two."""
    if len(first.nodes) + len(second.nodes) > _MOST_FUSED:
        return False
    loops = {_loop(node) for node in (*first.nodes, *second.nodes)}
    reductions = {loop for loop in loops if loop[1] > 1}
    if not reductions:
        return len(loops) == 1
    if len(reductions) > 1:
        return False
    ((kept, each, are_rows),) = reductions
    pointwise = {loop[0] for loop in loops - reductions}
    return not pointwise or (are_rows and pointwise <= {kept, kept * each})


def _waits_for(reader: Kernel, maker: Kernel) -> bool:
    """Whether a kernel reads a result that another only has when it is over: of a reduction cut in two."""
    return any(
        kind_of(node) is Kind.REDUCTION and _is_cut(node) for node in reader.reads & set(maker.results)
    )


def _is_cut(reduction: Node) -> bool:
    return numel(reduction) < _ENOUGH_RESULTS and reduced(reduction)[0] > _LONG


def _loop(node: Node) -> tuple[int, int, bool]:
    """Elements of a loop's result, elements reduced into each, and whether those lie in a row."""
    if kind_of(node) is Kind.REDUCTION:
        return numel(node), *reduced(node)
    return numel(node), 1, True


def _between(first: Kernel, second: Kernel, maker: dict[Node, Kernel]) -> bool:
    """Whether one kernel needs the other by way of a third, so that they cannot be one."""
    return _reaches(first, second, maker) or _reaches(second, first, maker)


def _reaches(start: Kernel, goal: Kernel, maker: dict[Node, Kernel]) -> bool:
    """Whether ``start`` needs a third kernel that needs ``goal``."""
    seen: set[int] = {id(start)}
    stack = [kernel for kernel in _needed(start, maker) if kernel is not goal]
    while stack:
        kernel = stack.pop()
        if kernel is goal:
            return True
        if id(kernel) not in seen:
            seen.add(id(kernel))
            stack.extend(_needed(kernel, maker))
    return False


def _needed(kernel: Kernel, maker: dict[Node, Kernel]) -> Iterable[Kernel]:
    makers = (maker.get(node) for node in kernel.reads)
    return [other for other in makers if other is not None and other is not kernel]


def _in_order(kernels: list[Kernel]) -> list[Kernel]:
    """Sort kernels so that each follows the kernels it depends on; otherwise in the order of the graph."""
    maker = {node: kernel for kernel in kernels for node in kernel.results}
    done: set[int] = set()
    ordered: list[Kernel] = []
    for goal in sorted(kernels, key=lambda kernel: kernel.order):
        stack = [goal]
        while stack:
            kernel = stack[-1]
            missing = [other for other in _needed(kernel, maker) if id(other) not in done]
            if missing:
                stack.append(min(missing, key=lambda other: other.order))
                continue
            stack.pop()
            if id(kernel) not in done:
                done.add(id(kernel))
                ordered.append(kernel)
    return ordered


_RNG_STATE_BYTES = 16
"""Of a CUDA generator: seed and offset."""
_MOVES = frozenset({torch.ops.aten.cat.default, torch.ops.aten.clone.default})


class Program:
    """Callable with a list of inputs, which it empties; returns what the graph returns.

    Extern operators are called. Fused loops allocate what they leave in memory, in the place of an input
    that is not read again if it is as large (``scheduler.decide_inplace_update``). Everything is dropped
    after its last use, inputs as well.
    """

    _boxed_call = True
    """The mark by which AOTAutograd gives the list itself away."""

    def __init__(self, module: GraphModule) -> None:
        graph = module.graph
        self._module = module
        self._inputs = graph.find_nodes(op="placeholder")
        self._constants = graph.find_nodes(op="get_attr")
        self._output = graph.find_nodes(op="output")[0]
        self._kernels = kernels_of(graph)
        self._dead = _deaths(self._kernels, list(graph.nodes), self._output)
        given = set(self._inputs)
        self._in_place = [
            _in_place(kernel, [node for node in dead if node not in given])
            for kernel, dead in zip(self._kernels, self._dead, strict=True)
        ]

    def __call__(self, inputs: list[Any]) -> Any:
        """Run on fake tensors."""
        held: dict[Node, Any] = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        for node in self._constants:
            held[node] = _of_this_run(getattr(self._module, str(node.target)))
        for kernel, dead, in_place in zip(self._kernels, self._dead, self._in_place, strict=True):
            if kernel.is_extern:
                _call(kernel.nodes[0], held)
            else:
                for node in kernel.writes:
                    place = held[in_place[node]] if node in in_place else None
                    held[node] = _made(node, place)
                launched(*_moved(kernel), _only_moves(kernel))
            for node in dead:
                held.pop(node, None)
        return map_arg(self._output.args[0], lambda node: _value(node, held))


def _moved(kernel: Kernel) -> tuple[int, str]:
    """Bytes that a fused kernel reads and writes, each tensor once, and the element type of the largest."""
    tensors = [*kernel.reads, *kernel.writes]
    largest = max(tensors, key=nbytes, default=None)
    value = None if largest is None else value_of(largest)
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "float32"
    return sum(map(nbytes, tensors)), dtype


def _only_moves(kernel: Kernel) -> bool:
    """Whether a fused kernel only reorders one tensor's elements, as behind a gather of a sequence."""
    if len(kernel.nodes) != 1 or len(kernel.reads) != 1 or kernel.nodes[0].target not in _MOVES:
        return False
    (source,), (made,) = (list(map(value_of, some)) for some in (kernel.reads, kernel.nodes))
    tensors = isinstance(source, Tensor) and isinstance(made, Tensor)
    return tensors and (source.dtype, source.numel()) == (made.dtype, made.numel())


def _deaths(kernels: list[Kernel], nodes: list[Node], output: Node) -> list[list[Node]]:
    """Tensors with no reader after each kernel; inputs that no kernel reads die with the first."""
    kept = {base_of(node) for node in output.all_input_nodes}
    last = {node: 0 for node in nodes if node.op == "placeholder"}
    for index, kernel in enumerate(kernels):
        last.update(dict.fromkeys((*kernel.reads, *kernel.writes), index))
    dead: list[list[Node]] = [[] for _ in kernels]
    for node in nodes:
        if node in last and node not in kept and kernels:
            dead[last[node]].append(node)
    return dead


def _in_place(kernel: Kernel, dead: list[Node]) -> dict[Node, Node]:
    """Results that take the place of an input that dies with the kernel."""
    free = [node for node in dead if node in kernel.reads and isinstance(value_of(node), Tensor)]
    found: dict[Node, Node] = {}
    for node in () if kernel.is_extern else kernel.writes:
        place = next((other for other in free if _fits(value_of(node), value_of(other))), None)
        if place is not None:
            found[node] = place
            free.remove(place)
    return found


def _fits(result: Tensor, place: Tensor) -> bool:
    same = result.dtype == place.dtype and result.numel() == place.numel()
    return same and (
        (result.shape, result.stride()) == (place.shape, place.stride())
        or (result.is_contiguous() and place.is_contiguous())
    )


def _made(node: Node, place: Tensor | None) -> Tensor:
    value = value_of(node)
    if place is not None:
        return place.as_strided(value.shape, value.stride())
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _of_this_run(constant: Any) -> Any:
    """A constant's stand-in: the one of the graph may be of another run's fake mode."""
    return torch.empty_like(constant) if isinstance(constant, Tensor) else constant


def _call(node: Node, held: dict[Node, Any]) -> None:
    args: Any = map_arg(node.args, lambda other: _value(other, held))
    kwargs: Any = map_arg(node.kwargs, lambda other: _value(other, held))
    name = str(node.target)
    if "rng_state" in name:  # what saves or restores the generator's state around an operator
        target, args = _around(args)
        result = target(*args, **{key: value for key, value in kwargs.items() if key != "rng_state"})
        if "save" in name:
            result = (torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8), result)
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    _hold(node, result, held)


def _around(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    at = next(index for index, item in enumerate(args) if callable(item) and not isinstance(item, Tensor))
    return args[at], tuple(args[at + 1 :])


def _hold(node: Node, result: Any, held: dict[Node, Any]) -> None:
    items = [user for user in node.users if is_item(user)]
    if not items:
        held[node] = result
    for item in items:
        _hold(item, result[item.args[1]], held)


def _value(node: Node, held: dict[Node, Any]) -> Any:
    """A tensor in memory, or a view of one made now."""
    if node in held:
        return held[node]
    args: Any = map_arg(node.args, lambda other: _value(other, held))
    kwargs: Any = map_arg(node.kwargs, lambda other: _value(other, held))
    return node.target(*args, **kwargs)  # type: ignore[operator]
