"""What FSDP2 issues in a training step: the collectives of the parameter groups, in their order.

It gathers the groups in the order of the forward, gathers again in reverse those that it had resharded, and
reduces in reverse. The forward is taken to run modules in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fsdp2prof.manifest import ParamGroupInfo, RankManifest
from fsdp2prof.units import dtype_bytes

__all__ = ["Due", "Key", "Layer", "nested", "step_cycles"]

Key: TypeAlias = tuple[str | None, str, int | None]
"""Process group, operation, bytes of one rank's input."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the phase of its collective; None where unknown."""

    fqn: str | None
    phase: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """A collective that FSDP2 issues once a step."""

    key: Key
    layer: Layer


def step_cycles(manifest: RankManifest) -> tuple[list[Due], list[Due], list[Due]]:
    """Return the all-gathers, reduce-scatters and all-reduces of a step, each in order."""
    groups = manifest.param_groups
    return _gathers(groups), _reductions(groups), _replicas(groups)


def nested(groups: Sequence[ParamGroupInfo]) -> bool:
    """Whether a group other than the root's lies within another's module, or there are several roots."""
    names = [group.fqn for group in groups]
    within = any(one and other.startswith(f"{one}.") for one in names for other in names)
    return within or len({group.root for group in groups}) > 1


def _gathers(groups: Sequence[ParamGroupInfo]) -> list[Due]:
    forward = [group for group in groups if group.shard_group is not None]
    again = [g for g in reversed(forward) if g.reshard_after_forward is True and g.unshard_in_backward]
    return [
        Due((group.shard_group, "all_gather", _gather_bytes(group)), Layer(group.fqn, phase))
        for phase, part in (("forward", forward), ("backward", again))
        for group in part
    ]


def _reductions(groups: Sequence[ParamGroupInfo]) -> list[Due]:
    return [
        Due(
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


def _replicas(groups: Sequence[ParamGroupInfo]) -> list[Due]:
    return [
        Due((group.all_reduce_group, "all_reduce", _shard_bytes(group)), Layer(group.fqn, "backward"))
        for group in reversed(groups)
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
