"""Communication of a recorded run's step, predicted from its manifest alone.

The work of a recorded run's root modules in a step, as a prediction needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fsdp2prof.analyzers.recorded_groups import recorded_groups, scheduled_group, unknown_dtypes
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication_summary import summarise
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.traffic import Ledger
from fsdp2prof.manifest import ParamGroupInfo, RankManifest, RootInfo
from fsdp2prof.results.estimate import CommEstimate, EstimatedMesh, EstimatedModel
from fsdp2prof.schedule import Event, steady_step
from fsdp2prof.vocabulary import AllReduce, Sync


def estimate_comm_of_run(
    manifest: RankManifest, *, grad_accum: int | None = None, sync: Sync | None = None
) -> CommEstimate:
    """Estimate a recorded rank's collectives in a steady step from its parameter groups.

    A root whose collectives were counted has the same number as in each captured step. The others, and all
    with ``grad_accum`` or ``sync`` (which override the manifest), follow FSDP2's rules. Raises
    ``ModelError`` for a rank without a parameter group, captured steps that differ, and micro-batches that
    follow no rule.
    """
    if not manifest.param_groups:
        raise ModelError(f"rank {manifest.rank} recorded no FSDP parameter group: nothing to estimate")
    if unknown := unknown_dtypes(manifest):
        raise ModelError(f"rank {manifest.rank}: unknown data type {unknown[0]!r}")
    ledger = Ledger()
    for root in sorted({group.root for group in manifest.param_groups}):
        infos = [group for group in manifest.param_groups if group.root == root]
        if grad_accum is None and sync is None and _is_counted(manifest, infos):
            _add_counted(infos, manifest, ledger)
            continue
        step = step_of_root(manifest, root, grad_accum, sync)
        ledger.add_events(
            steady_step(
                recorded_groups(manifest, root),
                micro_batches=step.micro_batches,
                sync=step.sync,
                all_reduce=step.all_reduce,
                keep_between=step.keep_between,
                trains=any(group.requires_grad for group in infos),
            )
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
    """Whether the recorder counted a root's collectives.

    Raises ``ModelError`` if captured steps differ, and if only the first one was captured.
    """
    varying = next((info for info in infos if info.counts_vary), None)
    if varying is not None:
        raise ModelError(
            f"{varying.fqn or 'the root module'} is not gathered and reduced equally often in each captured "
            "step: no step represents all; record steps that are alike (--wait, --active), or say the "
            "micro-batches of a plain step with --grad-accum"
        )
    counted = bool(manifest.roots) and all(info.counts_vary is False for info in infos)
    if not counted and list(manifest.traced_steps) == [0]:
        raise ModelError(
            "only the training's first step was recorded, whose collectives are not counted: record later "
            "ones (--wait 1), or say the micro-batches of a plain step with --grad-accum"
        )
    return counted


def _add_counted(infos: Sequence[ParamGroupInfo], manifest: RankManifest, ledger: Ledger) -> None:
    """Add the collectives that the recorder counted for a root, forward before backward, with its groups'
    bytes."""
    groups = [(info, scheduled_group(info, manifest)) for info in infos]
    for info, group in groups:
        forward = (info.gathers or 0) - (info.backward_gathers or 0)
        ledger.add_event(Event("all_gather", group, "forward"), forward)
    for info, group in reversed(groups):
        again, reduced = info.post_forward_gathers or 0, (info.reduced_numel or 0) * group.shard.size
        ledger.add_event(Event("all_gather", group, "backward"), (info.backward_gathers or 0) - again)
        ledger.add_event(Event("all_gather", group, "backward", over_part=True), again)
        ledger.add_event(Event("reduce_scatter", group, "backward"), info.reductions or 0, reduced)
        replicas = Event("all_reduce", group, "backward")
        ledger.add_event(replicas, info.all_reductions or 0, info.all_reduced_numel or 0)


def _accumulation(manifest: RankManifest, grad_accum: int | None, sync: Sync | None) -> dict[str, object]:
    """Micro-batches of the first root and when it reduces; None if no rule gives them."""
    try:
        step = step_of_root(manifest, manifest.param_groups[0].root, grad_accum, sync)
    except ModelError:
        return {"grad_accum": None, "sync": None}
    return {"grad_accum": step.micro_batches, "sync": step.sync}


def _how(manifest: RankManifest, grad_accum: int | None, sync: Sync | None) -> str:
    if grad_accum is None and sync is None and _is_counted(manifest, manifest.param_groups):
        return "each group is gathered and reduced as often as in each captured step of the recording"
    return f"{_order_note(manifest.param_groups)}; a root without trainable parameters runs forward only"


def _order_note(groups: Sequence[ParamGroupInfo]) -> str:
    if all(any(one.forward_positions for one in groups if one.root == group.root) for group in groups):
        return "modules run in the order, and as often, as in the recorded step"
    return (
        "each module runs once per micro-batch, in the order they are registered, and gradients flow from "
        "the first trainable parameter on"
    )


def _mesh(group: ParamGroupInfo, world_size: int) -> EstimatedMesh:
    names = group.mesh.dim_names or [f"dim{index}" for index in range(len(group.mesh.shape))]
    return EstimatedMesh(
        dp_replicate=group.replicate_world_size,
        dp_shard=group.shard_world_size,
        world_size=world_size,
        dims=dict(zip(names, group.mesh.shape, strict=True)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RootStep:
    """One root's steady step."""

    micro_batches: int
    sync: Sync = "last"
    all_reduce: AllReduce = "each"
    keep_between: bool = False
    """Parameters stay gathered after every backward but the last."""


