"""Which parameters FSDP gathers together, how many bytes each shard holds, and its optimizer state.

:func:`parameter_groups` derives from the ``fully_shard`` calls of a policy, which the execution engine makes,
the groups FSDP would form, without executing anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from fsdp2prof.analyzers.sharding.layout import chunk_rows, rows_of_shard
from fsdp2prof.by_key import grouped
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.optimizers import HeldOptimizer, OptimizerFactory, OptimizerKind
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.low_precision import is_in_float8
from fsdp2prof.estimators.models.model import ADAPTERS, Model
from fsdp2prof.estimators.sharding.wrapping import WrapUnit, wrap_units

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """One parameter as FSDP shards it."""

    fqn: str
    shape: tuple[int, ...]
    """Shape FSDP sees: whole, or this rank's part under tensor or expert parallelism."""
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
    dim: int = 0
    """Dimension that is sharded; only dimension 0 is padded."""
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Elements, padding left out."""
        return _product(self.shape)

    @property
    def padded_shard_numel(self) -> int:
        """Elements of one shard with dimension 0 padded: ``ceil(d0 / N) * rest``."""
        if self.dim:
            return self.numel // self.shards
        return chunk_rows(self.shape[0], self.shards) * _product(self.shape[1:])

    @property
    def padded_numel(self) -> int:
        """Elements of all shards."""
        return self.padded_shard_numel * self.shards

    def shard_rows(self, rank: int) -> int:
        """Rows of dimension 0 that shard ``rank`` holds: short or zero at the end when uneven."""
        if self.dim:
            return self.shape[0]
        return rows_of_shard(self.shape[0], self.shards, rank)[1]

    def shard_numel(self, rank: int) -> int:
        """Elements shard ``rank`` holds, padding left out."""
        if self.dim:
            return self.padded_shard_numel
        return self.shard_rows(rank) * _product(self.shape[1:])

    def shard_numels(self) -> list[tuple[int, int]]:
        """Elements of a shard and the number of shards of that size, without empty ones."""
        if self.dim:
            return [(self.padded_shard_numel, self.shards)]
        rest = self.shape[0] % chunk_rows(self.shape[0], self.shards) * _product(self.shape[1:])
        whole = (self.padded_shard_numel, self.shape[0] // chunk_rows(self.shape[0], self.shards))
        return [whole, (rest, 1)] if rest else [whole]


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
    reduce_dtype: str | None
    """As it is set; None is the gradients' own."""
    gradient_dtype: str
    """Of its reduce-scatter."""
    forward_prefetch: tuple[str, ...] = ()
    """Groups it prefetches in forward."""
    backward_prefetch: tuple[str, ...] = ()
    """Groups it prefetches explicitly in backward; none leaves that to FSDP."""
    unshard_in_backward: bool = True
    is_expert: bool = False
    """Its parameters are experts with a separate mesh."""


def freeze(model: Model, policy: PolicySpec) -> None:
    """Freeze parameters that ``policy.trainable`` does not match (except adapters) or that the batches do
    not reach.

    Raises ``ModelError`` if no parameter stays trainable.
    """
    for fqn in model.idle:
        model.module.get_submodule(fqn).requires_grad_(False)
    if policy.trainable is None and policy.lora is None:
        return
    adapters = () if policy.lora is None else ADAPTERS
    pattern = re.compile(policy.trainable) if policy.trainable is not None else None
    idle = tuple(f"{fqn}." for fqn in model.idle)
    trainable = 0
    for fqn, parameter in model.module.named_parameters():
        trains = any(part in f".{fqn}" for part in adapters)
        trains |= pattern is not None and pattern.search(fqn) is not None and not fqn.startswith(idle)
        parameter.requires_grad_(trains)
        trainable += trains
    if trainable == 0:
        raise ModelError(f"trainable: {policy.trainable!r} matches no parameter of the model")


