"""What a checkpointed block's backward runs again, said to the partitioner as Dynamo says it."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["Recompute", "mark"]

Recompute = Literal["none", "full", "op", "op_and_attention"]
"""What backward runs again: what the partitioner likes, all, or by operator, attention too or not."""

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
_SAVED_BESIDES = (torch.ops._c10d_functional.reduce_scatter_tensor.default,)
_ATTENTION = "_scaled_dot_product_"


def mark(joint: GraphModule, num_fwd_outputs: int, recompute: Recompute) -> None:
    """Mark the forward's operators as saved or recomputed, as a checkpoint around the block does.

    By operator, the first, third, ... matrix product, attention and reduce-scatters are saved: torchtitan's
    policy.
    """
    matmuls = 0
    forward = _forward(joint, num_fwd_outputs)
    for node in joint.graph.nodes:
        if node.op != "call_function" or node not in forward:
            continue
        saved = False
        if recompute != "full":
            matmuls += node.target in _MATMULS
            saved = node.target in _SAVED_BESIDES
            saved |= node.target in _MATMULS and matmuls % 2 == 1
            saved |= recompute == "op" and _ATTENTION in str(node.target)
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
