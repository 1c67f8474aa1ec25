"""Peak memory of one configuration, from the profiles of shallow runs.

Sharded states, gradients, gathered parameters, saved activations, and the larger of what the loss and what a
block's backward need, each by its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2prof.estimators.execution.pipeline_stage import micro_batches_under_way
from fsdp2prof.estimators.planner.profile import BlockProfile
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec, dtype_bytes
from fsdp2prof.estimators.traffic.pipeline_order import neighbours_of
from fsdp2prof.estimators.verdict.memory_notes import outside_allocator_bytes

__all__ = ["Sizes", "outside_bytes", "reserved_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Elements of a model's parameters on the ranks of a mesh."""

    layers: int
    """Blocks of a rank."""
    blocks: int
    """Gathered, of all its blocks."""
    widest: int
    """Gathered, of the widest block; of its experts what one rank gathers."""
    root: int
    """Gathered, of what is outside the blocks."""
    kept_root: int
    """Of that: what is gathered at the loss."""
    shard: int
    """Of all on one rank."""
    widest_shard: int
    """Of the widest block or what is outside, on one rank."""


def reserved_bytes(
    mesh: MeshSpec,
    policy: PolicySpec,
    plain: BlockProfile,
    mix: Sequence[tuple[float, BlockProfile]],
    sizes: Sizes,
    width: int,
) -> float:
    """Return the peak; ``mix`` says which share of blocks is checkpointed how, ``width`` is the model's."""
    tokens = policy.batch_size * policy.seq_len / mesh.cp / (plain.batch_size * plain.seq_len)
    own, gathered, reduced = (
        dtype_bytes(name) for name in (policy.orig_dtype, policy.compute_dtype, policy.gradient_dtype)
    )
    states = 3 * own * sizes.shard
    gradients = float(max(own, reduced) * sizes.shard)
    if policy.offload:
        gradients = states = max(own, reduced) * sizes.widest_shard
    buffers = 0.0
    whole = sizes.blocks + sizes.root
    if policy.reshard == "never":
        buffers += gathered * sizes.blocks
    elif isinstance(policy.reshard, int) and not isinstance(policy.reshard, bool):
        buffers += gathered * sizes.blocks / policy.reshard
    if policy.grad_accum > 1 and policy.sync == "last":
        buffers += reduced * whole
    elif policy.grad_accum > 1:
        gradients += max(own, reduced) * sizes.widest_shard
    flying = 1
    if mesh.pp > 1:  # a buffer of its own for what each micro-batch receives
        flying = micro_batches_under_way(mesh, policy).alive
        received = policy.batch_size * policy.seq_len // mesh.cp // mesh.tp * width * gathered
        kept = sum(neighbours_of(policy.pp_schedule, mesh.pp, policy.pp_stage))
        buffers += policy.grad_accum * kept * received
    saved = tokens * flying * sum(share * _saved(profile) for share, profile in mix) * sizes.layers
    ends = max(profile.ends_bytes for _, profile in mix) * tokens
    working = (2 * gathered + gathered + reduced) * sizes.widest
    blocks_own = max(kind.peak_bytes for _, profile in mix for kind in profile.kinds) - working
    in_block = working + max(0.0, blocks_own) * tokens
    at_loss = states + buffers + saved + gathered * sizes.kept_root + max(ends, in_block)
    at_update = states + own * sizes.shard + gathered * sizes.root * (policy.reshard == "never")
    return max(at_loss, at_update) + plain.pool_bytes + gradients


def outside_bytes(mesh: MeshSpec, policy: PolicySpec) -> int:
    """What no allocator counts, at the high end of its range."""
    return outside_allocator_bytes(mesh, policy).high


def _saved(profile: BlockProfile) -> float:
    """Of a mean block."""
    kinds = profile.kinds
    return sum(kind.count * kind.saved_bytes for kind in kinds) / sum(kind.count for kind in kinds)
