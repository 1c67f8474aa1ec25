"""Costs of the fast path's parts: kernels at other shapes than those of the probe, collectives, copies.

Each is costed by the engine's own cost models, once for every shape.

Peak memory of one configuration, from the profiles of shallow runs.

Sharded states, gradients, gathered parameters, saved activations, and the larger of what the loss and what a
block's backward need, each by its own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import PipelineSchedule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.planner.profile import BlockProfile, Shapes, Stretch, element_bytes
from fsdp2prof.estimators.simulate.program import Collective, Work
from fsdp2prof.estimators.techniques.context_parallel import ring_merges
from fsdp2prof.estimators.techniques.pipeline import micro_batches_under_way
from fsdp2prof.estimators.techniques.pipeline_order import (
    enough_micro_batches,
    neighbours_of,
    order_of,
    waiting_ns,
)
from fsdp2prof.estimators.timeline.costs import ClusterCosts, kernel_ns, transfer
from fsdp2prof.estimators.verdict.memory_notes import outside_allocator_bytes

Layout = tuple[int, int, str]
"""tp, ep and the way to checkpoint, of which there is a profile."""
Shape3 = tuple[int, int, int]
"""Batch size, a rank's sequence length, and context-parallel ranks."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block's compute at some shape, in nanoseconds."""

    forward: int
    backward: int
    sent_forward: int
    """Collectives that the compute stream waits for: of tensor and of expert parallelism."""
    sent_backward: int
    host_forward: int
    host_backward: int
    host_gather: int
    """The part of ``host_forward`` for FSDP's all-gather."""
    host_gather_again: int
    """The part of ``host_backward`` for FSDP's all-gather."""
    host_reduce: int
    """The part of ``host_backward`` for the reduction of the block's gradients."""


def padded_numel(shapes: Shapes, shards: int, *, dim: int = 0) -> int:
    """Elements of all shards of parameters that FSDP cuts along ``dim``; dimension 0 is padded."""
    if dim:
        return sum(map(prod, shapes))
    return sum(ceil(rows / shards) * shards * prod(rest) for rows, *rest in shapes)


