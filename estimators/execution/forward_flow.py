"""In which order modules end their forwards, and which of them backward comes back to.

Only a model with frozen parameters, or with parts whose results are unused (the last layers of a vision
tower), has groups that backward does not reach, and which ones depends on how data flows, not on how modules
are registered (a frozen key projection beside a trained query projection has no backward). So such a model is
run once on fake tensors, which compute nothing but shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.fake_tensors import copy_without, fake_tensors, materialize_fake


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """The modules that forward and backward run through."""

    has_backward: Mapping[str, bool]
    """Group FQN -> whether backward comes back to it, in the order in which the groups' forwards end. Groups
    that the forward leaves out are not in it."""
    without_gradient: frozenset[str] = frozenset()
    """Trainable parameters that get none."""


def flow_of(model: Model, groups: Sequence[str], policy: PolicySpec) -> Flow:
    """Run a model on fake tensors; also backward if its batches contain images.

    A group of several modules ends with the last of them. Without images, backward reaches the modules
    that depend on a trainable parameter. Raises ``ModelError`` for a model without a known batch, or whose
    step fails.
    """
    leads_back: dict[str, bool] = {}
    reached: set[str] = set()
    waiting = {fqn: set(fqn.split(", ")) for fqn in groups}

    def ended(group: str, part: str, module: nn.Module, inputs: Any, output: Any) -> None:
        waiting[group].discard(part)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tensors if policy.images else ():
            tensor.register_hook(lambda _: reached.add(group))  # type: ignore[no-untyped-call]
        if not waiting[group]:
            leads_back[group] = bool(tensors)

    module = copy_without(model.module)
    for group, parts in waiting.items():
        for part in parts:
            module.get_submodule(part).register_forward_hook(partial(ended, group, part))
    with fake_tensors(follow_values=policy.follows_values):
        materialize_fake(module)
        _with_every_expert(model, module)
        batch = model.make_batch(policy.sequences, policy.seq_len, torch.device("cpu"))
        if model.experts:  # their grouped products take the compute dtype alone
            batch = _cast(module, batch, getattr(torch, policy.compute_dtype))
        try:
            loss = model.loss(module, batch, "full")
            if policy.images:
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # the user's own model may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"model {model.name}: its forward failed on fake tensors: {reason}") from error
        if not policy.images:
            return Flow(has_backward=leads_back)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return Flow(
            has_backward={group: group in reached for group in leads_back},
            without_gradient=frozenset(name for name, parameter in trained if parameter.grad is None),
        )


def _with_every_expert(model: Model, module: nn.Module) -> None:
    """Put those of other ranks back beside this rank's: here no tokens are exchanged."""
    for fqn in model.experts if model.expert_ranks > 1 else ():
        part = module.get_submodule(fqn)
        for name, local in list(part.named_parameters(recurse=False)):
            whole = local.new_empty(model.expert_ranks * local.shape[0], *local.shape[1:])
            setattr(part, name, nn.Parameter(whole, requires_grad=local.requires_grad))


def _cast(module: nn.Module, batch: Batch, dtype: torch.dtype) -> Batch:
    """Parameters, in place, and inputs in the compute dtype, as FSDP casts them; buffers stay as they are."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, named = tree_map_only(Tensor, cast, (batch.args, dict(batch.named)))
    return replace(batch, args=args, named=named)
