"""What ``check parity`` shards where no ``--shard`` says it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

__all__ = ["members_of_lists", "shard_by_default"]


def shard_by_default(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every member of an outermost list of modules, then the root, over the data-parallel dimensions."""
    names = [name for name in mesh.mesh_dim_names or () if name in ("dp_replicate", "dp_shard")]
    data = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
    for member in members_of_lists(module):
        if not isinstance(member, FSDPModule):  # one that is in two lists
            fully_shard(member, mesh=data)
    fully_shard(module, mesh=data)


def members_of_lists(module: nn.Module, of_a_list: bool = False) -> Iterator[nn.Module]:
    """Members of lists of modules that have parameters; lists inside a member are its own affair.

    A list or dictionary in a list is never called, so its members stand for it.
    """
    for child in list(module.children()):
        never_called = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if of_a_list and not never_called:
            if any(True for _ in child.parameters()):
                yield child
        else:
            is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
            yield from members_of_lists(child, is_list or (of_a_list and never_called))