class FastCosts:
    """Costs of the parts of a step, from profiles of shallow runs."""

    def __init__(self, cluster: Cluster, profiles: Mapping[Layout, BlockProfile], *, compiled: bool) -> None:
        self._cluster = cluster
        self._compiled = compiled
        self._profiles = profiles
        self._of_mesh = lru_cache(maxsize=None)(lambda mesh: ClusterCosts(cluster=cluster, mesh=mesh))
        self.blocks = lru_cache(maxsize=None)(self._blocks)
        self.ends = lru_cache(maxsize=None)(self._ends)
        self.transfer = lru_cache(maxsize=None)(self._transfer)

    def _blocks(self, layout: Layout, shape: Shape3) -> tuple[BlockCost, ...]:
        """Cost of a block of each kind."""
        profile = self._profiles[layout]
        return tuple(
            BlockCost(
                forward=self._compute(profile, kind.forward, shape),
                backward=self._compute(profile, kind.backward, shape),
                sent_forward=self._sent(profile, kind.forward, shape),
                sent_backward=self._sent(profile, kind.backward, shape),
                host_forward=kind.forward.host_ns,
                host_backward=kind.backward.host_ns,
                host_gather=kind.forward.gather_host_ns,
                host_gather_again=kind.backward.gather_host_ns,
                host_reduce=kind.backward.reduce_host_ns,
            )
            for kind in profile.kinds
        )

    def _ends(self, layout: Layout, shape: Shape3) -> tuple[int, int, int]:
        """Nanoseconds outside of the blocks: of kernels, of collectives, of the host."""
        profile = self._profiles[layout]
        ends = profile.ends
        return self._compute(profile, ends, shape), self._sent(profile, ends, shape), ends.host_ns

    def _compute(self, profile: BlockProfile, stretch: Stretch, shape: Shape3) -> int:
        hardware = self._cluster.hardware
        works = [_at(work, profile, shape) for work in stretch.works if work.bytes]
        for work in list(works) if shape[2] > 1 else ():
            works += self._merges(work, shape[2])
        return sum(kernel_ns(work, hardware) for work in works)

    def _merges(self, work: Work, cp: int) -> list[Work]:
        """Kernels with which a ring merges the parts of an attention."""
        if work.kind != "attention":
            return []
        batch, _, _, keys, depth, kv_heads, value_depth = work.shape
        kv = batch * kv_heads * (keys // cp) * (depth + value_depth)
        return [merge for _, merge in ring_merges(work, cp, kv, fused=self._compiled)]

    def _sent(self, profile: BlockProfile, stretch: Stretch, shape: Shape3) -> int:
        batch, seq_len, _ = shape
        mesh = MeshSpec(dp_shard=profile.ep, tp=profile.tp, ep=profile.ep)
        old = profile.batch_size * profile.seq_len
        return sum(
            self.transfer(op, payload * batch * seq_len // old, mesh, dimension)
            for op, payload, dimension in stretch.exchanges
        )

    def _transfer(self, op: str, payload: int, mesh: MeshSpec, dimension: str) -> int:
        """Nanoseconds of a collective over a dimension of a mesh."""
        sizes = {
            "fsdp": (mesh.fsdp_dim, mesh.fsdp_size),
            "efsdp": ("efsdp", mesh.expert_fsdp_size),
            "dp_replicate": ("dp_replicate", mesh.dp_replicate),
            "tp": ("tp", mesh.tp),
            "ep": ("ep", mesh.ep),
        }
        name, ranks = sizes[dimension]
        return self._of_mesh(mesh).collective_ns(
            Collective(
                stream=0,
                op=op,
                group=name,
                mesh_dim=name,
                group_size=ranks,
                dtype="bfloat16",
                nelems_in=0,
                nelems_out=0,
                payload_bytes=payload,
            )
        )

    def inside_node(self, payload: int, ranks: int) -> int:
        """Nanoseconds of an all-gather among neighbours."""
        return transfer("all_gather", payload, self._cluster.place(ranks, 1), self._cluster).ns

    def moved(self, moved: int) -> int:
        """Nanoseconds of a kernel that reads and writes so many bytes."""
        return kernel_ns(Work("copy", "bfloat16", moved), self._cluster.hardware)

    def from_host(self, moved: int) -> int:
        """Nanoseconds of a copy from the host."""
        return round(1e9 * moved / self._cluster.hardware.host_link_bytes_per_s)


def _at(work: Work, profile: BlockProfile, shape: Shape3) -> Work:
    """Return a kernel of the probe at another batch and sequence."""
    batch, seq_len, cp = shape
    old, new = profile.batch_size * profile.seq_len, batch * seq_len
    if work.kind == "attention":
        _, heads, queries, keys, *depths = work.shape
        flops = work.flops * batch * seq_len**2 // (profile.batch_size * profile.seq_len**2)
        grown = (batch, heads, queries * seq_len // profile.seq_len, keys * seq_len // profile.seq_len * cp)
        return replace(work, bytes=work.bytes * new // old, flops=flops * cp, shape=(*grown, *depths))
    if work.kind == "matmul":
        count, *sizes = work.shape
        m, n, k = (size * new // old if _counts_tokens(size, old, profile) else size for size in sizes)
        before = sizes[0] * sizes[2] + sizes[2] * sizes[1] + sizes[0] * sizes[1]
        after = m * k + k * n + m * n
        flops = work.flops * (m * n * k) // (sizes[0] * sizes[1] * sizes[2])
        return replace(work, bytes=work.bytes * after // before, flops=flops, shape=(count, m, n, k))
    return replace(work, bytes=work.bytes * new // old)


def _counts_tokens(size: int, tokens: int, profile: BlockProfile) -> bool:
    """Whether a size of a matrix is the tokens, or the part of them that goes to an expert."""
    return size % tokens == 0 or (profile.token_factor > 1 and size % profile.token_factor == 0)


_UNIT = 100_000
"""One stage's work on one micro-batch."""


def bubble_ns(mesh: MeshSpec, policy: PolicySpec, each_ns: float, split: tuple[float, float]) -> float:
    """Return the time that the schedule adds to a rank's work of ``each_ns`` per micro-batch.

    ``split``: the forward's share of that work, and the weights' share of the backward.
    """
    if mesh.pp == 1:
        return 0.0
    forward, weights = (round(share, 2) for share in split)
    micro_batches = enough_micro_batches(policy.pp_schedule, mesh.pp, policy.grad_accum)
    waits = _waits(policy.pp_schedule, mesh.pp, micro_batches, policy.pp_stage, forward, weights)
    return waits / _UNIT * each_ns / policy.stages_per_rank


@lru_cache(maxsize=1 << 12)
def _waits(
    schedule: PipelineSchedule, ranks: int, micro_batches: int, rank: int, forward: float, weights: float
) -> int:
    backward = _UNIT - round(forward * _UNIT)
    later = round(weights * backward)
    durations = {"F": _UNIT - backward, "B": backward, "I": backward - later, "W": later}
    return waiting_ns(order_of(schedule, ranks, micro_batches), rank, durations)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Elements of a model's parameters on the ranks of a mesh."""

    layers: int
    """Blocks of one rank."""
    blocks: int
    """Gathered, of all its blocks."""
    widest: int
    """Gathered bytes of the widest block; of its experts those that one rank gathers."""
    root: int
    """Gathered bytes outside the blocks."""
    kept_root: int
    """Elements of ``root`` that are gathered at the loss."""
    shard: int
    """Elements of one rank's shard."""
    widest_shard: int
    """Elements of one rank's shard of the widest block, or of the modules outside the blocks."""
    has_loss: bool
    """Whether the rank has the modules after the blocks."""


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
    """Bytes reserved for head and loss in addition to the blocks' saved tensors; ``tokens`` as a multiple
    of the probe's."""
    held = (one.of_tokens * tokens + one.of_parameters for one in profile.held_at_loss)
    return max(held) + profile.unused_bytes * tokens


def _saved(profile: BlockProfile) -> float:
    """Bytes that a mean block saves."""
    kinds = profile.kinds
    return sum(kind.count * kind.saved_bytes for kind in kinds) / sum(kind.count for kind in kinds)
