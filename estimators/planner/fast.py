"""Memory and step time of one configuration in microseconds, from the profiles of shallow runs.

Kernels, collectives and FSDP's bytes are costed as in the engine; FSDP2's overlap is one formula per block
instead of a simulation, which is where the two differ.

Symbols: P elements of a group, S = P / shards, T tokens of a micro-batch on a rank, L blocks, A
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import has_ends
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import CONTENTION_FRACS, HOST_CORE_GB_PER_S
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.fast_costs import (
    BlockCost,
    FastCosts,
    Layout,
    Sizes,
    bubble_ns,
    outside_bytes,
    padded_numel,
    reserved_bytes,
)
from fsdp2prof.estimators.planner.profile import BlockKind, BlockProfile
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.schedule import BlockCounts, block_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Memory and step time of one configuration; all times are of one rank's step."""

    reserved_bytes: int
    outside_bytes: int
    """That no allocator counts, at the high end of its range."""
    step_ns: int
    compute_ns: int
    recompute_ns: int
    """The part of ``compute_ns`` that checkpointing runs a second time."""
    exposed_fsdp_ns: int
    exposed_parallel_ns: int
    """Collectives of tensor and expert parallelism."""
    host_ns: int
    """Waiting for a host that issues too slowly."""
    bubble_ns: int
    model_flops: int
    """Of all micro-batches of this rank; tokens that cp and tp share are counted once."""
    moved_ns: int = 0
    """The part of ``compute_ns`` that only moves parameters and gradients: copies, additions, the update."""

    @property
    def total_bytes(self) -> int:
        """Device memory taken."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def exposed_ns(self) -> int:
        """Communication that nothing hides."""
        return self.exposed_fsdp_ns + self.exposed_parallel_ns

    @property
    def least_ns(self) -> float:
        """Shortest step with any other precision of shards and gradients."""
        saved = self.exposed_fsdp_ns + self.moved_ns
        rest = self.step_ns - self.bubble_ns - saved
        return rest * (1 + self.bubble_ns / max(1, self.step_ns - self.bubble_ns))


@dataclass(slots=True)
class _Sums:
    """Nanoseconds of a step, summed block by block."""

    compute: float = 0.0
    recompute: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    issued: float = 0.0
    """The host needs to issue all of it."""
    moved: float = 0.0
    """The part of ``compute`` that only moves parameters and gradients."""
    updated: float = 0.0
    """The host updates offloaded parameters, and issues nothing meanwhile."""

    @property
    def host(self) -> float:
        """Time waiting for the host, which runs ahead of the device if it can, and into the next step."""
        return max(0.0, self.issued - self.compute - self.exposed - self.sent) + self.updated

    @property
    def worked(self) -> float:
        """All but the bubble."""
        return self.compute + self.exposed + self.sent + self.host


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Time of FSDP's work for one block, in nanoseconds."""

    gather: int
    again: int
    """The all-gather of backward."""
    scatter: int
    """Reduce-scatter, and the all-reduce of replicas."""
    copies: int
    """Beside an all-gather."""
    reduced: int
    """Beside a reduce-scatter."""
    accumulated: int
    """Adding a micro-batch's gradients to the unsharded accumulated ones."""
    widened: int
    """Casting the first micro-batch's gradients to the dtype they are kept in, and to a wider one at the
    end."""


