"""Communication of a recorded run's step, predicted from its manifest alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication_summary import summarise
from fsdp2prof.estimators.config.choices import Sync
from fsdp2prof.estimators.config.policy import dtype_bytes
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.of_run.steps import step_of_root
from fsdp2prof.estimators.traffic.fsdp import Axis, GroupTraffic, Ledger, walk_step
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo, ProcessGroupInfo, RankManifest
from fsdp2prof.results.estimate import CommEstimate, EstimatedMesh, EstimatedModel

__all__ = ["estimate_comm_of_run"]


def estimate_comm_of_run(
    manifest: RankManifest, *, grad_accum: int | None = None, sync: Sync | None = None
) -> CommEstimate:
    """Estimate a recorded rank's collectives in a steady step from its parameter groups.

    A root whose collectives were counted has as many as in each captured step. The others, and all with
    ``grad_accum`` or ``sync`` (which override the manifest), follow FSDP2's rules. Raises ``ModelError`` for
    a rank without a parameter group, captured steps that differ, and micro-batches that follow no rule.
    """
    if not manifest.param_groups:
        raise ModelError(f"rank {manifest.rank} recorded no FSDP parameter group: nothing to estimate")
    dims = {group.name: group.mesh_dim or _described_dim(group) for group in manifest.process_groups}
    sizes = {group.name: len(group.ranks) for group in manifest.process_groups}
    ledger = Ledger()
    for root in sorted({group.root for group in manifest.param_groups}):
        infos = [group for group in manifest.param_groups if group.root == root]
        if grad_accum is None and sync is None and _is_counted(manifest, infos):
            _add_counted(infos, dims, sizes, ledger)
            continue
        step = step_of_root(manifest, root, grad_accum, sync)
        walk_step(
            _root_traffic(infos, dims, sizes),
            ledger,
            micro_batches=step.micro_batches,
            sync=step.sync,
            all_reduce=step.all_reduce,
            keep_between=step.keep_between,
            trains=any(group.requires_grad for group in infos),
        )
    first = manifest.param_groups[0]
    return summarise(
        ledger.to_rows(),
        model=EstimatedModel(
            name=" ".join(manifest.script),
            parameters=sum(
                prod(parameter.global_shape)
                for group in manifest.param_groups
                for parameter in group.parameters
            ),
            groups=len(manifest.param_groups),
        ),
        mesh=_mesh(first, manifest.world_size),
        policy=policy_as_recorded(
            **_accumulation(manifest, grad_accum, sync),
            param_dtype=first.param_dtype,
            reduce_dtype=first.reduce_dtype,
        ),
        assumptions=[
            f"read from the manifest of rank {manifest.rank}: groups, dtypes, padding, reshard policy",
            _how(manifest, grad_accum, sync),
            "gradient clipping and other collectives outside FSDP are not in a manifest and not counted",
        ],
    )


def _is_counted(manifest: RankManifest, infos: Sequence[ParamGroupInfo]) -> bool:
    """Whether the recorder counted a root's collectives. Raises ``ModelError`` if captured steps differ."""
    varying = next((info for info in infos if info.counts_vary), None)
    if varying is not None:
        raise ModelError(
            f"{varying.fqn or 'the root module'} is not gathered and reduced equally often in each captured "
            "step: no step stands for all; record steps that are alike (--wait, --active), or say the "
            "micro-batches of a plain step with --grad-accum"
        )
    return bool(manifest.roots) and all(info.counts_vary is False for info in infos)


def _add_counted(
    infos: Sequence[ParamGroupInfo], dims: dict[str, str | None], sizes: dict[str, int], ledger: Ledger
) -> None:
    """Add what the recorder counted of a root, forward before backward, with the bytes of its groups."""
    groups = [(info, _traffic(info, True, dims, sizes)) for info in infos]
    for info, group in groups:
        _add_gathers(
            ledger, group, "forward", group.shard, (info.gathers or 0) - (info.backward_gathers or 0)
        )
    for info, group in reversed(groups):
        again = info.post_forward_gathers or 0
        _add_gathers(ledger, group, "backward", group.shard, (info.backward_gathers or 0) - again)
        _add_gathers(ledger, group, "backward", group.post_forward, again)
        ledger.add_sum(
            group,
            "reduce_scatter",
            group.reduce,
            count=info.reductions or 0,
            elements=(info.reduced_numel or 0) * group.shard.size,
        )
        ledger.add_sum(
            group,
            "all_reduce",
            group.replicate,
            count=info.all_reductions or 0,
            elements=info.all_reduced_numel or 0,
        )


def _add_gathers(ledger: Ledger, group: GroupTraffic, phase: str, axis: Axis, count: int) -> None:
    ledger.add(
        root=group.root,
        fqn=group.fqn,
        phase=phase,
        op="all_gather",
        axis=axis,
        dtype=group.gather_dtype,
        payload_bytes=group.gather_bytes,
        count=count,
    )


def _accumulation(manifest: RankManifest, grad_accum: int | None, sync: Sync | None) -> dict[str, object]:
    """Micro-batches of the first root and when it reduces; None where no rule says them."""
    try:
        step = step_of_root(manifest, manifest.param_groups[0].root, grad_accum, sync)
    except ModelError:
        return {"grad_accum": None, "sync": None}
    return {"grad_accum": step.micro_batches, "sync": step.sync}


