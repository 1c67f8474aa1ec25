"""Blocks whose forward runs as ``torch.compile`` of each would, on fake tensors.

A block's joint graph of forward and backward, cut in two by AOTAutograd's own partitioner.

The graph is traced from the block itself with inductor's decompositions, operators of a checkpointed block
are marked as Dynamo marks them, and ``min_cut_rematerialization_partition`` decides what the forward saves.
Nothing is compiled for a device: each half becomes a
:class:`~fsdp2prof.estimators.compiler.program.Program`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from fsdp2prof.estimators.compiler.graphs import CannotCompile, Graphs
from fsdp2prof.estimators.compiler.program import Program
from fsdp2prof.estimators.techniques.float8.weight import GatheredFloat8
from fsdp2prof.estimators.techniques.recomputation import Recompute, Selective
from fsdp2prof.estimators.torch_rules import TorchRules


def mark(joint: GraphModule, num_fwd_outputs: int, recompute: Recompute) -> None:
    """Mark the forward's operators as saved or recomputed, as a checkpoint around the block does."""
    matmuls = 0
    forward = _forward(joint, num_fwd_outputs)
    for node in joint.graph.nodes:
        if node.op != "call_function" or node not in forward:
            continue
        saved = False
        if isinstance(recompute, Selective):
            counted = recompute.counts(node.target, node.args)
            matmuls += counted
            saved = matmuls % 2 == 1 if counted else recompute.saves(node.target)
        policy = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        if node.target is operator.getitem:  # one result of several is its operator's
            policy = node.args[0].meta["recompute"]
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 0


def _forward(joint: GraphModule, num_fwd_outputs: int) -> set[Node]:
    """The nodes that the forward's results need."""
    results = joint.graph.find_nodes(op="output")[0].args[0][:num_fwd_outputs]
    stack = [node for node in results if isinstance(node, Node)]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


KNOWS_WHAT_IS_THERE = (
    "static_lifetime_input_indices" in signature(partitioners.min_cut_rematerialization_partition).parameters
)
"""The partitioner of torch 2.7 saves parameters at their size."""


