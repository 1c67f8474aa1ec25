"""Which layer's parameters a collective moves, and in which phase, by the parameter groups of a manifest.

A size that only one group has decides the layer. Where several have it, the order does: FSDP2 gathers the
groups in the order of the forward, gathers again in reverse those that it had resharded, and reduces in
reverse. The recorded calls must fit that order at one place only, else the layer stays unknown. The forward
is taken to run modules in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fsdp2prof.manifest import ParamGroupInfo, RankManifest
from fsdp2prof.tables.flight_recorder import FlightDump, Issued
from fsdp2prof.units import dtype_bytes

__all__ = ["Layer", "layer_of"]

_Key = tuple[str | None, str, int | None]
"""Process group, operation, bytes that one rank brings or gets as its shard."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the phase of its collective; None where unknown."""

    fqn: str | None
    phase: str | None


@dataclass(frozen=True, slots=True)
class _Due:
    """A collective that FSDP2 issues once a step."""

    key: _Key
    layer: Layer


def layer_of(one: Issued, dump: FlightDump, manifest: RankManifest | None) -> Layer | None:
    """Return the layer of a call of a rank's dump; None where it is not FSDP's or cannot be told."""
    if manifest is None or one.p2p:
        return None
    for cycle in (_gathers(manifest.param_groups), _reductions(manifest.param_groups), _replicas(manifest)):
        keys = {due.key for due in cycle}
        if (key := _key(one, keys)) is not None:
            by_order = [] if _nested(manifest.param_groups) else _at(one, dump, cycle, keys)
            return _decided([due.layer for due in cycle if due.key == key], by_order)
    return None


def _decided(by_size: Sequence[Layer], by_order: Sequence[Layer]) -> Layer | None:
    for layers in (by_order, by_size):
        if len({layer.fqn for layer in layers}) == 1:
            phases = {layer.phase for layer in layers}
            return Layer(layers[0].fqn, phases.pop() if len(phases) == 1 else None)
    return None


def _at(one: Issued, dump: FlightDump, cycle: Sequence[_Due], keys: set[_Key]) -> list[Layer]:
    """Places in the cycle at which the calls up to this one fit it."""
    told = [key for issued in _until(one, dump.issued) if (key := _key(issued, keys)) is not None]
    places = range(len(cycle)) if not dump.whole else [(len(told) - 1) % len(cycle)]
    told = told[-2 * len(cycle) :]
    return [
        cycle[place].layer
        for place in places
        if all(cycle[(place - back) % len(cycle)].key == key for back, key in enumerate(reversed(told)))
    ]


def _until(one: Issued, issued: Iterable[Issued]) -> Iterable[Issued]:
    for other in issued:
        yield other
        if other is one:
            return


def _key(one: Issued, keys: set[_Key]) -> _Key | None:
    """The key of a call among some; gloo runs a reduce-scatter as an all-reduce of the whole input."""
    size = one.input_bytes
    if size is None:
        return None
    ops = (one.op, "reduce_scatter") if one.backend == "gloo" and one.op == "all_reduce" else (one.op,)
    return next((key for op in ops if (key := (one.group, op, size)) in keys), None)


def _gathers(groups: Sequence[ParamGroupInfo]) -> list[_Due]:
    forward = [group for group in groups if group.shard_group is not None]
    again = [g for g in reversed(forward) if g.reshard_after_forward is True and g.unshard_in_backward]
    return [
        _Due((group.shard_group, "all_gather", _gather_bytes(group)), Layer(group.fqn, phase))
        for phase, part in (("forward", forward), ("backward", again))
        for group in part
    ]


def _reductions(groups: Sequence[ParamGroupInfo]) -> list[_Due]:
    return [
        _Due(
            (
                group.reduce_scatter_group,
                "reduce_scatter",
                _times(_shard_bytes(group), group.shard_world_size),
            ),
            Layer(group.fqn, "backward"),
        )
        for group in reversed(groups)
        if group.reduce_scatter_group is not None and group.requires_grad
    ]


def _replicas(manifest: RankManifest) -> list[_Due]:
    return [
        _Due((group.all_reduce_group, "all_reduce", _shard_bytes(group)), Layer(group.fqn, "backward"))
        for group in reversed(manifest.param_groups)
        if group.all_reduce_group is not None and group.requires_grad
    ]


def _gather_bytes(group: ParamGroupInfo) -> int | None:
    sizes = [
        _times(dtype_bytes(dtype), numel)
        for one in group.parameters
        for dtype, numel in zip(
            one.all_gather_dtypes or [group.param_dtype or one.dtype], one.all_gather_numels, strict=False
        )
    ]
    return _sum(sizes)


def _shard_bytes(group: ParamGroupInfo) -> int | None:
    return _sum(
        _times(
            dtype_bytes(group.reduce_dtype or group.param_dtype or one.dtype), prod(one.padded_local_shape)
        )
        for one in group.parameters
    )


def _times(size: int | None, factor: int) -> int | None:
    return None if size is None else size * factor


def _sum(sizes: Iterable[int | None]) -> int | None:
    listed = list(sizes)
    known = [size for size in listed if size is not None]
    return sum(known) if known and len(known) == len(listed) else None


def _nested(groups: Sequence[ParamGroupInfo]) -> bool:
    """Whether a group other than the root's lies within another's module, or there are several roots."""
    names = [group.fqn for group in groups]
    within = any(one and other.startswith(f"{one}.") for one in names for other in names)
    return within or len({group.root for group in groups}) > 1