def _how(manifest: RankManifest, grad_accum: int | None, sync: Sync | None) -> str:
    if grad_accum is None and sync is None and _is_counted(manifest, manifest.param_groups):
        return "each group is gathered and reduced as often as in each captured step of the recording"
    return f"{_order_told(manifest.param_groups)}; a root without trainable parameters runs forward only"


def _root_traffic(
    infos: list[ParamGroupInfo], dims: dict[str, str | None], sizes: dict[str, int]
) -> list[GroupTraffic]:
    """A root's groups in post-forward order, a group that runs several times as often as it does."""
    if any(info.forward_positions for info in infos):
        return _recorded_traffic(infos, dims, sizes)
    fqns = [info.fqn for info in infos]
    positions = _positions(infos)
    ends = _nested_ends(fqns, positions)
    trainable = [
        position
        for info, own in zip(infos, positions, strict=True)
        for parameter, position in zip(info.parameters, own, strict=True)
        if parameter.requires_grad
    ]
    flows = _backward_flows(ends, trainable)
    return [_traffic(infos[index], flows[index], dims, sizes) for index in _post_forward_order(fqns, ends)]


def _recorded_traffic(
    infos: list[ParamGroupInfo], dims: dict[str, str | None], sizes: dict[str, int]
) -> list[GroupTraffic]:
    order = sorted((at, index) for index, info in enumerate(infos) for at in info.forward_positions)
    trained = [at for at, index in order if any(p.requires_grad for p in infos[index].parameters)]
    groups = {
        index: _traffic(infos[index], flows, dims, sizes)
        for (_, index), flows in zip(order, _backward_flows((at for at, _ in order), trained), strict=True)
    }
    return [groups[index] for _, index in order]


def _order_told(groups: Sequence[ParamGroupInfo]) -> str:
    if all(any(one.forward_positions for one in groups if one.root == group.root) for group in groups):
        return "modules run in the order, and as often, as in the recorded step"
    return (
        "each module runs once per micro-batch, in the order they are registered, and gradients flow from "
        "the first trainable parameter on"
    )


def _positions(infos: list[ParamGroupInfo]) -> list[list[int]]:
    """Order of parameters in their root; by group where an older recorder did not note it."""
    noted = [[parameter.position for parameter in info.parameters] for info in infos]
    if min(min(own) for own in noted) >= 0:
        return noted
    return [[index] * len(info.parameters) for index, info in enumerate(infos)]


def _post_forward_order(fqns: Sequence[str], ends: Sequence[int]) -> list[int]:
    """Indices of groups in the order their forwards end, from FQNs and each one's last parameter position.

    A module ends when the last parameter below it has been used; of modules that end together the inner
    one is first, the root last.
    """
    return sorted(range(len(fqns)), key=lambda index: (ends[index], -_depth(fqns[index])))


def _backward_flows(ends: Iterable[int], trainable: Iterable[int]) -> list[bool]:
    """For each group's end, whether a trainable parameter comes at or before it, so that gradients flow."""
    first = min(trainable, default=None)
    return [first is not None and first <= end for end in ends]


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


def _traffic(
    info: ParamGroupInfo, has_backward: bool, dims: dict[str, str | None], sizes: dict[str, int]
) -> GroupTraffic:
    def axis(name: str | None, size: int) -> Axis:
        return Axis(size=size, mesh_dim=dims.get(name or ""), process_group=name)

    gathered = [pair for parameter in info.parameters for pair in _gathered(parameter)]
    dtypes = {dtype for dtype, _ in gathered}
    trained = [parameter for parameter in info.parameters if parameter.requires_grad]
    reshard = info.reshard_after_forward
    return GroupTraffic(
        root=info.root,
        fqn=info.fqn,
        gather_bytes=info.shard_world_size * sum(dtype_bytes(dtype) * numel for dtype, numel in gathered),
        gather_dtype=dtypes.pop() if len(dtypes) == 1 else "uint8",
        reduce_numel=info.shard_world_size * sum(prod(parameter.padded_local_shape) for parameter in trained),
        reduce_dtype=info.reduce_dtype or info.param_dtype or info.parameters[0].dtype,
        reshard=reshard,
        has_backward=has_backward,
        shard=axis(info.shard_group, info.shard_world_size),
        reduce=axis(info.reduce_scatter_group, info.shard_world_size),
        replicate=axis(info.all_reduce_group, info.replicate_world_size),
        post_forward=axis(info.post_forward_group, sizes.get(info.post_forward_group or "", int(reshard))),
        backward_prefetch=tuple(info.backward_prefetch) or None,
        unshard_in_backward=info.unshard_in_backward,
    )


def _described_dim(group: ProcessGroupInfo) -> str | None:
    """Mesh dimension by torch's description of a mesh's group: ``mesh_dp_shard``, unnamed ``mesh_dim_1``."""
    return group.desc.removeprefix("mesh_") if group.desc.startswith("mesh_") else None


def _gathered(parameter: ParameterInfo) -> list[tuple[str, int]]:
    return list(zip(parameter.all_gather_dtypes, parameter.all_gather_numels, strict=True))


def _mesh(group: ParamGroupInfo, world_size: int) -> EstimatedMesh:
    names = group.mesh.dim_names or [f"dim{index}" for index in range(len(group.mesh.shape))]
    return EstimatedMesh(
        dp_replicate=group.replicate_world_size,
        dp_shard=group.shard_world_size,
        world_size=world_size,
        dims=dict(zip(names, group.mesh.shape, strict=True)),
    )
