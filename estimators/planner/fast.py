"""Memory and step time of one configuration in microseconds, from the profiles of shallow runs.

Kernels, collectives and FSDP's bytes are costed as the engine costs them; what FSDP2 overlaps is written as
one line a block instead of being simulated, which is where the two differ. Symbols: P elements of a group,
S = P / shards, T tokens of a micro-batch on a rank, L blocks, A micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdp2prof.estimators.execution.pipeline_stage import micro_batches_in_flight
from fsdp2prof.estimators.memory_notes import outside_allocator_bytes
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.profile import BlockProfile, Stretch
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec, dtype_bytes
from fsdp2prof.estimators.timeline.collective_costs import transfer
from fsdp2prof.estimators.timeline.commands import Work
from fsdp2prof.estimators.timeline.kernel_costs import kernel_ns

__all__ = ["FastModel", "Score"]

_CONTENTION = 0.19
"""As :class:`~fsdp2prof.estimators.timeline.costs.ClusterCosts` has it."""
_HIDDEN_COST = 1 - 1 / (1 + _CONTENTION)
"""Time that compute loses while a collective of unit length is in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one configuration takes; all times of one rank's step."""

    reserved_bytes: int
    outside_bytes: int
    """That no allocator counts, at the high end of its range."""
    step_ns: int
    compute_ns: int
    recompute_ns: int
    """Of the compute: what checkpointing does a second time."""
    exposed_fsdp_ns: int
    exposed_tp_ns: int
    host_ns: int
    """Waiting for a host that issues too slowly."""
    bubble_ns: int
    model_flops: int
    """Of all micro-batches of this rank, what cp and tp share counted once."""

    @property
    def total_bytes(self) -> int:
        """Device memory taken."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def exposed_ns(self) -> int:
        """Communication that nothing hides."""
        return self.exposed_fsdp_ns + self.exposed_tp_ns


@dataclass(frozen=True, slots=True)
class _Block:
    """One block's compute at some shape, in nanoseconds."""

    forward: int
    backward: int
    tp_forward: int
    tp_backward: int
    host_forward: int
    host_backward: int


