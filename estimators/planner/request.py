"""What a plan is asked for, and one configuration that could be the answer.

A plan's calls of the execution engine: in this process, or in those of a workflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec

Objective = Literal["tokens", "cost", "memory"]
"""``tokens``: most tokens per second. ``cost``: fewest GPU-hours a token. ``memory``: the smallest peak."""

_SEARCHED = (
    "batch_size",
    "grad_accum",
    "sync",
    "ac",
    "reshard",
    "offload",
    "forward_prefetch",
    "reduce_dtype",
    "orig_dtype",
    "backward_prefetch",
    "compile",
    "float8",
    "pp_schedule",
    "allocator",
    "expert_shards",
)
_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh with one policy."""

    mesh: MeshSpec
    policy: PolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Model, cluster, batch and limits of a plan.

    Raises ``ModelError`` for a request that no configuration can meet.
    """

    model: ModelSpec
    cluster: Cluster
    gpus: int
    global_batch: int
    """Sequences of one optimizer step, all ranks together."""
    policy: PolicySpec = field(default_factory=PolicySpec)
    """Sequence length, and everything that is not searched."""
    fixed_mesh: Mapping[str, int] = field(default_factory=dict)
    fixed_policy: Mapping[str, Any] = field(default_factory=dict)
    reserve_frac: float = 0.1
    """Share of the device's memory to leave free."""
    objective: Objective = "tokens"
    price_per_gpu_hour: float | None = None
    currency: str | None = None
    tokens: int | None = None
    """Tokens of the whole training, for its GPU-hours."""
    budget_gpu_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch"):
            if getattr(self, name) < 1:
                raise ModelError(f"plan: {name.replace('_', '-')} must be at least 1")
        if not 0 <= self.reserve_frac < 1:
            raise ModelError(f"plan: reserve must be from 0% to less than 100%, not {self.reserve_frac:.0%}")
        for name, value in (("price", self.price_per_gpu_hour), ("budget", self.budget_gpu_hours)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ModelError(f"plan: {name} must be a number above 0, not {value:g}")
        product = 1
        for name, size in self.fixed_mesh.items():
            product *= size if name != "ep" else 1  # out of the ranks of dp_shard x cp
            if self.gpus % size:
                raise ModelError(f"plan: {name}={size} does not divide {self.gpus} GPUs")
        if self.gpus % product:
            sizes = ",".join(f"{name}={size}" for name, size in self.fixed_mesh.items())
            raise ModelError(f"plan: {sizes} does not divide {self.gpus} GPUs")
        if self.cluster.network is None and self.gpus > self.cluster.gpus_per_node:
            raise ModelError(
                f"plan: {self.gpus} GPUs are more than one node of {self.cluster.gpus_per_node}: "
                "name what connects them with --network"
            )

    @property
    def limit_bytes(self) -> int:
        """Device memory that a configuration may take, the headroom left out."""
        return int(self.cluster.hardware.memory_bytes * (1 - self.reserve_frac))


def parse_fixed(text: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Parse ``tp=8,ac=op`` into mesh dimensions and policy options. Raises ``ModelError``."""
    mesh: dict[str, int] = {}
    policy: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise ModelError(f"fix: {item!r} is not NAME=VALUE; write for example tp=8,ac=op")
        if name in _DIMS:
            mesh[name] = getattr(MeshSpec.parse(item), name)
        elif name in _SEARCHED:
            policy[name] = _typed(name, value)
        else:
            raise ModelError(f"fix: no {name!r} to fix; there are {', '.join((*_DIMS, *_SEARCHED))}")
    return mesh, policy


def _typed(name: str, text: str) -> Any:
    value: Any = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
    try:
        return options_of(PolicySpec)[name].kind.read(value)
    except ValueError as error:
        raise ModelError(f"fix: {name}: {error}") from None


def family_of(mesh: MeshSpec) -> str:
    """Name the kinds of parallelism of a mesh: ``FSDP``, ``HSDP + TP``, ..."""
    first = "HSDP" if mesh.dp_replicate > 1 else "FSDP"
    if mesh.dp_replicate > 1 and mesh.fsdp_size == 1:
        first = "DDP"
    more = [name.upper() for name in ("tp", "cp", "pp", "ep") if getattr(mesh, name) > 1]
    return " + ".join([first, *more])


Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the engine and its arguments."""
Engine: TypeAlias = Callable[[Sequence[Call]], list[Any]]
"""Runs the execution engine on several inputs, in parallel if there are processes for it.

Returns the results of all calls, in order; a call that cannot run returns its ``ModelError``.
"""


def in_this_process(calls: Sequence[Call]) -> list[Any]:
    """The engine without processes."""
    return [run_one(call) for call in calls]


def run_one(call: Call) -> Any:
    """Return the result of a call, or the ``ModelError`` that it raises."""
    function, item = call
    try:
        return function(item)
    except ModelError as error:
        return error
