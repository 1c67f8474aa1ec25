"""Every configuration that could be the answer: meshes by what fits on a node, batches, policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import Every, Interleaved, PolicySpec
from fsdp2prof.estimators.traffic.parallel import check_parallelism

__all__ = ["candidates", "meshes"]

_MAX_CP = 16
_MAX_BATCH = 32
_EVERY = (2, 4)
_STAGES_PER_RANK = 2
"""Of a pipeline's rank under interleaved 1F1B."""


def meshes(request: PlanRequest, model: Model) -> Iterator[MeshSpec]:
    """Yield the meshes of all GPUs that the model and the sequence can be divided over.

    Tensor and context parallelism stay within a node where it has room for them; shards of a replica fill
    whole nodes or a part of one.
    """
    node = request.cluster.gpus_per_node
    for pp, tp, cp in product(*(_sizes(request, name) for name in ("pp", "tp", "cp"))):
        if ("tp" not in request.fixed_mesh and tp > node) or request.gpus % (pp * tp * cp):
            continue
        if cp > _MAX_CP and "cp" not in request.fixed_mesh:
            continue
        data = request.gpus // (pp * tp * cp)
        for replicas in _divisors(data):
            shards = data // replicas
            fixed = request.fixed_mesh
            if replicas != fixed.get("dp_replicate", replicas) or shards != fixed.get("dp_shard", shards):
                continue
            if replicas > 1 and not _fills_nodes(shards * cp * tp, node):
                continue
            mesh = MeshSpec(pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp)
            if _divides(request, model, mesh):
                yield mesh


def candidates(request: PlanRequest, model: Model, mesh: MeshSpec) -> Iterator[Candidate]:
    """Yield every policy for a mesh."""
    fixed = request.fixed_policy
    data = mesh.dp_replicate * mesh.dp_shard
    if request.global_batch % data:
        return
    per_rank = request.global_batch // data
    checkpointing = ("none", "op", *map(Every, _EVERY), "full") if model.blocks else ("none",)
    for batch in _divisors(per_rank):
        if (batch > _MAX_BATCH and "batch_size" not in fixed) or batch != fixed.get("batch_size", batch):
            continue
        accumulated = per_rank // batch
        if accumulated != fixed.get("grad_accum", accumulated):
            continue
        choices: dict[str, tuple[Any, ...]] = {
            "sync": ("last",) if accumulated == 1 or mesh.pp > 1 else ("last", "each"),
            "ac": checkpointing,
            "reshard": _reshards(request, mesh),
            "pp_schedule": _schedules(model, mesh, accumulated),
        }
        choices |= {name: (value,) for name, value in fixed.items() if name in choices}
        rest = {name: value for name, value in fixed.items() if name not in choices}
        for values in product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            options = {**rest, **chosen, "batch_size": batch, "grad_accum": accumulated}
            yield Candidate(mesh, _policy(request.policy, tuple(options.items())))


@lru_cache(maxsize=1 << 14)
def _policy(base: PolicySpec, options: tuple[tuple[str, Any], ...]) -> PolicySpec:
    """Meshes share policies: each is checked once."""
    return replace(base, **dict(options))


def _reshards(request: PlanRequest, mesh: MeshSpec) -> tuple[Any, ...]:
    if mesh.pp > 1:
        return ("never",)
    node = request.cluster.gpus_per_node
    inside = (node,) if mesh.tp == 1 and mesh.fsdp_size > node and mesh.fsdp_size % node == 0 else ()
    return ("default", "never", *inside)


def _schedules(model: Model, mesh: MeshSpec, micro_batches: int) -> tuple[Any, ...]:
    """One stage a rank, and two where layers and micro-batches divide so."""
    stages = _STAGES_PER_RANK
    if mesh.pp == 1 or model.config is None or model.config.layers % (mesh.pp * stages):
        return ("1f1b",)
    full_rounds = micro_batches % max(1, micro_batches // mesh.pp) == 0
    return ("1f1b", Interleaved(stages)) if full_rounds else ("1f1b",)


def _sizes(request: PlanRequest, name: str) -> tuple[int, ...]:
    fixed = request.fixed_mesh.get(name)
    return (fixed,) if fixed is not None else tuple(_divisors(request.gpus))


def _fills_nodes(ranks: int, node: int) -> bool:
    return ranks % node == 0 or node % ranks == 0


def _divides(request: PlanRequest, model: Model, mesh: MeshSpec) -> bool:
    if request.global_batch % (mesh.dp_replicate * mesh.dp_shard):
        return False
    if mesh.pp > 1 and (model.config is None or model.config.layers % mesh.pp or mesh.pp > 16):
        return False
    policy: PolicySpec = replace(request.policy, reshard="never") if mesh.pp > 1 else request.policy
    try:
        check_parallelism(model, mesh, policy)
    except ModelError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
