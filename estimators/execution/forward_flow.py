"""In which order modules end their forwards, and which of them backward comes back to.

Only a model with frozen parameters has groups that backward does not reach, and which ones depends on how
data flows, not on how modules are registered (a frozen key projection beside a trained query projection has
no backward). So such a model is run forward once on fake tensors, which compute nothing but shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.fake_tensors import fake_tensors

__all__ = ["forward_flow"]


def forward_flow(model: Model, groups: Sequence[str], policy: PolicySpec) -> dict[str, bool]:
    """Group FQN -> whether its output requires gradients, in the order in which the groups' forwards end.

    A group of several modules ends with the last of them. Groups that the forward leaves out are not in it.
    Raises ``ModelError`` for a model that there is no batch for, or whose forward fails.
    """
    flow: dict[str, bool] = {}
    waiting = {fqn: set(fqn.split(", ")) for fqn in groups}

    def ended(group: str, part: str, module: nn.Module, inputs: Any, output: Any) -> None:
        waiting[group].discard(part)
        if not waiting[group]:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            flow[group] = any(tensor.requires_grad for tensor in tensors)

    module = deepcopy(model.module)
    for group, parts in waiting.items():
        for part in parts:
            module.get_submodule(part).register_forward_hook(partial(ended, group, part))
    with fake_tensors():
        _materialize(module)
        batch = model.make_batch(policy.sequences, policy.seq_len, torch.device("cpu"))
        try:
            model.loss(module, batch, "full")
        except Exception as error:  # the user's own model may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"model {model.name}: its forward failed on fake tensors: {reason}") from error
    return flow


def _materialize(module: nn.Module) -> None:
    """Put a fake tensor of the same shape in the place of every one on meta."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(part, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
