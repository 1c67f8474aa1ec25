"""A block's joint graph of forward and backward, cut in two by AOTAutograd's own partitioner.

The graph is traced from the block itself with inductor's decompositions, operators of a checkpointed block
are marked as Dynamo marks them, and ``min_cut_rematerialization_partition`` decides what the forward saves.
Nothing is compiled for a device: each half becomes a
:class:`~fsdp2prof.estimators.compiler.program.Program`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node

from fsdp2prof.estimators.compiler.program import Program
from fsdp2prof.estimators.compiler.recompute import Recompute, mark
from fsdp2prof.estimators.torch_rules import TorchRules

__all__ = ["KNOWS_WHAT_IS_THERE", "compiled"]

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
    """Let a graph that cannot be cut be an error alone, without files about it in the working directory."""

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