def compiled(
    function: Callable[..., Any], recompute: Recompute, parameters: int, rules: TorchRules
) -> Callable[..., Any]:
    """Return ``function`` as AOTAutograd runs it; it is traced when it is first called, on fake tensors.

    Its first ``parameters`` inputs are there anyway: where the run's torch knows it, saving them is free.
    """

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if recompute != "none":
            mark(joint, num_fwd_outputs, recompute)
        if KNOWS_WHAT_IS_THERE and rules.partitioner_knows_parameters:
            options["static_lifetime_input_indices"] = list(range(parameters))
        with _writing_nothing():
            halves = partitioners.min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
            )
        _put_meshes_last(*halves, num_fwd_outputs)
        return halves

    made: Callable[..., Any] = aot_function(
        function,
        fw_compiler=_program,
        bw_compiler=_program,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return made


def _put_meshes_last(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> None:
    """Let device meshes, which DTensors bring along, follow all tensors that are saved, in place.

    AOTAutograd expects them there; the partitioner of torch 2.13 puts generator states behind them.
    """
    output = forward.graph.find_nodes(op="output")[0]
    results = list(output.args[0])
    saved = results[num_fwd_outputs:]
    meshes = [node for node in saved if _is_mesh(node)]
    if not meshes or saved[-len(meshes) :] == meshes:
        return
    others = [node for node in saved if node not in meshes]
    output.args = ((*results[:num_fwd_outputs], *others, *meshes),)
    forward.recompile()
    inputs = backward.graph.find_nodes(op="placeholder")
    after = next(node for node in inputs if node.name.startswith("tangents"))
    names = {node.name for node in meshes}
    for node in inputs:
        if node.name in names:
            after.prepend(node)
    backward.recompile()


def _is_mesh(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(getattr(value, "real_obj", value), DeviceMesh)


def _program(gm: GraphModule, example_inputs: Any) -> Program:
    return Program(gm)


@contextmanager
def _writing_nothing() -> Iterator[None]:
    """Report a graph that cannot be cut as an error only, without files about it in the working directory."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("its graph has no cut")

    names = [name for name in ("visualize_min_cut_graph", "_get_unique_path") if hasattr(partitioners, name)]
    before = {name: getattr(partitioners, name) for name in names}
    try:
        for name in names:
            setattr(partitioners, name, refuse)
        yield
    finally:
        for name, function in before.items():
            setattr(partitioners, name, function)


def compile_blocks(
    root: nn.Module, recompute: dict[str, Recompute], graphs: Graphs, rules: TorchRules
) -> None:
    """Run the forward of blocks, by FQN, as compiled, with the operators that backward recomputes, in
    place.

    Blocks that compute the same share a graph, stored in ``graphs``. It is traced when the first of them
    runs, which raises ``CannotCompile`` if tracing fails.
    """
    for fqn, again in recompute.items():
        block = root.get_submodule(fqn)
        block.forward = _Compiled(block, fqn, again, graphs, rules)


class _Compiled:
    """Stands for a block's forward."""

    def __init__(
        self, block: nn.Module, fqn: str, recompute: Recompute, graphs: Graphs, rules: TorchRules
    ) -> None:
        self._block = block
        self._forward = block.forward
        self._fqn = fqn
        self._recompute = recompute
        self._graphs = graphs
        self._rules = rules
        self._own = _identity(block, fqn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: dict[str, Tensor] = dict(self._block.named_parameters(remove_duplicate=False))
        state.update(self._block.named_buffers(remove_duplicate=False))
        inputs = (state, args, kwargs)
        knows = self._rules.partitioner_knows_parameters
        key = (self._own, self._recompute, knows, torch.is_grad_enabled(), _shapes(inputs))
        if key not in self._graphs:
            self._graphs[key] = self._traced(inputs)
        return self._graphs[key](*inputs)

    def _traced(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        def run(state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with _reparametrize_module(self._block, state):
                return self._forward(*args, **kwargs)

        if any(isinstance(module, FSDPModule) for module in list(self._block.modules())[1:]):
            raise CannotCompile(f"{self._fqn} holds modules that fully_shard wraps on their own")
        made = compiled(run, self._recompute, sum(map(_inputs_of, inputs[0].values())), self._rules)
        try:
            with _apart(inputs):
                made(*tree_map(_like, inputs))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise CannotCompile(f"{self._fqn} cannot be traced as a whole: {reason}") from error
        return made


@contextmanager
def _apart(inputs: Any) -> Iterator[None]:
    """Trace without counting storages, in the inputs' own fake mode."""
    tensors = [item for item in tree_flatten(inputs)[0] if isinstance(item, Tensor)]
    mode = detect_fake_mode([_local(tensor) for tensor in tensors])
    with _disable_current_modes():
        if mode is None:
            raise CannotCompile("the tensors are real")
        with mode:
            yield


def _inputs_of(item: Any) -> int:
    """Number of graph inputs that a tensor stands for: one for each tensor inside it, and its meshes."""
    if not isinstance(item, Tensor) or not is_traceable_wrapper_subclass(item):
        return 1
    names, _ = item.__tensor_flatten__()
    return sum(_inputs_of(getattr(item, name)) for name in names)


def _local(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.data_float8 if isinstance(local, GatheredFloat8) else local


def _like(item: Any) -> Any:
    """A new leaf tensor like the given one."""
    if not isinstance(item, Tensor):
        return item
    if isinstance(item, DTensor):
        fresh: Tensor = DTensor.from_local(
            _like(item._local_tensor),
            item.device_mesh,
            item.placements,
            run_check=False,
            shape=item.shape,
            stride=item.stride(),
        ).detach()
    elif isinstance(item, GatheredFloat8):
        fresh = GatheredFloat8(_like(item.data_float8), _like(item.scale), item.dtype)
    else:
        fresh = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
    return fresh.requires_grad_(item.requires_grad)


def _shapes(inputs: Any) -> Any:
    """The properties of the inputs that a graph depends on."""
    leaves, form = tree_flatten(inputs)
    return str(form), tuple(
        (
            tuple(item.shape),
            item.stride(),
            item.dtype,
            item.requires_grad,
            str(item.placements) if isinstance(item, DTensor) else isinstance(item, GatheredFloat8),
        )
        if isinstance(item, Tensor)
        else item
        if isinstance(item, (int, float, bool, str, type(None)))
        else id(item)
        for item in leaves
    )


def _identity(block: nn.Module, fqn: str) -> Any:
    """The properties of a block that a graph depends on: its modules and their settings, without its
    index."""
    index = fqn.rpartition(".")[2]
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, bool, str)) and not _is_index(key, value, index)
            ),
        )
        for name, module in block.named_modules()
    )


def _is_index(key: str, value: object, index: str) -> bool:
    return str(value) == index and ("layer" in key or "idx" in key or "index" in key)
