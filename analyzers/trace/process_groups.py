"""Which process group, and which mesh dimension, a collective ran on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.trace.collective_names import itemsize
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.manifest import ParamGroupInfo, ProcessGroupInfo, RankManifest
from fsdp2prof.tables.columns import IntArray, Strings

_GLOO_THREADS = 2
"""Threads of a process group, unless it was given another number (``ProcessGroupGloo::Options``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """One row per collective."""

    name: Strings
    mesh_dim: Strings
    size: IntArray
    """Ranks; -1 unknown."""
    dtype: Strings
    """Element type that the manifest knows; null unknown."""
    payload: IntArray
    """Bytes that the manifest knows; -1 unknown."""


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
    worker: IntArray,
) -> Groups:
    """Return the process group of each collective, and what the manifest says it moves.

    By its metadata's name; without one (gloo), by the manifest's parameter group of its layer, distinguished
    by payload where a module has several; without a manifest, by its size if only one group has it, or if
    there is only one group. The rest follow from gloo's threads (``worker``; -1 for other backends), since
    each serves one group. A group that remains unknown is null. The mesh dimension comes from the manifest,
    else from the group's description (``mesh_dp_shard``).
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
            written, _, ranks, kind, layer, when, moved = key
            candidates = _candidates(by_layer.get(layer, []) if layer is not None else [], kind, moved)
            chosen = written or _only(_group_of(group, kind, when) for group in candidates)
            chosen = chosen or _only(_of_size(groups.values(), ranks))
            # A collective that is not FSDP's own can share the layer and the kind, but not the group.
            own = [group for group in candidates if _group_of(group, kind, when) == chosen]
            sole = own[0] if len(own) == 1 else None
            answers[key] = (
                chosen,
                _dtype(sole, kind) if sole else None,
                _payload(sole, kind) if sole else -1,
            )
        rows.append(answers[key])
    names = _by_worker([row[0] for row in rows], size.tolist(), worker.tolist(), groups)
    chosen_ones = [groups.get(one) if one is not None else None for one in names]
    dims = [
        (group.mesh_dim or _mesh_dim(group.desc) if group else None) or _mesh_dim(described)
        for group, described in zip(chosen_ones, columns[1], strict=True)
    ]
    ranks_of = [
        ranks if ranks > 0 else len(group.ranks) if group and group.ranks else -1
        for group, ranks in zip(chosen_ones, columns[2], strict=True)
    ]
    return Groups(
        name=Strings.intern(names),
        mesh_dim=Strings.intern(dims),
        size=np.array(ranks_of, dtype=np.int64),
        dtype=Strings.intern(row[1] for row in rows),
        payload=np.array([row[2] for row in rows], dtype=np.int64),
    )


def _by_worker(
    names: list[str | None],
    sizes: Sequence[int],
    workers: Sequence[int],
    groups: Mapping[str, ProcessGroupInfo],
) -> list[str | None]:
    """Fill in groups by gloo's threads: the group that a thread works for elsewhere, otherwise the one
    left over.

    A group whose threads are all known cannot be that of another thread.
    """
    known: dict[int, set[str]] = defaultdict(set)
    threads: dict[str, set[int]] = defaultdict(set)
    widths: dict[int, set[int]] = defaultdict(set)
    for name, ranks, thread in zip(names, sizes, workers, strict=True):
        if ranks > 0:
            widths[thread].add(ranks)
        if name is not None:
            known[thread].add(name)
            threads[name].add(thread)
    settled = {name for name, mine in threads.items() if len(mine) >= _GLOO_THREADS}

    def left(thread: int) -> str | None:
        if thread < 0 or known[thread]:
            return _only(known[thread]) if thread >= 0 else None
        found: set[str] = set(groups)
        for ranks in widths[thread] or {-1}:
            found &= set(_of_size(groups.values(), ranks))
        return _only(found - settled)

    by_thread = {thread: left(thread) for thread in set(workers)}
    return [by_thread[thread] if name is None else name for name, thread in zip(names, workers, strict=True)]


def _of_size(groups: Iterable[ProcessGroupInfo], ranks: int) -> Iterable[str]:
    """Names of the groups of so many ranks (below 0: unknown, any) that need to communicate at all."""
    return (group.name for group in groups if len(group.ranks) > 1 and ranks in (len(group.ranks), -1))


def _layer_groups(manifest: RankManifest | None) -> dict[str, list[ParamGroupInfo]]:
    layers: dict[str, list[ParamGroupInfo]] = {}
    if manifest is not None:
        for group in manifest.param_groups:
            layers.setdefault(qualified_fqn(group.fqn, group.root, manifest.root_count), []).append(group)
    return layers


def _candidates(groups: list[ParamGroupInfo], op: str | None, payload: int) -> list[ParamGroupInfo]:
    """Parameter groups of a layer whose collective it may be: those of exactly its bytes, if any are."""
    if len(groups) < 2:
        return groups
    return [group for group in groups if _payload(group, op) == payload] or groups


def _group_of(group: ParamGroupInfo, op: str | None, phase: str | None) -> str | None:
    if op == "all_gather":
        if phase == "backward" and group.post_forward_group is not None:
            return group.post_forward_group
        return group.shard_group
    return {"reduce_scatter": group.reduce_scatter_group, "all_reduce": group.all_reduce_group}.get(op or "")


def _payload(group: ParamGroupInfo, op: str | None) -> int:
    """Payload of a group's collective; -1 for other kinds, or where a type is unknown."""
    if op == "all_gather":
        sizes = [
            (count, itemsize(dtype))
            for parameter in group.parameters
            for count, dtype in zip(parameter.all_gather_numels, parameter.all_gather_dtypes, strict=True)
        ]
    elif op in ("reduce_scatter", "all_reduce"):
        dtype = _dtype(group, op)
        reduced = [parameter for parameter in group.parameters if parameter.requires_grad]
        sizes = [(_numel(p.padded_local_shape), itemsize(dtype) if dtype else -1) for p in reduced]
    else:
        sizes = []
    if not sizes or any(size < 0 for _, size in sizes):
        return -1
    shard = sum(count * size for count, size in sizes)
    return shard if op == "all_reduce" else shard * group.shard_world_size


def _dtype(group: ParamGroupInfo, op: str | None) -> str | None:
    """Element type of a group's collective; null where several types travel together."""
    if op == "all_gather":
        return _only(dtype for parameter in group.parameters for dtype in parameter.all_gather_dtypes)
    return group.reduce_dtype or group.param_dtype or _only(p.dtype for p in group.parameters)


def _numel(shape: Iterable[int]) -> int:
    return int(np.prod(list(shape), dtype=np.int64))


def _mesh_dim(desc: str | None) -> str | None:
    return desc.removeprefix("mesh_") if desc is not None and desc.startswith("mesh_") else None


def _only(names: Iterable[str | None]) -> str | None:
    """Return the one name there is, if there is exactly one."""
    distinct = {name for name in names if name is not None}
    return distinct.pop() if len(distinct) == 1 else None