def step_of_root(
    manifest: RankManifest, root: int, grad_accum: int | None = None, sync: Sync | None = None
) -> RootStep:
    """Return the collectives of a root in every captured step; ``grad_accum`` and ``sync`` override the
    recording.

    Raises ``ModelError`` for values that differ from step to step and are not given, or follow no rule.
    """
    info = next((one for one in manifest.roots if one.root == root), None)
    if info is None:
        micro_batches, synced = _without_roots(manifest, grad_accum, sync)
        return RootStep(micro_batches=micro_batches, sync=synced)
    where = _named(manifest, root)
    count = info.micro_batches if grad_accum is None else grad_accum
    if count is None or info.method_forwards is None:
        raise ModelError(
            f"{where} does not run equally often in each recorded step: no step represents all; "
            "record steps that are alike, or say its micro-batches with --grad-accum"
        )
    if grad_accum is not None and grad_accum != info.micro_batches:
        return RootStep(micro_batches=count, sync=sync or "last", all_reduce=_all_reduce(info, where))
    if info.method_forwards > count:
        raise ModelError(
            f"{where} runs forward in parts (register_fsdp_forward_method): which of its gradients each part "
            "reduces is not recorded"
        )
    if not _trains(manifest, root) or count == 0:
        return RootStep(micro_batches=count, sync=sync or "last")
    return RootStep(
        micro_batches=count,
        sync=sync or _sync(info, where, count),
        all_reduce=_all_reduce(info, where),
        keep_between=_keeps(info, where, count),
    )


def _without_roots(
    manifest: RankManifest, grad_accum: int | None = None, sync: Sync | None = None
) -> tuple[int, Sync]:
    """Micro-batches per step and when gradients are reduced, of a recording that says it of all roots as one.

    Raises ``ModelError`` if the recording reduces some but neither all nor only the last.
    """
    count = grad_accum if grad_accum is not None else manifest.micro_batches or 1
    if sync is not None or manifest.gradient_syncs is None or manifest.gradient_syncs in (1, 0):
        return count, sync or "last"
    if manifest.gradient_syncs == count:
        return count, "each"
    raise _no_rule("the run", "reduced gradients after", manifest.gradient_syncs, count)


def _sync(info: RootInfo, where: str, count: int) -> Sync:
    if info.gradient_syncs == count:
        return "last" if count == 1 else "each"
    if info.gradient_syncs == 1:
        return "last"
    raise _no_rule(where, "reduced gradients after", info.gradient_syncs, count)


def _all_reduce(info: RootInfo, where: str) -> AllReduce:
    if info.all_reduces == info.gradient_syncs:
        return "each"
    if info.all_reduces == 0:
        return "never"
    if info.all_reduces == 1:
        return "last"
    raise ModelError(
        f"{where} all-reduced gradients over its replicas {_times(info.all_reduces)} in a step and reduced "
        f"them {_times(info.gradient_syncs)}: only each time, the last or never is modelled"
    )


def _keeps(info: RootInfo, where: str, count: int) -> bool:
    if info.reshards == count:
        return False
    if info.reshards == 1:
        return True
    times = "not the same number" if info.reshards is None else str(info.reshards)
    raise ModelError(
        f"{where} resharded its parameters after {times} of {count} backwards "
        "(set_reshard_after_backward): only each or the last is modelled"
    )


def _no_rule(where: str, what: str, times: int | None, count: int) -> ModelError:
    found = "not the same number" if times is None else str(times)
    return ModelError(
        f"{where} {what} {found} of {count} micro-batches: only the last or each is modelled; "
        "say which with --sync"
    )


def _times(count: int | None) -> str:
    return "not equally often" if count is None else f"{count} times"


def _trains(manifest: RankManifest, root: int) -> bool:
    return any(group.requires_grad for group in manifest.param_groups if group.root == root)


def _named(manifest: RankManifest, root: int) -> str:
    return f"root module {root} of the run" if manifest.root_count > 1 else "the run"
