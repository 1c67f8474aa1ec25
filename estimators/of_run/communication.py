"""Communication of a recorded run's step, predicted from its manifest alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fsdp2prof.analyzers.recorded_groups import recorded_groups, unknown_dtypes
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication_summary import summarise
from fsdp2prof.estimators.config.choices import Sync
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.of_run.steps import step_of_root
from fsdp2prof.estimators.traffic.fsdp import Ledger
from fsdp2prof.manifest import ParamGroupInfo, RankManifest
from fsdp2prof.results.estimate import CommEstimate, EstimatedMesh, EstimatedModel
from fsdp2prof.schedule import steady_step

__all__ = ["estimate_comm_of_run"]


def estimate_comm_of_run(
    manifest: RankManifest, *, grad_accum: int | None = None, sync: Sync | None = None
) -> CommEstimate:
    """Estimate a recorded rank's collectives in a steady step from its parameter groups.

    ``grad_accum`` and ``sync`` override what the manifest says about micro-batches. Raises ``ModelError`` if
    the rank recorded no parameter group, or micro-batches that follow no rule.
    """
    if not manifest.param_groups:
        raise ModelError(f"rank {manifest.rank} recorded no FSDP parameter group: nothing to estimate")
    if unknown := unknown_dtypes(manifest):
        raise ModelError(f"rank {manifest.rank}: size of data type {unknown[0]!r} is not known")
    ledger = Ledger()
    steps = {
        root: step_of_root(manifest, root, grad_accum, sync)
        for root in sorted({group.root for group in manifest.param_groups})
    }
    for root, step in steps.items():
        ledger.add_events(
            steady_step(
                recorded_groups(manifest, root),
                micro_batches=step.micro_batches,
                sync=step.sync,
                all_reduce=step.all_reduce,
                keep_between=step.keep_between,
                trains=any(group.requires_grad for group in manifest.param_groups if group.root == root),
            )
        )
    first = manifest.param_groups[0]
    first_step = steps[first.root]
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
            grad_accum=first_step.micro_batches,
            sync=first_step.sync,
            param_dtype=first.param_dtype,
            reduce_dtype=first.reduce_dtype,
        ),
        assumptions=[
            f"read from the manifest of rank {manifest.rank}: groups, dtypes, padding, reshard policy",
            _order_note(manifest.param_groups),
            "gradient clipping, unshard() called by the training and collectives outside FSDP are not in a "
            "manifest and not counted",
            "a root without trainable parameters runs forward only, without gradients",
        ],
    )


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