class FastModel:
    """Scores configurations of one request."""

    def __init__(self, request: PlanRequest, profiles: Mapping[Layout, BlockProfile], model: Model) -> None:
        self._profiles = profiles
        self._blocks = len(model.blocks)
        self._width = 0 if model.config is None else model.config.dim
        cluster = request.cluster.with_attention_of(request.policy)
        measured = cluster.hardware.overlap_slowdown_frac
        self._hidden_cost = 1 - 1 / (1 + (CONTENTION_FRACS[1] if measured is None else measured))
        """Time that compute loses while a collective of unit length is in flight."""
        self._costs = FastCosts(cluster, profiles, compiled=request.policy.compile)
        self._traffic = lru_cache(maxsize=1 << 14)(self._traffic_of)
        self._split = lru_cache(maxsize=None)(self._split_of)
        self._sizes = lru_cache(maxsize=1 << 14)(self._sizes_of)

    def score(self, candidate: Candidate) -> Score:
        """Return memory and step time of a configuration. ``KeyError`` if no profile covers it."""
        mesh, policy = candidate.mesh, candidate.policy
        plain = self._profiles[mesh.tp, mesh.ep, "none"]
        mix = self._mix(mesh, policy)
        both_ends = _has_both_ends(mesh, policy)
        sizes = self._sizes(mesh, _dim(mesh, policy, plain), len(policy.wrap) > 1, both_ends)
        sums = _Sums()
        for share, mode in mix:
            self._add_blocks(sums, mesh, policy, share, mode)
        update = self._add_ends(sums, mesh, policy, plain, sizes)
        each = (sums.worked - update) / policy.grad_accum
        bubble = bubble_ns(mesh, policy, each, self._split(mesh.tp, mesh.ep, mix[0][1]))
        layers = self._blocks // mesh.pp
        flops = sum(kind.count * kind.model_flops for kind in plain.kinds) / self._blocks * layers
        flops += plain.model_flops_ends / mesh.pp
        tokens = policy.batch_size * policy.seq_len / (plain.batch_size * plain.seq_len)
        profiles = [(share, self._profiles[mesh.tp, mesh.ep, mode]) for share, mode in mix]
        return Score(
            reserved_bytes=round(reserved_bytes(mesh, policy, plain, profiles, sizes, self._width)),
            outside_bytes=outside_bytes(mesh),
            step_ns=round(sums.worked + bubble),
            compute_ns=round(sums.compute),
            recompute_ns=round(sums.recompute),
            exposed_fsdp_ns=round(sums.exposed),
            exposed_parallel_ns=round(sums.sent),
            host_ns=round(sums.host),
            bubble_ns=round(bubble),
            model_flops=round(flops * tokens * policy.grad_accum / mesh.cp),
            moved_ns=round(sums.moved),
        )

    def _mix(self, mesh: MeshSpec, policy: PolicySpec) -> list[tuple[float, str]]:
        """Ways of checkpointing, each with its share of the blocks."""
        every = policy.ac_every
        if every is None:
            return [(1.0, str(policy.ac))]
        checkpointed = (self._blocks // every) / self._blocks
        return [(checkpointed, "full"), (1 - checkpointed, "none")]

    def _add_blocks(self, sums: _Sums, mesh: MeshSpec, policy: PolicySpec, share: float, mode: str) -> None:
        """Add all micro-batches of the blocks that are checkpointed one way."""
        shape = (policy.batch_size, policy.seq_len // mesh.cp, mesh.cp)
        profile = self._profiles[mesh.tp, mesh.ep, mode]
        costs = self._costs.blocks((mesh.tp, mesh.ep, mode), shape)
        plain = self._costs.blocks((mesh.tp, mesh.ep, "none"), shape)
        dim = _dim(mesh, policy, profile)
        dtypes = policy.compute_dtype, policy.gradient_dtype, policy.orig_dtype
        for index, (kind, cost, base) in enumerate(zip(profile.kinds, costs, plain, strict=True)):
            count = share * kind.count / mesh.pp
            traffic = self._traffic(mesh, index, dim, dtypes, policy.reshard, policy.offload)
            for times, own, exchanged, host_ns, sent, copy in _passes(cost, traffic, mesh, policy):
                busy = own + copy + exchanged
                bare = max(busy + self._hidden_cost * min(sent, busy), sent)
                weight = count * times
                sums.compute += weight * (own + copy)
                sums.moved += weight * copy
                sums.exposed += weight * max(0.0, bare - busy)
                sums.sent += weight * exchanged
                sums.issued += weight * host_ns
            if policy.sync == "last":
                added = (policy.grad_accum - 1) * traffic.accumulated
                added += traffic.widened if policy.grad_accum > 1 else 0
                sums.compute += count * added
                sums.moved += count * added
            sums.recompute += count * policy.grad_accum * max(0, cost.backward - base.backward)

    def _add_ends(
        self, sums: _Sums, mesh: MeshSpec, policy: PolicySpec, plain: BlockProfile, sizes: Sizes
    ) -> float:
        """Add the parts outside the blocks, and the update, which is returned."""
        shape = (policy.batch_size, policy.seq_len // mesh.cp, mesh.cp)
        ends, exchanged, host = self._costs.ends((mesh.tp, mesh.ep, "none"), shape)
        stages = 1 if _has_both_ends(mesh, policy) else mesh.pp
        if mesh.fsdp_size * mesh.dp_replicate > 1:
            sums.exposed += self._edges(mesh, policy, plain, sizes)
            copied = self._copied_at_ends(mesh, policy, sizes)
            sums.compute += copied
            sums.moved += copied
        sums.compute += ends * policy.grad_accum / stages
        sums.sent += exchanged * policy.grad_accum / stages
        sums.issued += host * policy.grad_accum + (0 if policy.offload else plain.update_host_ns)
        own = dtype_bytes(policy.orig_dtype) / plain.element_bytes[0]
        updated = round(plain.update_bytes * own * sizes.shard / plain.shard_numel)
        if policy.offload:
            sums.updated = plain.update_host_ns + updated / HOST_CORE_GB_PER_S
            return sums.updated
        update = self._costs.moved(updated)
        sums.compute += update
        sums.moved += update
        return update

    def _edges(self, mesh: MeshSpec, policy: PolicySpec, plain: BlockProfile, sizes: Sizes) -> float:
        """Communication at the ends of a step: the root's collectives, the first gather, the last scatter.

        If there are separate groups at the ends, those before the blocks.
        """
        gather_bytes, reduce_bytes = dtype_bytes(policy.compute_dtype), dtype_bytes(policy.gradient_dtype)
        root = sizes.root if len(policy.wrap) == 1 else sizes.root - sizes.kept_root
        root = root * min(mesh.pp, 2) // mesh.pp
        transfer = self._costs.transfer
        gathered = transfer("all_gather", root * gather_bytes, mesh, "fsdp")
        if policy.offload:
            copied = self._costs.from_host(root // mesh.fsdp_size * dtype_bytes(policy.orig_dtype))
            gathered += copied
        sent = transfer("reduce_scatter", root * reduce_bytes, mesh, "fsdp")
        sent += transfer("all_reduce", root * reduce_bytes // mesh.fsdp_size, mesh, "dp_replicate")
        if policy.offload:
            sent += copied
        dtypes = policy.compute_dtype, policy.gradient_dtype, policy.orig_dtype
        dim = _dim(mesh, policy, plain)
        first = self._traffic(mesh, 0, dim, dtypes, policy.reshard, policy.offload)
        counts = _counts(mesh, policy)
        return counts.reductions * (sent + first.scatter) + counts.forward_gathers * (gathered + first.gather)

    def _copied_at_ends(self, mesh: MeshSpec, policy: PolicySpec, sizes: Sizes) -> float:
        """FSDP's own kernels for modules outside the blocks, as :class:`_Traffic` has them for a block."""
        gathered, reduced = dtype_bytes(policy.compute_dtype), dtype_bytes(policy.gradient_dtype)
        counts = _counts(mesh, policy)
        moved, root = self._costs.moved, sizes.root
        copied = (policy.grad_accum - counts.reductions) * moved(root * (gathered + 2 * reduced))
        if counts.reductions < policy.grad_accum:
            copied += _widened(moved, root, gathered, reduced)
        if mesh.fsdp_size > 1:
            copied += counts.forward_gathers * moved(3 * root * gathered)
            copied += counts.reductions * moved(root * (gathered + reduced))
        return copied

    def _split_of(self, tp: int, ep: int, mode: str) -> tuple[float, float]:
        """Shares of a block's forward and backward: the forward, and of the backward the weights' part."""
        forward = backward = weights = 0
        for kind in self._profiles[tp, ep, mode].kinds:
            forward += kind.count * sum(work.flops for work in kind.forward.works)
            backward += kind.count * sum(work.flops for work in kind.backward.works)
            weights += kind.count * _weight_flops(kind)
        return forward / max(1, forward + backward), weights / max(1, backward)

    def _traffic_of(
        self,
        mesh: MeshSpec,
        index: int,
        dim: int,
        dtypes: tuple[str, str, str],
        reshard: object,
        offload: bool,
    ) -> _Traffic:
        kind = self._profiles[mesh.tp, mesh.ep, "none"].kinds[index]
        gathered, reduced, own = map(dtype_bytes, dtypes)
        transfer = self._costs.transfer
        groups = [(numel, name) for numel, name in _groups(kind, mesh, dim) if numel]
        gather = sum(transfer("all_gather", numel * gathered, mesh, name) for numel, name in groups)
        again, scatter = gather, 0
        for numel, name in groups:
            shards = mesh.fsdp_size if name == "fsdp" else mesh.expert_fsdp_size
            scatter += transfer("reduce_scatter", numel * reduced, mesh, name)
            scatter += transfer("all_reduce", numel * reduced // shards, mesh, "dp_replicate")
            if offload:  # the shard comes from the host before it is gathered
                gather += self._costs.from_host(numel // shards * own)
                scatter += self._costs.from_host(numel // shards * own)
        numel = sum(numel for numel, _ in groups)
        if isinstance(reshard, int) and not isinstance(reshard, bool):
            again = self._costs.inside_node(numel * gathered, reshard)
        elif offload:
            again = gather
        moved = self._costs.moved
        return _Traffic(
            gather=gather,
            again=again,
            scatter=scatter,
            copies=moved(3 * numel * gathered) if mesh.fsdp_size > 1 else 0,
            reduced=moved(numel * (gathered + reduced)) if mesh.fsdp_size > 1 else 0,
            accumulated=moved(numel * (gathered + 2 * reduced)),
            widened=_widened(moved, numel, gathered, reduced),
        )

    def _sizes_of(self, mesh: MeshSpec, dim: int, ends: bool, both_ends: bool) -> Sizes:
        plain = self._profiles[mesh.tp, mesh.ep, "none"]
        layers = self._blocks // mesh.pp
        share = layers / self._blocks
        groups = [(kind.count, _groups(kind, mesh, dim)) for kind in plain.kinds]
        of_rank = {"fsdp": mesh.fsdp_size, "efsdp": mesh.expert_fsdp_size}
        root = padded_numel(plain.root, mesh.fsdp_size)
        tail = padded_numel(plain.tail, mesh.fsdp_size)
        if not both_ends:  # the first stage has what is before the blocks, also where the last shares it
            root -= tail
        shards = [sum(numel / of_rank[name] for numel, name in parts) for _, parts in groups]
        gathered = [sum(numel for numel, _ in parts) for _, parts in groups]
        counts = [count for count, _ in groups]
        return Sizes(
            layers=layers,
            blocks=round(share * sum(map(prod, zip(counts, gathered, strict=True)))),
            widest=max(gathered),
            root=root,
            kept_root=tail if ends else root,
            shard=round(share * sum(map(prod, zip(counts, shards, strict=True))) + root / mesh.fsdp_size),
            widest_shard=round(max(*shards, root / mesh.fsdp_size)),
            has_loss=both_ends,
        )


def _counts(mesh: MeshSpec, policy: PolicySpec) -> BlockCounts:
    """The number of times FSDP gathers and reduces a block in a step."""
    reshard = policy.reshard != "never"
    return block_counts(policy.grad_accum, policy.sync, reshard=reshard, keep_between=mesh.pp > 1)


def _widened(moved: Callable[[int], int], numel: int, gathered: int, reduced: int) -> int:
    """Nanoseconds of a cast to a wider dtype, and of the additional reads when it is reduced."""
    if reduced == gathered:
        return 0
    return moved(numel * (gathered + reduced)) + moved(numel * abs(reduced - gathered))


def _has_both_ends(mesh: MeshSpec, policy: PolicySpec) -> bool:
    """Whether a rank has the modules before the blocks and those after them."""
    return mesh.pp == 1 or all(has_ends(policy.pp_schedule, mesh.pp, policy.pp_stage))


def _passes(
    cost: BlockCost, traffic: _Traffic, mesh: MeshSpec, policy: PolicySpec
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield forwards and backwards of a block: how many, kernels, exchanges, host, FSDP's, its copies."""
    micro_batches = policy.grad_accum
    gathers, gathers_again, reductions = _counts(mesh, policy)
    again = traffic.again if gathers_again else 0
    ahead = cost.forward, cost.sent_forward
    back = cost.backward, cost.sent_backward
    kept = cost.host_forward - cost.host_gather
    last = cost.host_backward - (0 if gathers_again else cost.host_gather_again)
    for times, (own, exchanged), host, gathered, scattered in (
        (gathers, ahead, cost.host_forward, traffic.gather, 0),
        (micro_batches - gathers, ahead, kept, 0, 0),
        (reductions, back, last, again, traffic.scatter),
        (micro_batches - reductions, back, last - cost.host_reduce, again, 0),
    ):
        # the host's link goes both ways at once
        sent = max(gathered, scattered) if policy.offload else gathered + scattered
        copy = (traffic.copies if sent else 0) + (traffic.reduced if scattered else 0)
        yield times, own, exchanged, host, sent, copy


def _groups(kind: BlockKind, mesh: MeshSpec, dim: int) -> list[tuple[int, str]]:
    """Elements that FSDP gathers for a block, by the dimension that they are sharded over."""
    dense = padded_numel(kind.dense, mesh.fsdp_size)
    if not kind.experts:
        return [(dense, "fsdp")]
    experts = padded_numel(kind.experts, mesh.expert_fsdp_size, dim=dim)
    return [(dense + experts, "fsdp")] if mesh.ep == 1 else [(dense, "fsdp"), (experts, "efsdp")]


def _dim(mesh: MeshSpec, policy: PolicySpec, profile: BlockProfile) -> int:
    """Dimension along which FSDP cuts experts."""
    count = next((kind.experts[0][0] for kind in profile.kinds if kind.experts), 0)
    if not count or policy.expert_shards == "experts":
        return 0
    return int(policy.expert_shards == "hidden" or (mesh.ep > 1 and mesh.expert_fsdp_size > count))


def _weight_flops(kind: BlockKind) -> int:
    """Operations of a block's backward for its weights' gradients: half of those of its products."""
    return sum(work.flops for work in kind.forward.works if work.kind == "matmul")