class FastModel:
    """Scores configurations of one request."""

    def __init__(
        self, request: PlanRequest, profiles: Mapping[tuple[int, str], BlockProfile], model: Model
    ) -> None:
        self._cluster = request.cluster
        self._profiles = profiles
        self._blocks = len(model.blocks)
        self._width = 0 if model.config is None else model.config.dim
        self._block = lru_cache(maxsize=None)(self._block_at)
        self._ends = lru_cache(maxsize=None)(self._ends_at)
        self._transfer = lru_cache(maxsize=None)(self._transfer_at)

    def score(self, candidate: Candidate) -> Score:
        """Return memory and step time of a configuration. ``KeyError`` for one that no profile covers."""
        mesh, policy = candidate.mesh, candidate.policy
        mix = self._mix(mesh.tp, policy)
        plain = self._profiles[mesh.tp, "none"]
        return self._timed(mesh, policy, mix, plain)

    def _mix(self, tp: int, policy: PolicySpec) -> list[tuple[float, BlockProfile]]:
        """Profiles of the blocks with the share of blocks that each stands for."""
        every = policy.ac_every
        if every is None:
            return [(1.0, self._profiles[tp, str(policy.ac)])]
        checkpointed = (self._blocks // every) / self._blocks
        return [
            (checkpointed, self._profiles[tp, "full"]),
            (1 - checkpointed, self._profiles[tp, "none"]),
        ]

    def _timed(
        self,
        mesh: MeshSpec,
        policy: PolicySpec,
        mix: list[tuple[float, BlockProfile]],
        plain: BlockProfile,
    ) -> Score:
        layers = self._blocks // mesh.pp
        micro_batches = policy.grad_accum
        shape = (policy.batch_size, policy.seq_len // mesh.cp, mesh.cp)
        gather_bytes, reduce_bytes = dtype_bytes(policy.compute_dtype), dtype_bytes(policy.gradient_dtype)
        block, root = plain.block_numel, plain.root_numel // mesh.pp
        gather = self._transfer("all_gather", block * gather_bytes, mesh, "fsdp")
        if policy.offload:  # the shard comes from the host before it is gathered
            own = block // mesh.fsdp_size * dtype_bytes(policy.orig_dtype)
            gather += round(1e9 * own / self._cluster.hardware.host_link_bytes_per_s)
        again = gather
        if isinstance(policy.reshard, int) and not isinstance(policy.reshard, bool):
            again = self._inside_node(block * gather_bytes, policy.reshard)
        scatter = self._transfer("reduce_scatter", block * reduce_bytes, mesh, "fsdp")
        scatter += self._transfer("all_reduce", block * reduce_bytes // mesh.fsdp_size, mesh, "dp_replicate")
        copies = self._moved(3 * block * gather_bytes) if mesh.fsdp_size > 1 else 0
        reduced = self._moved(block * (gather_bytes + reduce_bytes)) if mesh.fsdp_size > 1 else 0
        kept = policy.reshard == "never"
        compute = recompute = exposed = passed = host = 0.0
        base = self._block(mesh.tp, "none", shape)
        reductions = micro_batches if policy.sync == "each" else 1
        for share, profile in mix:
            mode = _mode(self._profiles, profile)
            cost = self._block(mesh.tp, mode, shape)
            count = share * layers
            first_gathers = 1 if kept else micro_batches
            for times, own, tp_ns, host_ns, sent in (
                (first_gathers, cost.forward, cost.tp_forward, cost.host_forward, gather),
                (micro_batches - first_gathers, cost.forward, cost.tp_forward, cost.host_forward, 0),
                (
                    reductions,
                    cost.backward,
                    cost.tp_backward,
                    cost.host_backward,
                    scatter + (0 if kept else again),
                ),
                (
                    micro_batches - reductions,
                    cost.backward,
                    cost.tp_backward,
                    cost.host_backward,
                    0 if kept else again,
                ),
            ):
                copy = (copies if sent else 0) + (reduced if sent >= scatter > 0 else 0)
                busy = own + copy + tp_ns
                bare = max(busy + _HIDDEN_COST * min(sent, busy), sent)
                total = max(bare, host_ns)
                weight = count * times
                compute += weight * (own + copy)
                exposed += weight * max(0.0, bare - busy)
                passed += weight * tp_ns
                host += weight * (total - bare)
            recompute += count * micro_batches * max(0, cost.backward - base.backward)
        ends, tp_ends, host_ends = self._ends(mesh.tp, shape)
        edges = self._edges(mesh, policy, root, gather, scatter)
        exposed += edges if mesh.fsdp_size * mesh.dp_replicate > 1 else 0
        compute += ends * micro_batches / mesh.pp
        passed += tp_ends * micro_batches / mesh.pp
        numel = block * layers + root
        shard = numel / mesh.fsdp_size
        update = self._moved(round(plain.update_bytes * shard / plain.shard_numel))
        compute += update
        host += max(0, host_ends - ends) * micro_batches
        worked = compute + exposed + passed + host
        each = (worked - update) / micro_batches / policy.stages_per_rank
        bubble = (mesh.pp - 1) * each if mesh.pp > 1 else 0.0
        flops = plain.model_flops_block * layers + plain.model_flops_ends / mesh.pp
        tokens = policy.batch_size * policy.seq_len / (plain.batch_size * plain.seq_len)
        return Score(
            reserved_bytes=round(self._reserved(mesh, policy, mix, plain)),
            outside_bytes=_outside(mesh, policy),
            step_ns=round(worked + bubble),
            compute_ns=round(compute),
            recompute_ns=round(recompute),
            exposed_fsdp_ns=round(exposed),
            exposed_tp_ns=round(passed),
            host_ns=round(host),
            bubble_ns=round(bubble),
            model_flops=round(flops * tokens * micro_batches / mesh.cp),
        )

    def _edges(self, mesh: MeshSpec, policy: PolicySpec, root: int, gather: int, scatter: int) -> float:
        """What begins and ends a step: the root's own collectives, the first gather, the last scatter."""
        gather_bytes, reduce_bytes = dtype_bytes(policy.compute_dtype), dtype_bytes(policy.gradient_dtype)
        sent = self._transfer("all_gather", root * gather_bytes, mesh, "fsdp")
        sent += self._transfer("reduce_scatter", root * reduce_bytes, mesh, "fsdp")
        sent += self._transfer("all_reduce", root * reduce_bytes // mesh.fsdp_size, mesh, "dp_replicate")
        times = policy.grad_accum if policy.sync == "each" else 1
        return times * (sent + scatter) + gather

    def _reserved(
        self,
        mesh: MeshSpec,
        policy: PolicySpec,
        mix: list[tuple[float, BlockProfile]],
        plain: BlockProfile,
    ) -> float:
        layers = self._blocks // mesh.pp
        tokens = policy.batch_size * policy.seq_len / mesh.cp / (plain.batch_size * plain.seq_len)
        own, gathered, reduced = (
            dtype_bytes(name) for name in (policy.orig_dtype, policy.compute_dtype, policy.gradient_dtype)
        )
        block, root = plain.block_numel, plain.root_numel / min(mesh.pp, 2)
        shard = (block * layers + root) / mesh.fsdp_size
        states = 3 * own * shard
        gradients = max(own, reduced) * shard
        if policy.offload:
            gradients = max(own, reduced) * max(block, root) / mesh.fsdp_size
            states = gradients
        flying = micro_batches_in_flight(mesh, policy) if mesh.pp > 1 else 1
        saved = tokens * flying * sum(share * profile.saved_bytes for share, profile in mix) * layers
        buffers = 0.0
        if policy.reshard == "never":
            buffers += gathered * block * layers
        elif isinstance(policy.reshard, int) and not isinstance(policy.reshard, bool):
            buffers += gathered * block * layers / policy.reshard
        if policy.grad_accum > 1 and policy.sync == "last":
            buffers += reduced * (block * layers + root)
        elif policy.grad_accum > 1:
            gradients += max(own, reduced) * max(block, root) / mesh.fsdp_size
        if mesh.pp > 1:  # a buffer of its own for what each micro-batch receives
            received = policy.batch_size * policy.seq_len // mesh.cp // mesh.tp * self._width * gathered
            buffers += policy.grad_accum * (2 * policy.stages_per_rank - 1) * received
        ends = max(profile.ends_bytes for _, profile in mix) * tokens
        working = (2 * gathered + gathered + reduced) * block
        blocks_own = max(profile.block_peak_bytes for _, profile in mix) - working
        in_block = working + max(0.0, blocks_own) * tokens
        at_loss = states + buffers + saved + gathered * root + max(ends, in_block)
        at_update = states + own * shard + gathered * root * (policy.reshard == "never")
        return max(at_loss, at_update) + plain.pool_bytes + gradients

    def _block_at(self, tp: int, mode: str, shape: tuple[int, int, int]) -> _Block:
        profile = self._profiles[tp, mode]
        return _Block(
            forward=self._compute(profile, profile.forward, shape),
            backward=self._compute(profile, profile.backward, shape),
            tp_forward=self._passed(profile, profile.forward, shape),
            tp_backward=self._passed(profile, profile.backward, shape),
            host_forward=profile.forward.host_ns,
            host_backward=profile.backward.host_ns,
        )

    def _ends_at(self, tp: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        profile = self._profiles[tp, "none"]
        return (
            self._compute(profile, profile.ends, shape),
            self._passed(profile, profile.ends, shape),
            profile.ends.host_ns,
        )

    def _compute(self, profile: BlockProfile, stretch: Stretch, shape: tuple[int, int, int]) -> int:
        hardware = self._cluster.hardware
        works = (_at(work, profile, shape) for work in stretch.works if work.bytes)
        return sum(kernel_ns(work, hardware) for work in works)

    def _passed(self, profile: BlockProfile, stretch: Stretch, shape: tuple[int, int, int]) -> int:
        batch, seq_len, _ = shape
        mesh = MeshSpec(tp=profile.tp)
        old = profile.batch_size * profile.seq_len
        return sum(
            self._transfer(op, payload * batch * seq_len // old, mesh, "tp")
            for op, payload in stretch.tensor_parallel
        )

    def _transfer_at(self, op: str, payload: int, mesh: MeshSpec, dimension: str) -> int:
        return transfer(op, payload, self._cluster.placement(mesh, dimension), self._cluster).ns

    def _inside_node(self, payload: int, ranks: int) -> int:
        return transfer("all_gather", payload, self._cluster.place(ranks, 1), self._cluster).ns

    def _moved(self, moved: int) -> int:
        return kernel_ns(Work("copy", "bfloat16", moved), self._cluster.hardware)


def _at(work: Work, profile: BlockProfile, shape: tuple[int, int, int]) -> Work:
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
        m, n, k = (size * new // old if size % old == 0 else size for size in sizes)
        before = sizes[0] * sizes[2] + sizes[2] * sizes[1] + sizes[0] * sizes[1]
        after = m * k + k * n + m * n
        flops = work.flops * (m * n * k) // (sizes[0] * sizes[1] * sizes[2])
        return replace(work, bytes=work.bytes * after // before, flops=flops, shape=(count, m, n, k))
    return replace(work, bytes=work.bytes * new // old)


def _mode(profiles: Mapping[tuple[int, str], BlockProfile], profile: BlockProfile) -> str:
    return next(mode for (tp, mode), known in profiles.items() if known is profile and tp == profile.tp)


def _outside(mesh: MeshSpec, policy: PolicySpec) -> int:
    outside = outside_allocator_bytes(mesh, policy)
    return outside.high
