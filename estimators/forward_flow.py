"""In which order modules end their forwards, and which of them backward comes back to.

Only a model with frozen parameters has groups that backward does not reach, and which ones depends on how
data flows, not on how modules are registered (a frozen key projection beside a trained query projection has
no backward). So such a model is run forward once on the meta device, which computes nothing but shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp2prof.estimators.model import Model
from fsdp2prof.estimators.policy import PolicySpec

__all__ = ["forward_flow"]


def forward_flow(model: Model, groups: Sequence[str], policy: PolicySpec) -> dict[str, bool]:
    """Group FQN -> whether its output requires gradients, in the order in which the groups' forwards end.

    A group of several modules ends with the last of them. Groups that the forward leaves out are not in it.
    Raises ``ModelError`` for a model that there is no batch for.
    """
    flow: dict[str, bool] = {}
    waiting = {fqn: set(fqn.split(", ")) for fqn in groups}

    def ended(group: str, part: str, module: nn.Module, inputs: Any, output: Any) -> None:
        waiting[group].discard(part)
        if not waiting[group]:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            flow[group] = any(tensor.requires_grad for tensor in tensors)

    handles = [
        model.module.get_submodule(part).register_forward_hook(partial(ended, group, part))
        for group, parts in list(waiting.items())
        for part in list(parts)
    ]
    try:
        batch = model.make_batch(policy.batch_size, policy.seq_len, torch.device("meta"))
        model.loss(model.module, batch, None)
    finally:
        for handle in handles:
            handle.remove()
    return flow
