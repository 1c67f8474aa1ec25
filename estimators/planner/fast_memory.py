"""Peak memory of one configuration, from the profiles of shallow runs.

Sharded states, gradients, gathered parameters, saved activations, and the larger of what the loss and what a
block's backward need, each by its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import PipelineSchedule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.pipeline_stage import micro_batches_under_way
from fsdp2prof.estimators.planner.profile import BlockProfile, element_bytes
from fsdp2prof.estimators.traffic.pipeline_order import neighbours_of
from fsdp2prof.estimators.verdict.memory_notes import outside_allocator_bytes


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
    """Elements of ``root`` that are gathered at the loss."""
    shard: int
    """Elements of one rank's shard."""
    widest_shard: int
    """Elements of one rank's shard of the widest block, or of what is outside of the blocks."""
    has_loss: bool
    """Whether the rank has what comes after the blocks."""


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
    own, gathered, reduced = element_bytes(policy)
    states = 3 * own * sizes.shard  # parameters and Adam's two moments
    gradients = float(own * sizes.shard)
    if policy.offload:  # the device holds one unit's states and gradients at a time, on their way
        gradients = states = max(own, reduced) * sizes.widest_shard
    buffers = 0.0
    whole = sizes.blocks + sizes.root
    if policy.reshard == "never":
        buffers += gathered * sizes.blocks
    elif isinstance(policy.reshard, int) and not isinstance(policy.reshard, bool):
        buffers += gathered * sizes.blocks / policy.reshard
    # Without a reduction every micro-batch, gradients stay whole in the reduction's dtype until the last one.
    if policy.grad_accum > 1 and policy.sync == "last":
        buffers += reduced * whole
    elif policy.grad_accum > 1:
        gradients += max(own, reduced) * sizes.widest_shard
    flying = 1
    if mesh.pp > 1:  # a buffer of its own for what each micro-batch receives
        flying = _alive(mesh.pp, policy.pp_schedule, policy.pp_stage, policy.grad_accum)
        received = policy.batch_size * policy.seq_len // mesh.cp // mesh.tp * width * gathered
        kept = _neighbours(mesh.pp, policy.pp_schedule, policy.pp_stage)
        buffers += policy.grad_accum * kept * received
    saved = tokens * flying * sum(share * _saved(profile) for share, profile in mix) * sizes.layers
    ends = max(_at_loss(profile, tokens) for _, profile in mix) if sizes.has_loss else 0.0
    # In a block's backward: its parameters, the next block's by prefetch, its gradients, and their copy
    # in the dtype that is reduced.
    in_block = float((3 * gathered + reduced) * sizes.widest)
    in_block += max(kind.peak_bytes for _, profile in mix for kind in profile.kinds) * tokens
    # The peak is at the loss or in the last block's backward, while all blocks' activations are alive; at the
    # update, when gradients are whole; or at the end of backward, when the root's gradients are reduced.
    at_loss = states + buffers + saved + gathered * sizes.kept_root + max(ends, in_block)
    at_update = states + own * sizes.shard + gathered * sizes.root * (policy.reshard == "never")
    # the last reduction: gathered parameters, their gradients, and both in the dtype that is reduced
    ending = sizes.root - sizes.kept_root * (len(policy.wrap) > 1)
    at_end = states + (2 * gathered + reduced) * ending + reduced * (sizes.widest + ending / mesh.fsdp_size)
    return max(at_loss, at_update, at_end) + plain.pool_bytes + gradients


@lru_cache(maxsize=1 << 12)
def outside_bytes(mesh: MeshSpec) -> int:
    """Bytes that no allocator counts, at the high end of their range."""
    return outside_allocator_bytes(mesh, PolicySpec()).high


@lru_cache(maxsize=1 << 12)
def _alive(ranks: int, schedule: PipelineSchedule, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations a pipeline's rank holds at most."""
    policy = PolicySpec(pp_schedule=schedule, pp_stage=stage, grad_accum=micro_batches)
    return micro_batches_under_way(MeshSpec(pp=ranks), policy).alive


@lru_cache(maxsize=1 << 10)
def _neighbours(ranks: int, schedule: PipelineSchedule, stage: int) -> int:
    """Ranks that a pipeline's rank receives from, for all of its stages."""
    return sum(neighbours_of(schedule, ranks, stage))


def _at_loss(profile: BlockProfile, tokens: float) -> float:
    """Bytes reserved for head and loss beside what blocks save; ``tokens`` in multiples of the probe's."""
    held = (one.of_tokens * tokens + one.of_parameters for one in profile.held_at_loss)
    return max(held) + profile.unused_bytes * tokens


def _saved(profile: BlockProfile) -> float:
    """Bytes that a mean block saves."""
    kinds = profile.kinds
    return sum(kind.count * kind.saved_bytes for kind in kinds) / sum(kind.count for kind in kinds)
