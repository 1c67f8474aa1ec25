"""What a checkpointed block's backward runs again: one rule for eager blocks and for the partitioner."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
_REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor"
_ATTENTION = "aten._scaled_dot_product_"


@dataclass(frozen=True, slots=True)
class Selective:
    """Some operators' results are saved: torchtitan's policy.

    The first, third, ... matrix product, attention and reduce-scatters are; everything else is run again.
    """

    attention: bool = True
    besides: frozenset[str] = frozenset()
    """Other operators that are saved, as ``aten.abs``."""
    recomputed_shapes: frozenset[tuple[int, ...]] = frozenset()
    """Right factors (inner, outer) of products that are run again and not counted."""

    def counts(self, target: object, arguments: Sequence[Any]) -> bool:
        """Whether this is one of the products of which every other one is saved."""
        return target in MATMULS and not (
            self.recomputed_shapes and _shape(arguments[1]) in self.recomputed_shapes
        )

    def saves(self, target: object) -> bool:
        """Whether the results of any other operator are saved."""
        if target in MATMULS:
            return False
        name = str(target).rpartition(".")[0]
        if name.startswith(_ATTENTION):
            return self.attention
        return name == _REDUCE_SCATTER or name in self.besides


Recompute = Literal["none", "full"] | Selective
"""What backward runs again: what the partitioner likes, all, or what is not selected."""


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


def _shape(factor: Any) -> tuple[int, ...]:
    tensor = factor.meta["val"] if isinstance(factor, Node) else factor
    return tuple(tensor.shape)


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
