"""A compiled graph that runs on fake tensors: what inductor's program allocates, and when it lets go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fsdp2prof.estimators.compiler.fusion import Kernel, kernels_of
from fsdp2prof.estimators.compiler.graph import base_of, is_item, nbytes, value_of
from fsdp2prof.estimators.compiler.launches import launched

__all__ = ["Program"]

_RNG_STATE_BYTES = 16
"""Of a CUDA generator: seed and offset."""
_MOVES = frozenset({torch.ops.aten.cat.default, torch.ops.aten.clone.default})


class Program:
    """Callable with a list of inputs, which it empties; returns what the graph returns.

    Extern operators are called. Fused loops allocate what they leave in memory, in the place of an input that
    nobody reads again if it is as large (``scheduler.decide_inplace_update``). Everything is dropped after
    its last use, the inputs too.
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
    """Tensors that nobody reads after each kernel; inputs that no kernel reads die with the first."""
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
