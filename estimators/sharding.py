"""Which parameters FSDP gathers together, and how many bytes each shard holds.

:func:`wrap_units` decides the ``fully_shard`` calls (bottom-up, the root last) that the execution engine
makes; :func:`parameter_groups` derives from them, without executing anything, the groups FSDP would form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING

from fsdp2prof.analyzers.sharding.chunks import chunk_rows, rows_of_shard
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.estimators.torch_rules import root_obeys_reshard

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ParameterGroup", "ShardedParameter", "WrapUnit", "freeze", "parameter_groups", "wrap_units"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapUnit:
    """One ``fully_shard`` call."""

    fqns: tuple[str, ...]
    """Modules sharded together; ``("",)`` is the root."""
    reshard_after_forward: bool | int
    """Argument of the same name, what ``None`` stands for written out: torch 2.7 does not know it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """One parameter as FSDP shards it on dimension 0."""

    fqn: str
    shape: tuple[int, ...]
    """Shape FSDP sees: whole, or this rank's part under tensor parallelism."""
    dtype: str
    """Original dtype, of the shard."""
    requires_grad: bool
    shards: int
    """Ranks it is sharded over."""
    gather_dtype: str
    """Dtype it is gathered in."""
    position: int
    """Index in the model's ``named_parameters()``."""
    replicated: bool = False
    """Whole on every tensor-parallel rank."""

    @property
    def numel(self) -> int:
        """Elements, padding left out."""
        return _product(self.shape)

    @property
    def padded_shard_numel(self) -> int:
        """Elements of one shard with dimension 0 padded: ``ceil(d0 / N) * rest``."""
        return chunk_rows(self.shape[0], self.shards) * _product(self.shape[1:])

    @property
    def padded_numel(self) -> int:
        """Elements of all shards."""
        return self.padded_shard_numel * self.shards

    def shard_rows(self, rank: int) -> int:
        """Rows of dimension 0 that shard ``rank`` holds: short or zero at the end when uneven."""
        return rows_of_shard(self.shape[0], self.shards, rank)[1]

    def shard_numel(self, rank: int) -> int:
        """Elements shard ``rank`` holds, padding left out."""
        return self.shard_rows(rank) * _product(self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters gathered in one all-gather and reduced in one reduce-scatter."""

    fqn: str
    """As in FSDP's labels: the root is empty, grouped modules join as ``a, b``."""
    parameters: tuple[ShardedParameter, ...]
    reshard_after_forward: bool | int
    """Resolved: False keeps, True reshards, an integer reshards to that many ranks."""
    shards: int
    replicas: int


def wrap_units(model: Model, policy: PolicySpec) -> tuple[WrapUnit, ...]:
    """The ``fully_shard`` calls of a policy, bottom-up, the root last.

    Raises ``ModelError`` if a wrap item names nothing in the model, a module twice, or a chunked head.
    """
    names = dict(model.module.named_modules())
    units: dict[tuple[str, ...], None] = {}
    for item in policy.wrap:
        for unit in _matching_units(item, names, model):
            units[unit] = None
    repeated = [fqn for fqn, count in Counter(chain.from_iterable(units)).items() if count > 1]
    if repeated:
        raise ModelError(f"wrap: {repeated[0]} would be sharded twice")
    if policy.loss_chunks is not None and any("output" in unit for unit in units):
        raise ModelError("loss=chunked:K runs the head K times: leave it to the root group, do not wrap it")
    position = {fqn: index for index, fqn in enumerate(names)}
    ordered = sorted(units, key=lambda unit: (-unit[0].count("."), position[unit[0]]))
    last_block = model.blocks[-1] if model.blocks else None
    wrapped = [
        WrapUnit(fqns=unit, reshard_after_forward=_unit_reshard(policy, unit == (last_block,)))
        for unit in ordered
    ]
    return (*wrapped, WrapUnit(fqns=("",), reshard_after_forward=_root_reshard(policy)))


def freeze(module: nn.Module, policy: PolicySpec) -> None:
    """Set ``requires_grad`` of every parameter from ``policy.trainable``.

    Raises ``ModelError`` if no parameter stays trainable.
    """
    if policy.trainable is None:
        return
    pattern = re.compile(policy.trainable)
    trainable = 0
    for fqn, parameter in module.named_parameters():
        parameter.requires_grad_(pattern.search(fqn) is not None)
        trainable += parameter.requires_grad
    if trainable == 0:
        raise ModelError(f"trainable: {policy.trainable!r} matches no parameter of the model")


def parameter_groups(model: Model, mesh: MeshSpec, policy: PolicySpec) -> tuple[ParameterGroup, ...]:
    """FSDP's parameter groups in the order of the wrapped modules in the model, the root first.

    A parameter belongs to its nearest wrapped ancestor; one shared by several modules of a group counts
    once. Groups without parameters do not exist. Raises ``ModelError`` for what ``fully_shard`` would
    refuse: a parameter shared between groups, a scalar parameter, a reshard size that does not divide.
    """
    units = wrap_units(model, policy)
    owner_of = {fqn: unit for unit in units for fqn in unit.fqns}
    members: dict[WrapUnit, list[ShardedParameter]] = {unit: [] for unit in units}
    seen: dict[int, tuple[WrapUnit, str]] = {}
    owners: dict[str, WrapUnit] = {}
    for module_fqn, module in model.module.named_modules(remove_duplicate=False):
        own = owner_of.get(module_fqn)
        owners[module_fqn] = own or owners[module_fqn.rpartition(".")[0]]
        for name, parameter in module.named_parameters(recurse=False):
            fqn = f"{module_fqn}.{name}".lstrip(".")
            unit, first = seen.setdefault(id(parameter), (owners[module_fqn], fqn))
            if unit is not owners[module_fqn]:
                raise ModelError(
                    f"{first} and {fqn} share one parameter but fall into different groups: "
                    "wrap their modules together (a+b) or leave both to the root"
                )
            if first == fqn:
                members[unit].append(_sharded(model, mesh, policy, fqn, module, parameter, len(seen) - 1))
    order = {unit: index for index, unit in enumerate(dict.fromkeys(owners.values()))}
    groups = [
        ParameterGroup(
            fqn=", ".join(unit.fqns),
            parameters=tuple(members[unit]),
            reshard_after_forward=_resolve_reshard(unit, mesh.fsdp_size),
            shards=mesh.fsdp_size,
            replicas=mesh.dp_replicate,
        )
        for unit in sorted(units, key=lambda unit: order[unit])
        if members[unit]
    ]
    return tuple(groups)


def _matching_units(item: str, names: dict[str, nn.Module], model: Model) -> Iterable[tuple[str, ...]]:
    if item == "root":
        return ()
    if item == "block":
        if not model.blocks:
            raise ModelError(f"wrap: {model.name} has no repeated block; name classes or modules to wrap")
        return [(fqn,) for fqn in model.blocks]
    if "+" in item:
        unit = tuple(item.split("+"))
        missing = next((fqn for fqn in unit if fqn not in names), None)
        if missing is not None:
            raise ModelError(f"wrap: no module {missing!r} in {model.name}")
        return [unit]
    found = [(fqn,) for fqn, module in names.items() if fqn and _matches(item, fqn, type(module).__name__)]
    if not found:
        raise ModelError(f"wrap: no class or module {item!r} in {model.name}")
    return found


def _matches(item: str, fqn: str, class_name: str) -> bool:
    return item == class_name or (fqn.count(".") == item.count(".") and fnmatchcase(fqn, item))


def _unit_reshard(policy: PolicySpec, is_last_block: bool) -> bool | int:
    if policy.reshard == "default":
        return True
    if policy.reshard == "torchtitan":
        return not is_last_block
    return policy.reshard == "always" if isinstance(policy.reshard, str) else policy.reshard


def _root_reshard(policy: PolicySpec) -> bool | int:
    if not root_obeys_reshard():
        return False
    if policy.reshard_root is not None:
        return policy.reshard_root
    return False if policy.reshard in ("default", "torchtitan") else _unit_reshard(policy, False)


def _resolve_reshard(unit: WrapUnit, shards: int) -> bool | int:
    value = unit.reshard_after_forward
    if isinstance(value, bool):
        return value
    if value > shards or shards % value:
        raise ModelError(f"reshard: {value} ranks do not divide the {shards} ranks of the shard group")
    return value > 1 if value in (1, shards) else value


def _sharded(
    model: Model,
    mesh: MeshSpec,
    policy: PolicySpec,
    fqn: str,
    module: nn.Module,
    parameter: nn.Parameter,
    position: int,
) -> ShardedParameter:
    from torch import nn

    if parameter.ndim == 0:
        raise ModelError(f"{fqn} is a scalar: fully_shard needs at least one dimension; make it shape (1,)")
    whole = tuple(parameter.shape)
    shape = _tensor_parallel_shape(model, fqn, whole, mesh.tp) if mesh.tp > 1 else whole
    is_float8 = (
        policy.fp8_all_gather
        and isinstance(module, nn.Linear)
        and parameter.ndim == 2
        and any(fqn.startswith(f"{block}.") for block in model.blocks)
    )
    return ShardedParameter(
        fqn=fqn,
        shape=shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        requires_grad=parameter.requires_grad,
        shards=mesh.fsdp_size,
        gather_dtype="float8_e4m3fn" if is_float8 else policy.compute_dtype,
        position=position,
        replicated=mesh.tp > 1 and shape == whole,
    )


def _tensor_parallel_shape(model: Model, fqn: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if model.tensor_parallel_dim is None:
        raise ModelError(f"{model.name} has no tensor-parallel plan: leave tp=1 or choose an untied built-in")
    dim = model.tensor_parallel_dim(fqn)
    if dim is None:
        return shape
    return tuple(-(-size // tp) if axis == dim else size for axis, size in enumerate(shape))


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
