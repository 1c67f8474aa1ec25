"""A recorded rank's parameter groups as FSDP2's schedule reads them, and the collectives of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fsdp2prof.labels import is_root, qualified_fqn
from fsdp2prof.manifest import LabelsInfo, ParameterInfo, ParamGroupInfo, ProcessGroupInfo, RankManifest
from fsdp2prof.schedule import Axis, ScheduledGroup, steady_step
from fsdp2prof.units import dtype_bytes

Key: TypeAlias = tuple[str | None, str, int | None]
"""Process group, operation, bytes of one rank's input."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the phase of its collective; None where unknown."""

    fqn: str | None
    phase: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """A collective that FSDP2 issues once a micro-batch."""

    key: Key
    layer: Layer


def step_cycles(manifest: RankManifest) -> tuple[list[Due], list[Due], list[Due]]:
    """Return the all-gathers, reduce-scatters and all-reduces of a micro-batch, each in the order of issue.

    Empty where the size of a data type is unknown.
    """
    cycles: dict[str, list[Due]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    roots = () if unknown_dtypes(manifest) else sorted({group.root for group in manifest.param_groups})
    for root in roots:
        groups = recorded_groups(manifest, root)
        for event in steady_step(groups, trains=any(group.reduce_bytes for group in groups)):
            axis = event.axis
            if event.op in cycles and axis.process_group is not None:
                ranks = axis.size if event.op == "all_gather" else 1
                key = (axis.process_group, event.op, event.payload_bytes // ranks)
                cycles[event.op].append(Due(key, Layer(event.group.fqn, event.phase)))
    return cycles["all_gather"], cycles["reduce_scatter"], cycles["all_reduce"]


def untrained_units(manifest: RankManifest) -> dict[str, list[str]]:
    """Return the FSDP units with gradients that no optimizer uses -> the trainable parameters of these.

    Frozen units are among them if backward runs through them only to such parameters, or to none. Empty if no
    optimizer is known to hold any parameter: the script may use its own.
    """
    trained = [
        (group, [one for one in group.parameters if one.requires_grad]) for group in manifest.param_groups
    ]
    if not any(one.optimized for _, parameters in trained for one in parameters):
        return {}
    roots, frozen = 1 + max(group.root for group in manifest.param_groups), frozen_roots(manifest)
    found = {}
    for group, parameters in trained:
        reached = parameters or (_trained_before(group, manifest) if group.parameters else [])
        needless = group.only_inputs and group.root not in frozen
        if needless or (reached and all(one.optimized is False for one in reached)):
            found[qualified_fqn(group.fqn, group.root, roots)] = [one.fqn for one in reached]
    return found


def _trained_before(frozen: ParamGroupInfo, manifest: RankManifest) -> list[ParameterInfo]:
    """Return the trainable parameters that a root uses before a frozen group, as far as that is known.

    Groups are in the order of their forwards; parameters of a group around the frozen one in that of their
    registration.
    """
    first = min(one.position for one in frozen.parameters)
    at = min(frozen.forward_positions, default=None)
    if first < 0 or at is None:
        return []
    found = []
    for group in manifest.param_groups:
        around = is_root(group.fqn) or frozen.fqn.startswith(f"{group.fqn}.")
        earlier = min(group.forward_positions, default=0) < at
        if group.root == frozen.root:
            found += [
                one
                for one in group.parameters
                if one.requires_grad and (one.position < first if around else earlier)
            ]
    return found


def frozen_roots(manifest: RankManifest) -> set[int]:
    """Return the roots without a parameter that has gradients."""
    groups = manifest.param_groups
    return {one.root for one in groups} - {one.root for one in groups if one.requires_grad}


def repeated_units(manifest: RankManifest) -> dict[str, float]:
    """Return the units of frozen roots that get the inputs of the step before -> the share of such steps.

    It is 1 for a root whose inputs are the same in every step, while those of a trained root are not. A
    training that uses one batch again and again is a test of the program, and says nothing.
    """
    frozen = frozen_roots(manifest)
    read = _same_inputs(manifest, frozen)
    reused = {root: one for root, one in enumerate(manifest.reused_inputs) if one}
    varies = any(not all(one) for root, one in reused.items() if root not in frozen)
    shares = {root: sum(one) / len(one) for root, one in reused.items() if varies or not all(one)}
    return {
        qualified_fqn(one.fqn, one.root, manifest.root_count): share
        for one in manifest.param_groups
        if one.root in frozen and (share := 1 if one.root in read else shares.get(one.root, 0))
    }


def _same_inputs(manifest: RankManifest, frozen: set[int]) -> set[int]:
    """Return the frozen roots whose samples of inputs are equal, while those of a trained root differ."""
    seen = {root: {*digests} for root, digests in enumerate(manifest.inputs) if len(digests) > 1}
    if not any(len(digests - {None}) > 1 for root, digests in seen.items() if root not in frozen):
        return set()
    return {root for root in frozen if len(seen.get(root, ())) == 1 and None not in seen[root]}


_MOST = 0.5
"""Share of labels from which on ignoring them late is worth a look."""


def ignored_labels(manifest: RankManifest) -> LabelsInfo | None:
    """Return the labels of a rank's one model that has any, if the loss ignores most of them."""
    known = [one for one in manifest.labels if one is not None]
    return next((one for one in known if one.ignored_frac >= _MOST), None) if len(known) == 1 else None


def forwards_of_a_backward(manifest: RankManifest) -> int:
    """Return the forwards that a root runs before each of its backwards, the most of any; 1 if unknown.

    It is 1, too, where several backwards follow one forward.
    """
    backwards = {one.root: one.micro_batches for one in manifest.roots}
    return max(
        (
            max(1, one.forwards // (backwards.get(one.root) or one.forwards))
            for one in manifest.param_groups
            if one.forwards and is_root(one.fqn) and one.requires_grad
        ),
        default=1,
    )


def has_several_roots(manifest: RankManifest) -> bool:
    """Whether several models run, in an order that a manifest does not say."""
    return len({group.root for group in manifest.param_groups}) > 1


def unknown_dtypes(manifest: RankManifest) -> list[str]:
    """Return names of data types of unknown size that collectives have."""
    names = {
        dtype
        for group in manifest.param_groups
        for dtype in (_reduce_dtype(group), *(dtype for dtype, _ in _gathered(group)))
    }
    return sorted(name for name in names if dtype_bytes(name) is None)


def recorded_groups(manifest: RankManifest, root: int) -> list[ScheduledGroup]:
    """Return a root's groups in post-forward order, a group that runs several times as often as it does."""
    infos = [group for group in manifest.param_groups if group.root == root]
    positions = _positions(infos)
    if any(info.forward_positions for info in infos):
        order = sorted((at, index) for index, info in enumerate(infos) for at in info.forward_positions)
        trained = [at for at, index in order if any(p.requires_grad for p in infos[index].parameters)]
    else:
        # A module ends when the last parameter below it has been used; of modules that end together the inner
        # one is first, the root last.
        ends = _nested_ends([info.fqn for info in infos], positions)
        indices = sorted(range(len(infos)), key=lambda index: (ends[index], -_depth(infos[index].fqn)))
        order = [(ends[index], index) for index in indices]
        trained = _trained(infos, positions)
    first = min(trained, default=None)
    groups = {
        index: scheduled_group(
            info,
            manifest,
            has_backward=first is not None and first <= at,
            input_has_gradient=_enclosing_trains_before(index, infos, positions),
        )
        for at, index in order
        for info in (infos[index],)
    }
    return [groups[index] for _, index in order]


def _trained(infos: Sequence[ParamGroupInfo], positions: Sequence[Sequence[int]]) -> list[int]:
    return [
        position
        for info, own in zip(infos, positions, strict=True)
        for parameter, position in zip(info.parameters, own, strict=True)
        if parameter.requires_grad
    ]


def _enclosing_trains_before(
    index: int, infos: Sequence[ParamGroupInfo], positions: Sequence[Sequence[int]]
) -> bool:
    """Whether a module around a group has a trainable parameter before the group's own."""
    around = [
        other
        for other, info in enumerate(infos)
        if info.fqn != infos[index].fqn and (not info.fqn or infos[index].fqn.startswith(f"{info.fqn}."))
    ]
    trained = _trained([infos[other] for other in around], [positions[other] for other in around])
    return bool(trained) and min(trained) < min(positions[index])


def _positions(infos: Sequence[ParamGroupInfo]) -> list[list[int]]:
    """Order of parameters in their root; by group where an older recorder did not note it."""
    noted = [[parameter.position for parameter in info.parameters] for info in infos]
    if min(min(own) for own in noted) >= 0:
        return noted
    return [[index] * len(info.parameters) for index, info in enumerate(infos)]


def _nested_ends(fqns: Sequence[str], positions: Sequence[Sequence[int]]) -> list[int]:
    """Last parameter position at or below each group's modules."""
    last: dict[str, int] = {}
    for fqn, own in zip(fqns, positions, strict=True):
        for part in fqn.split(", "):
            names = part.split(".") if part else []
            for depth in range(len(names) + 1):
                above = ".".join(names[:depth])
                last[above] = max(last.get(above, 0), *own)
    return [max(last[part] for part in fqn.split(", ")) for fqn in fqns]


def _depth(fqn: str) -> int:
    return 0 if fqn == "" else fqn.split(", ")[-1].count(".") + 1


def scheduled_group(
    info: ParamGroupInfo,
    manifest: RankManifest,
    *,
    has_backward: bool = True,
    input_has_gradient: bool = False,
) -> ScheduledGroup:
    """Return a recorded group as the schedule reads it; sizes of unknown data types are 0."""
    known = {group.name: group for group in manifest.process_groups}

    def axis(name: str | None, size: int) -> Axis:
        group = known.get(name or "")
        return Axis(size=size, mesh_dim=None if group is None else _dim(group), process_group=name)

    gathered = _gathered(info)
    dtypes = {dtype for dtype, _ in gathered}
    reduced = sum(
        prod(parameter.padded_local_shape) for parameter in info.parameters if parameter.requires_grad
    )
    part = known.get(info.post_forward_group or "")
    return ScheduledGroup(
        root=info.root,
        fqn=info.fqn,
        reshard=info.reshard_after_forward,
        has_backward=has_backward,
        input_has_gradient=input_has_gradient,
        forward_prefetch=tuple(info.forward_prefetch),
        backward_prefetch=tuple(info.backward_prefetch),
        unshard_in_backward=info.unshard_in_backward,
        gather_bytes=info.shard_world_size * sum(_bytes(dtype) * numel for dtype, numel in gathered),
        gather_dtype=dtypes.pop() if len(dtypes) == 1 else "uint8",
        reduce_bytes=info.shard_world_size * reduced * _bytes(_reduce_dtype(info)),
        reduce_dtype=_reduce_dtype(info),
        shard=axis(info.shard_group, info.shard_world_size),
        reduce=axis(info.reduce_scatter_group, info.shard_world_size),
        replicate=axis(info.all_reduce_group, info.replicate_world_size),
        post_forward=axis(
            info.post_forward_group, int(info.reshard_after_forward) if part is None else len(part.ranks)
        ),
    )


def _reduce_dtype(info: ParamGroupInfo) -> str:
    return info.reduce_dtype or info.param_dtype or info.parameters[0].dtype


def _gathered(info: ParamGroupInfo) -> list[tuple[str, int]]:
    """Data type and elements of each all-gather input of this rank."""
    return [
        pair
        for one in info.parameters
        for pair in zip(
            one.all_gather_dtypes or [info.param_dtype or one.dtype], one.all_gather_numels, strict=False
        )
    ]


def _bytes(dtype: str) -> int:
    return dtype_bytes(dtype) or 0


def _dim(group: ProcessGroupInfo) -> str | None:
    """Mesh dimension of a group, otherwise from torch's description: ``mesh_dp_shard``, unnamed
    ``mesh_dim_1``."""
    described = group.desc.removeprefix("mesh_") if group.desc.startswith("mesh_") else None
    return group.mesh_dim or described
