"""Modules that a tensor-parallel rank runs on its own tensors, without a collective around them.

Their parameters are still DTensors, for FSDP, clipping and the optimizer. For a parameter that every rank
has whole, each rank computes the gradient of its own part of the following work: ``Partial``, which FSDP
sums over the ranks when it reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def as_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; for one that every rank has whole, with its own gradient."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = all(placement.is_replicate() for placement in tensor.placements)
    return tensor.to_local(grad_placements=[Partial()] * tensor.device_mesh.ndim if whole else None)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Divide a module's own parameters along ``dims``; those not named stay whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = Shard(dims[name]) if name in dims else Replicate()
        divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def run_on_local_tensors(module: nn.Module, mesh: DeviceMesh, dim: int | None) -> None:
    """Divide a layer's parameters along ``dim`` (``None``: none of them) and run it on local tensors."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    distribute_parameters(module, mesh, {} if dim is None else dict.fromkeys(names, dim))
    forward = module.forward

    def on_local_tensors(x: Tensor) -> Any:
        held = dict(module._parameters)
        own: dict[str, Any] = {name: one if one is None else as_local(one) for name, one in held.items()}
        module._parameters.update(own)
        try:
            return forward(as_local(x))
        finally:
            module._parameters.update(held)

    module.forward = on_local_tensors
