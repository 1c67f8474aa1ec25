"""Which process group, and which mesh dimension, a collective ran on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.collective_names import itemsize
from fsdp2prof.analyzers.phases import qualified_fqn
from fsdp2prof.manifest import ParamGroupInfo, ProcessGroupInfo, RankManifest
from fsdp2prof.tables import IntArray, Strings

__all__ = ["Groups", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """One row per collective."""

    name: Strings
    mesh_dim: Strings
    size: IntArray
    """Ranks; -1 unknown."""


def resolve(
    known: Sequence[ProcessGroupInfo],
    manifest: RankManifest | None,
    *,
    name: Strings,
    desc: Strings,
    size: IntArray,
    op: Strings,
    fqn: Strings,
    phase: Strings,
    payload: IntArray,
) -> Groups:
    """Return the process group of each collective.

    By its metadata's name; without one (gloo), by the manifest's parameter group of its layer, told apart by
    payload where a module has several; without a manifest, by its size if only one group has it, or if there
    is only one group. A group that cannot be told is null. The mesh dimension is the manifest's, else the one
    in the group's description (``mesh_dp_shard``).
    """
    groups = {group.name: group for group in [*known, *(manifest.process_groups if manifest else ())]}
    by_layer = _layer_groups(manifest)
    answers: dict[tuple[object, ...], tuple[str | None, str | None, int]] = {}
    rows = []
    columns = (
        name.to_list(),
        desc.to_list(),
        size.tolist(),
        op.to_list(),
        fqn.to_list(),
        phase.to_list(),
        payload.tolist(),
    )
    for key in zip(*columns, strict=True):
        if key not in answers:
            written, described, ranks, kind, layer, when, moved = key
            chosen = written or _from_manifest(by_layer, kind, layer, when, moved)
            chosen = chosen or _only(_of_size(groups.values(), ranks))
            group = groups.get(chosen) if chosen is not None else None
            dim = (group.mesh_dim or _mesh_dim(group.desc) if group else None) or _mesh_dim(described)
            answers[key] = (
                chosen,
                dim,
                ranks if ranks > 0 else len(group.ranks) if group and group.ranks else -1,
            )
        rows.append(answers[key])
    return Groups(
        name=Strings.intern(row[0] for row in rows),
        mesh_dim=Strings.intern(row[1] for row in rows),
        size=np.array([row[2] for row in rows], dtype=np.int64),
    )


def _of_size(groups: Iterable[ProcessGroupInfo], ranks: int) -> Iterable[str]:
    """Names of the groups of so many ranks (below 0: unknown, any) that need to communicate at all."""
    return (group.name for group in groups if len(group.ranks) > 1 and ranks in (len(group.ranks), -1))


def _layer_groups(manifest: RankManifest | None) -> dict[str, list[ParamGroupInfo]]:
    layers: dict[str, list[ParamGroupInfo]] = {}
    if manifest is not None:
        roots = len({group.root for group in manifest.param_groups})
        for group in manifest.param_groups:
            layers.setdefault(qualified_fqn(group.fqn, group.root, roots), []).append(group)
    return layers


def _from_manifest(
    layers: dict[str, list[ParamGroupInfo]], op: str | None, fqn: str | None, phase: str | None, payload: int
) -> str | None:
    candidates = layers.get(fqn, []) if fqn is not None else []
    if len(candidates) > 1:
        exact = [group for group in candidates if _payload(group, op) == payload]
        candidates = exact or candidates
    return _only(_group_of(group, op, phase) for group in candidates)


def _group_of(group: ParamGroupInfo, op: str | None, phase: str | None) -> str | None:
    if op == "all_gather":
        if phase == "backward" and group.post_forward_group is not None:
            return group.post_forward_group
        return group.shard_group
    return {"reduce_scatter": group.reduce_scatter_group, "all_reduce": group.all_reduce_group}.get(op or "")


def _payload(group: ParamGroupInfo, op: str | None) -> int:
    """Payload of a group's collective."""
    if op == "all_gather":
        shard = sum(
            count * itemsize(dtype)
            for parameter in group.parameters
            for count, dtype in zip(parameter.all_gather_numels, parameter.all_gather_dtypes, strict=True)
        )
        return shard * group.shard_world_size
    shard = sum(
        _numel(p.padded_local_shape) * itemsize(group.reduce_dtype or group.param_dtype or p.dtype)
        for p in group.parameters
        if p.requires_grad
    )
    return shard * group.shard_world_size if op == "reduce_scatter" else shard


def _numel(shape: Iterable[int]) -> int:
    return int(np.prod(list(shape), dtype=np.int64))


def _mesh_dim(desc: str | None) -> str | None:
    return desc.removeprefix("mesh_") if desc is not None and desc.startswith("mesh_") else None


def _only(names: Iterable[str | None]) -> str | None:
    """Return the one name there is, if there is exactly one."""
    distinct = {name for name in names if name is not None}
    return distinct.pop() if len(distinct) == 1 else None
