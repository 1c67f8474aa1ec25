"""What FSDP and the optimizers leave out: parameters of no group, parameters that no optimizer updates."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2prof.manifest import ParamGroupInfo, UnshardedInfo
from fsdp2prof.recorder.model.inputs import is_readable
from fsdp2prof.recorder.model.members import named_buffers, named_modules, own_parameters
from fsdp2prof.recorder.model.roots import Root, param_groups

_MOST = 1000
"""Most unsharded tensors that are listed."""
_SMALLEST_BUFFER = 1 << 20
"""Bytes of a buffer that are worth a line."""
_PIECE = 1 << 26
"""Bytes hashed at a time: what a shard on a GPU takes on the host meanwhile."""
_ROWS = 64
"""Rows of a mask that are read."""
_SAMPLE = 1 << 10
"""Elements hashed of a sample."""


def add_ownership(
    groups: Iterable[ParamGroupInfo], roots: Iterable[Root], optimizers: Collection[Optimizer]
) -> None:
    """Say of each parameter of the described groups whether an optimizer updates it.

    ``optimizers`` are those that have stepped; a parameter that they leave out is looked for among those
    that wait for their turn.
    """
    described = [
        (told, parameter.sharded_param)
        for info, group in zip(groups, _groups(roots), strict=True)
        for told, parameter in zip(info.parameters, group.fsdp_params, strict=True)
    ]
    held = {id(parameter) for parameter in _held(optimizers)}
    if optimizers and any(one.requires_grad and id(one) not in held for _, one in described):
        held.update(id(parameter) for parameter in _held(_waiting()))
    for told, parameter in described:
        told.optimized = id(parameter) in held if optimizers else None


def add_checksums(groups: Iterable[ParamGroupInfo], roots: Iterable[Root], *, all_bytes: bool) -> None:
    """Add the checksum of every shard and of its gradient to what was described of them.

    Without ``all_bytes`` those of the first bytes of the largest shard of each replicated group: other seeds
    and gradients that are not reduced show there.
    """
    for info, group in zip(groups, _groups(roots), strict=True):
        pairs = list(zip(info.parameters, group.fsdp_params, strict=True))
        if not all_bytes:
            largest = max(pairs, key=lambda pair: prod(pair[0].local_shape), default=None)
            pairs = [largest] if largest is not None and info.replicate_world_size > 1 else []
        for told, parameter in pairs:
            told.checksum = _checksum(parameter.sharded_param, all_bytes=all_bytes)
            gradient = parameter.sharded_param.grad
            told.gradient_checksum = None if gradient is None else _checksum(gradient, all_bytes=all_bytes)


def keep_told(groups: Iterable[ParamGroupInfo], before: Iterable[ParamGroupInfo]) -> None:
    """Take over from what was described before: checksums, and optimizers that are gone by now."""
    known = {(info.root, told.fqn): told for info in before for told in info.parameters}
    for info in groups:
        for told in info.parameters:
            if (first := known.get((info.root, told.fqn))) is not None:
                told.checksum, told.gradient_checksum = first.checksum, first.gradient_checksum
                told.optimized = True if first.optimized else told.optimized


def describe_unsharded(roots: Iterable[Root], optimizers: Iterable[Optimizer]) -> list[UnshardedInfo]:
    """List parameters and large buffers of no group, and what optimizers hold that no root has."""
    roots = list(roots)
    sharded = {id(parameter.sharded_param) for group in _groups(roots) for parameter in group.fsdp_params}
    seen = set(sharded)
    found: list[UnshardedInfo] = []
    for root in roots:
        for kind, name, tensor in unsharded_tensors(root, _SMALLEST_BUFFER):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(_unsharded(kind, name, tensor, root.index))
    for optimizer in optimizers:
        for position, tensor in enumerate(_held([optimizer])):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(
                    _unsharded("optimizer", f"{type(optimizer).__qualname__}[{position}]", tensor, -1)
                )
    return sorted(found, key=lambda one: -one.nbytes)[:_MOST]


def state_dtypes(states: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of an optimizer's state by dtype, scalars (step counters) left out."""
    sums: dict[str, int] = {}
    for state in states:
        if state.dim():
            name = str(state.dtype).removeprefix("torch.")
            sums[name] = sums.get(name, 0) + _local(state).nbytes
    return sums


def _groups(roots: Iterable[Root]) -> Iterator[Any]:
    return (group for root in roots for state in root.states for group in param_groups(state))


def _waiting() -> list[Optimizer]:
    """All optimizers of the process, those included that have not stepped."""
    return [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]


def _held(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def unsharded_tensors(root: Root, smallest_buffer: int = 1) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield parameters that no group of a root manages, gathered or not, and its buffers: kind, name, tensor.

    Buffers of fewer bytes than ``smallest_buffer`` are left out.
    """
    if root.module is None:
        return
    infos = [parameter._module_info for group in _groups([root]) for parameter in group.fsdp_params]
    managed = {(id(info.module), info.param_name) for info in infos}
    for info in infos:
        managed.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    for fqn, module in named_modules(root.module):
        for name, parameter in own_parameters(module):
            if (id(module), name) not in managed:
                yield "parameter", f"{fqn}.{name}".lstrip("."), parameter
    for name, buffer in named_buffers(root.module):
        if buffer.nbytes >= smallest_buffer:
            yield "buffer", name, buffer


def _unsharded(kind: str, name: str, tensor: torch.Tensor, root: int) -> UnshardedInfo:
    return UnshardedInfo(
        kind=kind,
        fqn=name,
        root=root,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nbytes=_local(tensor).nbytes,
        requires_grad=tensor.requires_grad,
        has_gradient=tensor.grad is not None,
        true_frac=_true_frac(tensor),
    )


def _true_frac(tensor: torch.Tensor) -> float | None:
    if type(tensor) is not torch.Tensor or tensor.dtype is not torch.bool or tensor.dim() != 2:
        return None
    rows, columns = tensor.shape
    if rows != columns or not is_readable(tensor):
        return None
    sample = tensor.detach()[:: max(1, rows // _ROWS)]
    return int(sample.sum()) / sample.numel()


def _checksum(tensor: torch.Tensor, *, all_bytes: bool) -> str:
    """Hash of the bytes of this rank's part, or of its first, by value: padding and strides left out."""
    local = _local(tensor).detach()
    flat = (local.contiguous().view(-1) if all_bytes else local.flatten()[:_SAMPLE]).view(torch.uint8)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, flat.numel(), _PIECE):
        digest.update(flat[start : start + _PIECE].cpu().numpy().data)
    return digest.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
