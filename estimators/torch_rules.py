"""Where FSDP2, and what goes with it, differs between the supported versions of torch.

An estimate is about the installed one. Each rule is one function; nothing else asks for a version.
"""

from __future__ import annotations

from functools import cache
from inspect import signature

__all__ = ["clipping_reduces_every_norm", "expert_mesh_refusal", "fsdp_method_refusal", "root_obeys_reshard"]


@cache
def root_obeys_reshard() -> bool:
    """Whether the root reshards when told to; torch 2.7 keeps it gathered whatever it is told.

    Where it obeys, ``reshard_after_forward`` has a default of its own for "the root does not, others do".
    """
    from torch.distributed.fsdp import fully_shard

    return signature(fully_shard).parameters["reshard_after_forward"].default is None


@cache
def clipping_reduces_every_norm() -> bool:
    """Whether ``clip_grad_norm_`` all-reduces the norms of all parameters; up to torch 2.9 their total."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 10)


def expert_mesh_refusal() -> str | None:
    """Why parameters of one module cannot be sharded over meshes of their own, ``None`` if they can."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if hasattr(_fsdp_common, "ShardPlacementResult"):
        return None
    return f"torch {torch.__version__} shards all parameters of a module over one mesh"


def fsdp_method_refusal(name: str) -> str | None:
    """Why an ``FSDPModule`` cannot be told something, ``None`` if it has the method."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, name):
        return None
    return f"torch {torch.__version__} has no FSDPModule.{name}"
