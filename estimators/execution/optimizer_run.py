"""An optimizer's state of sharded parameters, found by running one step on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import fake_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptState:
    """One state tensor of one parameter."""

    name: str
    """The parameter's FQN and the state's key."""
    is_sharded: bool
    """A DTensor, of which every rank holds its part; otherwise a tensor that is the same on all ranks."""
    local_bytes: int
    """This rank's."""
    whole_bytes: int
    """All ranks' together, once; in proportion to the elements where a shard is more than its elements."""


def states_of_rank(spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, rank: int) -> list[KeptState]:
    """Run one step of the policy's optimizer as ``rank`` of ``mesh`` and return its state.

    Raises ``ModelError`` for a model that cannot be sharded and an optimizer that cannot step.
    """
    policy = replace(policy.without_checkpointing(), float8=None, fp8_all_gather=False, extra_model=None)
    with fake_rank(spec, mesh, policy, rank=rank) as world:
        model, optimizer = world.model, world.loop().optimizer
        if optimizer is None:
            return []
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except Exception as error:  # the user's own code may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ModelError(
                f"optimizer {policy.optimizer}: its step failed on fake tensors: {reason}"
            ) from error
        return [
            _kept(f"{name}.{key}", state)
            for name, parameter in model.module.named_parameters()
            for key, state in optimizer.state.get(parameter, {}).items()
            if isinstance(state, Tensor)
        ]


def _kept(name: str, state: Tensor) -> KeptState:
    if not isinstance(state, DTensor):
        size = _bytes_of(state)
        return KeptState(name=name, is_sharded=False, local_bytes=size, whole_bytes=size)
    local = state._local_tensor
    size, elements = _bytes_of(local), local.numel()
    whole = state.numel() * size // elements if elements else 0
    return KeptState(name=name, is_sharded=True, local_bytes=size, whole_bytes=whole)


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor, or of all that are inside one."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.itemsize
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes_of(getattr(tensor, name)) for name in names)
