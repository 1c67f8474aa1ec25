"""Changes that make a run fit on its device, each tried: estimated as the run itself is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.spec.hardware import HardwareSpec
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.results import MemoryEstimate, TriedChange
from fsdp2prof.units import format_bytes

__all__ = ["with_tried_changes"]

_WANTED = 3
"""Changes that fit, after which no more are tried."""
_TRIALS = 8
_CHUNKS = 8


def with_tried_changes(
    estimate: MemoryEstimate, model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, hardware: HardwareSpec
) -> MemoryEstimate:
    """Return an estimate that does not surely fit with up to three changes that do, each estimated.

    Single changes come before combinations, and what costs least before what costs more: checkpointing, a
    smaller micro-batch, a loss in pieces, resharding, more ranks, the host's memory. An estimate that fits is
    returned as it is.
    """
    if estimate.fit is None or estimate.fit == "fits":
        return estimate
    tried: list[TriedChange] = []
    for count, (names, other_mesh, other_policy) in enumerate(_combined(mesh, policy)):
        if count == _TRIALS or sum(one.fits for one in tried) == _WANTED:
            break
        if any(set(names) > set(one.changes) for one in tried if one.fits):
            continue
        try:
            made = estimate_memory(model, other_mesh, other_policy, hardware=hardware)
        except ModelError:
            continue
        tried.append(
            TriedChange(
                changes=list(names),
                mesh=made.mesh,
                policy=made.policy,
                reserved_bytes=made.peak.reserved_bytes,
                headroom_bytes=made.headroom_bytes or 0,
                fits=made.fit == "fits",
            )
        )
    return replace(estimate, tried=tried, advice=_advice(tried))


def _combined(mesh: MeshSpec, policy: PolicySpec) -> Iterator[tuple[tuple[str, ...], MeshSpec, PolicySpec]]:
    """Yield changes alone, then in pairs, then all that cost no more ranks and no host memory at once."""
    singles = list(_changes(mesh, policy))
    cheap = [change for change in singles if change[3]]
    sets = [(change,) for change in singles]
    sets += list(combinations(cheap, 2))[:3]
    if len(cheap) > 2:
        sets.append(tuple(cheap))
    sets += [(*cheap, change) for change in singles if not change[3]]
    for chosen in sets:
        dims: dict[str, int] = {}
        options: dict[str, object] = {}
        for _, mesh_change, policy_change, _ in chosen:
            dims |= mesh_change
            options |= policy_change
        names = tuple(name for name, *_ in chosen)
        yield names, replace(mesh, **dims), replace(policy, **options)  # type: ignore[arg-type]


def _changes(
    mesh: MeshSpec, policy: PolicySpec
) -> Iterator[tuple[str, dict[str, int], dict[str, object], bool]]:
    """Yield each change: in words, of the mesh, of the policy, whether it needs neither ranks nor host."""
    if policy.ac != "full":
        yield "ac=full", {}, {"ac": "full"}, True
    if policy.batch_size > 1 and mesh.pp == 1:
        accumulated = policy.grad_accum * policy.batch_size
        name = f"batch_size=1, grad_accum={accumulated}, sync=each"
        yield name, {}, {"batch_size": 1, "grad_accum": accumulated, "sync": "each"}, True
    if policy.loss_chunks is None and mesh.tp == 1 and mesh.pp == 1:
        yield f"loss=chunked:{_CHUNKS}", {}, {"loss": f"chunked:{_CHUNKS}"}, True
    if policy.reshard == "never" and mesh.pp == 1:
        yield "reshard=default", {}, {"reshard": "default"}, True
    if policy.grad_accum > 1 and policy.sync == "last" and mesh.pp == 1 and policy.batch_size == 1:
        yield "sync=each", {}, {"sync": "each"}, True
    yield f"dp_shard={2 * mesh.dp_shard}", {"dp_shard": 2 * mesh.dp_shard}, {}, False
    if not policy.offload:
        yield "offload", {}, {"offload": True}, False


def _advice(tried: list[TriedChange]) -> list[str]:
    fitting = [one for one in tried if one.fits]
    if not fitting:
        least = min(tried, key=lambda one: one.reserved_bytes, default=None)
        if least is None:
            return ["no change that is known could be tried"]
        return [
            f"none of {len(tried)} changes that were tried fits; the smallest, "
            f"{' with '.join(least.changes)}, reserves {format_bytes(least.reserved_bytes)}"
        ]
    return [
        f"fits, tried: {' with '.join(one.changes)} ({format_bytes(one.reserved_bytes)} reserved, "
        f"{format_bytes(one.headroom_bytes)} left)"
        for one in fitting
    ]