def parameter_groups(model: Model, mesh: MeshSpec, policy: PolicySpec) -> tuple[ParameterGroup, ...]:
    """FSDP's parameter groups in the order of the wrapped modules in the model, the root first.

    A parameter belongs to its nearest wrapped ancestor; one shared by several modules of a group counts
    once. Under expert parallelism a module's experts form a group of their own beside it. Groups without
    parameters do not exist. Raises ``ModelError`` for what ``fully_shard`` would refuse: a parameter shared
    between groups, a scalar parameter, a size that does not divide.
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
                sharded = _sharded(model, mesh, policy, unit, fqn, module, parameter, len(seen) - 1)
                members[unit].append(sharded)
    order = {unit: index for index, unit in enumerate(dict.fromkeys(owners.values()))}
    groups = [
        ParameterGroup(
            fqn=unit.label,
            parameters=tuple(same),
            reshard_after_forward=_resolve_reshard(unit, same[0].shards),
            shards=same[0].shards,
            replicas=mesh.dp_replicate,
            reduce_dtype=unit.reduce_dtype,
            gradient_dtype=unit.reduce_dtype or unit.param_dtype or same[0].dtype,
            forward_prefetch=tuple(map(", ".join, unit.forward_prefetch)),
            backward_prefetch=tuple(map(", ".join, unit.backward_prefetch)),
            unshard_in_backward=unit.unshard_in_backward,
            is_expert=mesh.ep > 1 and same[0].is_expert,
        )
        for unit in sorted(units, key=lambda unit: order[unit])
        for same in _of_one_mesh(members[unit], mesh)
    ]
    return tuple(groups)


def shard_dim(shape: Sequence[int], shards: int, policy: PolicySpec, *, apart: bool) -> int:
    """Dimension on which FSDP shards an expert parameter of ``shape`` over ``shards`` ranks.

    ``apart``: expert parallelism distributes the experts, and ``shape`` is that of this rank's.
    """
    if policy.expert_shards == "auto":
        return int(apart and shards > shape[0])
    return int(policy.expert_shards == "hidden")


def _of_one_mesh(parameters: Sequence[ShardedParameter], mesh: MeshSpec) -> list[list[ShardedParameter]]:
    """Divide a unit's parameters by the mesh they are sharded over, in the order of their first."""
    return list(
        grouped((mesh.ep > 1 and parameter.is_expert, parameter) for parameter in parameters).values()
    )


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
    unit: WrapUnit,
    fqn: str,
    module: nn.Module,
    parameter: nn.Parameter,
    position: int,
) -> ShardedParameter:
    from torch import nn

    if parameter.ndim == 0:
        raise ModelError(f"{fqn} is a scalar: fully_shard needs at least one dimension; make it shape (1,)")
    whole = tuple(parameter.shape)
    plan = model.tensor_parallel
    shape = whole if mesh.tp == 1 or plan is None else plan.local_shape(fqn, whole, mesh.tp)
    dtype = str(parameter.dtype).removeprefix("torch.")
    is_float8 = (
        policy.fp8_all_gather
        and type(module) is nn.Linear
        and parameter is module.weight
        and is_in_float8(fqn.rpartition(".")[0], whole, model.blocks, "tensorwise")
    )
    cast_to = unit.param_dtype if parameter.is_floating_point() else None
    is_expert = fqn.rpartition(".")[0] in model.experts
    shards = mesh.expert_fsdp_size if is_expert else mesh.fsdp_size
    dim = shard_dim(shape, shards, policy, apart=mesh.ep > 1) if is_expert else 0
    if dim and shape[dim] % shards:
        raise ModelError(
            f"{fqn}: FSDP shards dimension {dim} evenly only, and {shards} ranks do not divide its "
            f"{shape[dim]}: set expert_shards=experts"
        )
    if is_float8 and shape[0] % shards:
        raise ModelError(
            f"fp8_all_gather: torchao gathers {fqn} evenly only, and {shards} ranks do not divide its "
            f"{shape[0]} rows: leave the option out"
        )
    return ShardedParameter(
        fqn=fqn,
        shape=shape,
        dtype=dtype,
        requires_grad=parameter.requires_grad,
        shards=shards,
        gather_dtype="float8_e4m3fn" if is_float8 else cast_to or dtype,
        position=position,
        replicated=mesh.tp > 1 and shape == whole and not (is_expert and mesh.ep > 1),
        dim=dim,
        is_expert=is_expert,
    )


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def optimizer_state_bytes(policy: PolicySpec, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of state for one parameter of ``shape`` (whole or a shard), without its step counter.

    Raises ``ModelError`` for optimizers whose state can only be found by running them.
    """
    kind = policy.optimizer_kind
    if isinstance(kind, OptimizerFactory):
        raise ModelError(f"optimizer {kind.source}: its state is known by running it alone")
    if isinstance(kind, HeldOptimizer):
        return sum(elements * dtype_bytes(held) for _, elements, held in kind.held.of(prod(shape), dtype))
    return 0 if kind is None else len(kind.state) * prod(shape) * dtype_bytes(dtype)


def step_counter_bytes(policy: PolicySpec) -> int:
    """Bytes of the step counter of one parameter: fp32, replicated on every rank."""
    kind = policy.optimizer_kind
    counts = isinstance(kind, HeldOptimizer) or (isinstance(kind, OptimizerKind) and kind.counts_steps)
    return dtype_bytes("float32") if counts else 0
