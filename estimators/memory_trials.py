"""Changes that make a run fit on its device, each tried: estimated as the run itself is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.results.estimate import MemoryEstimate, TriedChange
from fsdp2prof.units import format_bytes

_NONE: Mapping[PolicySpec, MemoryEstimate] = {}
_WANTED = 2
"""Changes that fit, after which no more are tried."""
_TRIALS = 6
_ALLOCATIONS = 100_000
"""Of all trials together: a large mixture of experts takes many seconds for each."""
_PAIRS = 3
_CHUNKS = 8
_WIDER = (2, 4, 8, 16)
"""How many times more ranks are tried."""


def with_tried_changes(
    estimate: MemoryEstimate,
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    hardware: HardwareSpec,
    *,
    allocations: int = 1,
    known: Mapping[PolicySpec, MemoryEstimate] = _NONE,
    progress: Callable[[str], None] = lambda _: None,
) -> MemoryEstimate:
    """Return an estimate that may not fit with two changes that make it fit, each estimated.

    Single changes come before combinations, and cheaper changes before more expensive ones: checkpointing,
    a smaller micro-batch, a chunked loss, resharding, more ranks, the host. Changes that cannot save
    enough, by the maximum of their remedies, are not tried. An estimate that fits is returned unchanged.
    ``allocations`` of the estimate's own execution give the cost of a trial, and so the number of trials;
    ``known`` are estimates of this model, mesh and device under other policies.
    """
    if estimate.fit is None or estimate.fit == "fits":
        return estimate
    tried: list[TriedChange] = []
    saved = {remedy.action: remedy.saves_bytes for remedy in estimate.remedies}
    missing = max(0, -(estimate.headroom_high_bytes or 0))
    trials = max(1, min(_TRIALS, _ALLOCATIONS // allocations))
    for chosen in _combined(mesh, policy, saved, missing):
        names = [change.name for change in chosen]
        if len(tried) == trials or sum(one.fits for one in tried) == _WANTED:
            break
        if sum(change.most_saved(saved) for change in chosen) < missing:
            continue
        if any(set(names) > set(one.changes) for one in tried if one.fits):
            continue
        other_mesh = replace(mesh, **{name: size for one in chosen for name, size in one.mesh.items()})
        other_policy = replace(
            policy, **{name: value for one in chosen for name, value in one.policy.items()}
        )
        made = known.get(other_policy) if other_mesh == mesh else None
        progress(f"trying {', '.join(names)}")
        try:
            made = made or estimate_memory(model, other_mesh, other_policy, hardware=hardware)
        except ModelError:
            continue
        tried.append(
            TriedChange(
                changes=names,
                mesh=made.mesh,
                policy=made.policy,
                reserved_bytes=made.peak.reserved_bytes,
                headroom_bytes=made.headroom_bytes or 0,
                fits=made.fit == "fits",
            )
        )
    return replace(estimate, tried=tried, advice=_advice(tried))


@dataclass(frozen=True, slots=True)
class _Change:
    """One change."""

    name: str
    """As the user writes it."""
    mesh: dict[str, int] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""
    """Action of the remedy that limits its saving."""
    times: float = 1.0
    """As much as that remedy, at most."""

    def most_saved(self, saved: Mapping[str, int]) -> float:
        """Return the maximum saving in bytes; changes without a remedy have no limit."""
        return self.times * saved.get(self.remedy, 0) if self.remedy in saved else float("inf")


def _combined(
    mesh: MeshSpec, policy: PolicySpec, saved: Mapping[str, int], missing: int
) -> Iterator[tuple[_Change, ...]]:
    """Yield single changes, then pairs, then all cheap ones, then these with more ranks or offloading.

    More ranks means the number that may save the ``missing`` bytes according to the remedies, and twice as
    many.
    """
    cheap = tuple(_changes(mesh, policy))
    host = tuple(_on_host(policy))
    bounds = [change.most_saved(saved) for change in cheap]
    rest = missing - sum(int(bound) for bound in bounds if bound < float("inf"))
    alone, beside = (_wider(mesh, saved, bytes_, 1)[0] for bytes_ in (missing, rest))
    sets: list[tuple[_Change, ...]] = [(change,) for change in (*cheap, alone, *host)]
    sets += list(combinations(cheap, 2))[:_PAIRS]
    if len(cheap) > 2:
        sets.append(cheap)
    if cheap:
        sets += [(*cheap, change) for change in (beside, *host, *_wider(mesh, saved, rest, 2)[1:])]
    yield from (*sets, (*cheap, beside, *host))


def _changes(mesh: MeshSpec, policy: PolicySpec) -> Iterator[_Change]:
    alone = mesh.pp == 1
    if policy.ac != "full":
        yield _Change("ac=full", policy={"ac": "full"}, remedy="activation_checkpointing")
    if policy.batch_size > 1 and alone:
        smaller = {"batch_size": 1, "grad_accum": policy.grad_accum * policy.batch_size, "sync": "each"}
        name = ", ".join(f"{name}={value}" for name, value in smaller.items())
        yield _Change(name, policy=smaller, remedy="smaller_batch", times=2 - 2 / policy.batch_size)
    if policy.loss != "fused" and not policy.loss_in_pieces and alone and mesh.tp == 1:
        yield _Change(f"loss=chunked:{_CHUNKS}", policy={"loss": f"chunked:{_CHUNKS}"}, remedy="chunked_loss")
    if policy.reshard == "never" and alone:
        yield _Change("reshard=default", policy={"reshard": "default"}, remedy="reshard_after_forward")
    if policy.grad_accum > 1 and policy.batch_size == 1 and policy.sync == "last" and alone:
        yield _Change("sync=each", policy={"sync": "each"})


def _wider(mesh: MeshSpec, saved: Mapping[str, int], missing: int, count: int) -> list[_Change]:
    """Return the sharding over fewest ranks that may be enough, and wider ones: ``count`` in all."""
    by_twice = saved.get("wider_sharding", 0)
    enough = next((at for at, more in enumerate(_WIDER) if (2 - 2 / more) * by_twice >= missing), None)
    first = (len(_WIDER) - 1 if by_twice else 0) if enough is None else enough
    return [
        _Change(
            f"dp_shard={more * mesh.dp_shard}",
            mesh={"dp_shard": more * mesh.dp_shard},
            remedy="wider_sharding",
            times=2 - 2 / more,
        )
        for more in _WIDER[first : first + count]
    ]


def _on_host(policy: PolicySpec) -> Iterator[_Change]:
    if not policy.offload:
        yield _Change("offload", policy={"offload": True}, remedy="cpu_offload")


def _advice(tried: list[TriedChange]) -> list[str]:
    fitting = [one for one in tried if one.fits]
    if not fitting:
        least = min(tried, key=lambda one: one.reserved_bytes, default=None)
        if least is None:
            return ["no known change applies"]
        return [
            f"none of {len(tried)} changes that were tried fits; the smallest, "
            f"{' with '.join(least.changes)}, reserves {format_bytes(least.reserved_bytes)}"
        ]
    return [
        f"fits, tried: {' with '.join(one.changes)} ({format_bytes(one.reserved_bytes)} reserved, "
        f"{format_bytes(one.headroom_bytes)} left)"
        for one in fitting
    ]
