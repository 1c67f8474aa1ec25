"""The search: every configuration scored by the fast path, the best of each family, and the Pareto front.

Every configuration that could be the answer: meshes by what fits on a node, batches, policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from fsdp2prof.by_key import grouped
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import Every
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import Interleaved, ZeroBubble, schedule_rule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.fast import FastModel, Score
from fsdp2prof.estimators.planner.profile import units_of_ends
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest, family_of
from fsdp2prof.estimators.techniques.registry import check_parallelism

_MAX_CP = 16
_MAX_BATCH = 32
_EVERY = (2, 4)
_SEVERAL_STAGES = (Interleaved(2), ZeroBubble(2), "zbv")
"""Schedules with two stages per rank."""


def meshes(request: PlanRequest, model: Model) -> Iterator[MeshSpec]:
    """Yield the meshes of all GPUs that the model and the sequence can be divided over.

    Tensor and expert parallelism stay within a node unless they are fixed; shards of a replica fill whole
    nodes or a part of one.
    """
    node = request.cluster.gpus_per_node
    for pp, tp, cp in product(*(_sizes(request, name) for name in ("pp", "tp", "cp"))):
        if ("tp" not in request.fixed_mesh and tp > node) or request.gpus % (pp * tp * cp):
            continue
        if cp > _MAX_CP and "cp" not in request.fixed_mesh:
            continue
        data = request.gpus // (pp * tp * cp)
        for replicas in _divisors(data):
            shards = data // replicas
            fixed = request.fixed_mesh
            if replicas != fixed.get("dp_replicate", replicas) or shards != fixed.get("dp_shard", shards):
                continue
            if replicas > 1 and not _fills_nodes(shards * cp * tp, node):
                continue
            for ep in _expert_ranks(request, model, shards * cp * tp, tp):
                mesh = MeshSpec(pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp, ep=ep)
                if _divides(request, model, mesh):
                    yield mesh


def candidates(request: PlanRequest, model: Model, mesh: MeshSpec) -> Iterator[Candidate]:
    """Yield every policy for a mesh."""
    fixed = request.fixed_policy
    data = mesh.dp_replicate * mesh.dp_shard
    if request.global_batch % data:
        return
    per_rank = request.global_batch // data
    checkpointing = ("none", "op", *map(Every, _EVERY), "full") if model.blocks else ("none",)
    units = _units(request, model, mesh)
    for batch in _divisors(per_rank):
        if (batch > _MAX_BATCH and "batch_size" not in fixed) or batch != fixed.get("batch_size", batch):
            continue
        accumulated = per_rank // batch
        if accumulated != fixed.get("grad_accum", accumulated):
            continue
        choices: dict[str, tuple[Any, ...]] = {
            "sync": ("last",) if accumulated == 1 or mesh.pp > 1 else ("last", "each"),
            "ac": checkpointing,
            "pp_schedule": _schedules(request, model, mesh, accumulated),
            "expert_shards": _expert_shards(model, mesh),
        }
        choices |= {name: (value,) for name, value in fixed.items() if name in choices}
        rest = {name: value for name, value in fixed.items() if name not in choices}
        for (wrap, reshard), *values in product(units, *choices.values()):
            chosen = {**dict(zip(choices, values, strict=True)), "wrap": wrap, "reshard": reshard}
            if schedule_rule(chosen["pp_schedule"]).splits_backward and chosen["ac"] != "none":
                continue  # recomputed for the input's part and again for every group of weights
            options = {**rest, **chosen, "batch_size": batch, "grad_accum": accumulated}
            yield Candidate(mesh, _policy(request.policy, tuple(options.items())))


@lru_cache(maxsize=1 << 14)
def _policy(base: PolicySpec, options: tuple[tuple[str, Any], ...]) -> PolicySpec:
    """Meshes share policies: each is checked once."""
    return replace(base, **dict(options))


def _units(request: PlanRequest, model: Model, mesh: MeshSpec) -> list[tuple[tuple[str, ...], Any]]:
    """Values of ``wrap`` and ``reshard``: modules sharded together, and whether they stay gathered.

    Blocks and the root; where a model allows it also groups for what lies before and after the blocks, of
    which the last stays gathered, as torchtitan has them.
    """
    fixed, wrap = request.fixed_policy, request.policy.wrap
    found: list[tuple[tuple[str, ...], Any]] = []
    if mesh.pp > 1:
        found = [(wrap, "never")]
    else:
        node = request.cluster.gpus_per_node
        inside = mesh.tp == 1 and mesh.fsdp_size > node and mesh.fsdp_size % node == 0
        found = [(wrap, "default"), (wrap, "never"), *([(wrap, node)] if inside and mesh.ep == 1 else [])]
        ends = units_of_ends(model)
        if ends is not None and mesh.fsdp_size > 1:
            found.append((ends, "torchtitan"))
    if "reshard" in fixed:
        found = list(dict.fromkeys((units, fixed["reshard"]) for units, _ in found))
    return found


def _expert_ranks(request: PlanRequest, model: Model, ranks: int, tp: int) -> list[int]:
    """Numbers of ranks that experts can be divided among; beside tensor parallelism the most, or one."""
    fixed = request.fixed_mesh.get("ep")
    if fixed is not None:
        return [fixed]
    count = _experts(model)
    found = [ep for ep in _divisors(min(count, request.cluster.gpus_per_node)) if count % ep == 0]
    if tp > 1:
        found = sorted({1, found[-1]})
    return [ep for ep in found if ranks % ep == 0]


def _experts(model: Model) -> int:
    """Experts of a layer; 1 if it has none."""
    shapes = _expert_shapes(model)
    return shapes[0][0] if shapes else 1


def _expert_shapes(model: Model) -> list[tuple[int, ...]]:
    """Of one layer's stacked experts."""
    modules = [model.module.get_submodule(fqn) for fqn in model.experts[:1]]
    return [tuple(parameter.shape) for module in modules for parameter in module.parameters()]


def _expert_shards(model: Model, mesh: MeshSpec) -> tuple[str, ...]:
    """Ways to shard stacked experts: also along their hidden dimension, if there are too few of them."""
    count = _experts(model)
    if count == 1 or mesh.ep > 1 or count % mesh.fsdp_size == 0:
        return ("auto",)
    divides = all(width % mesh.fsdp_size == 0 for _, width, *_ in _expert_shapes(model))
    return ("auto", "hidden") if divides else ("auto",)


def _schedules(request: PlanRequest, model: Model, mesh: MeshSpec, micro_batches: int) -> tuple[Any, ...]:
    """One stage per rank, and two if layers and micro-batches divide accordingly; a backward whole, or in
    parts."""
    if mesh.pp == 1 or model.config is None:
        return ("1f1b",)
    rounds = micro_batches % max(1, micro_batches // mesh.pp) == 0
    found: list[Any] = ["1f1b", *(["zb1p"] if rounds else [])]
    if model.config.layers % (mesh.pp * 2) == 0:
        found += [one for one in _SEVERAL_STAGES if rounds or one == "zbv"]
    compiled = request.fixed_policy.get("compile", request.policy.compile)
    return tuple(one for one in found if not (compiled and schedule_rule(one).splits_backward))


def _sizes(request: PlanRequest, name: str) -> tuple[int, ...]:
    fixed = request.fixed_mesh.get(name)
    return (fixed,) if fixed is not None else tuple(_divisors(request.gpus))


def _fills_nodes(ranks: int, node: int) -> bool:
    return ranks % node == 0 or node % ranks == 0


def _divides(request: PlanRequest, model: Model, mesh: MeshSpec) -> bool:
    if request.global_batch % (mesh.dp_replicate * mesh.dp_shard):
        return False
    if mesh.pp > 1 and (model.config is None or model.config.layers % mesh.pp or mesh.pp > 16):
        return False
    policy: PolicySpec = replace(
        request.policy, **({"reshard": "never"} if mesh.pp > 1 else {"pp_end_layers": 0})
    )
    try:
        check_parallelism(model, mesh, policy)
    except ModelError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


_REPORT_EVERY = 500
_ABOUT_AS_FAST = 0.05
"""More time that a configuration may take to be chosen for its simplicity: two steps are predicted no closer
to each other than this (docs/accuracy.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A configuration with its memory and time: by the engine if ``confirmed``, otherwise by the fast
    path."""

    candidate: Candidate
    fast: Score
    """As the fast path has it, uncorrected."""
    reserved_bytes: int
    total_low_bytes: int
    """Including memory that no allocator counts, with every unknown at its low end."""
    total_bytes: int
    """The same at its high end."""
    step_ns: int
    exposed_ns: int
    bubble_ns: int
    host_ns: int
    """Waiting for a host that issues too slowly."""
    confirmed: bool = False
    depends_on: tuple[str, ...] = ()
    """Names of the unknowns that decide where between the two ends."""
    error_bytes: int = 0
    """By how much predictions of measured runs were too low, beyond the high end; 0 unless confirmed."""

    @property
    def range_fracs(self) -> tuple[float, float]:
        """How far the ends of the range are below and above the peak, as parts of it."""
        outside = self.fast.outside_bytes
        ends = self.total_low_bytes - outside, self.total_bytes - outside
        return 1 - ends[0] / self.reserved_bytes, ends[1] / self.reserved_bytes - 1

    @property
    def family(self) -> str:
        """Kinds of parallelism."""
        return family_of(self.candidate.mesh)


@dataclass
class Correction:
    """The ratio of the engine's numbers to the fast path's, on the configurations with both.

    A confirmed configuration has the engine's numbers. Any other is scaled by the ratio of the most
    similar confirmed one (tensor parallelism, checkpointing, resharding, sync), if there is one. The width
    of its peak's range is the confirmed one's even if nothing else is similar. The difference of their
    steps in communication, bubble and host is the search's.
    """

    known: dict[Candidate, Scored] = field(default_factory=dict)

    def learn(self, scored: Scored) -> None:
        """Note the engine's numbers of a configuration."""
        self.known[scored.candidate] = scored

    def apply(self, candidate: Candidate, fast: Score) -> Scored:
        """Return a configuration with the numbers to rank it by."""
        confirmed = self.known.get(candidate)
        if confirmed is not None:
            return confirmed
        best = self._most_like(candidate)
        step = 1.0 if best is None else best.step_ns / best.fast.step_ns
        memory = 1.0 if best is None else best.reserved_bytes / best.fast.reserved_bytes
        reserved = round(fast.reserved_bytes * memory)
        ranged = best or self._most_like(candidate, anywhere=True)
        below, above = (0.0, 0.0) if ranged is None else ranged.range_fracs
        exposed_ns, bubble_ns, host_ns = _idle_parts(fast, best, step)
        return Scored(
            candidate=candidate,
            fast=fast,
            reserved_bytes=reserved,
            total_low_bytes=reserved - round(below * reserved) + fast.outside_bytes,
            total_bytes=reserved + round(above * reserved) + fast.outside_bytes,
            depends_on=() if ranged is None else ranged.depends_on,
            step_ns=round(fast.step_ns * step),
            exposed_ns=exposed_ns,
            bubble_ns=bubble_ns,
            host_ns=host_ns,
        )

    def _most_like(self, candidate: Candidate, *, anywhere: bool = False) -> Scored | None:
        """Return the confirmed configuration that is most like a candidate, also of ``anywhere`` if
        allowed."""
        best = max(self.known.values(), key=lambda one: _likeness(one.candidate, candidate), default=None)
        return best if best is not None and (anywhere or _likeness(best.candidate, candidate)) else None


def _idle_parts(fast: Score, best: Scored | None, ratio: float) -> tuple[int, int, int]:
    """Exposed, bubble and host of a step: the engine's in the most similar configuration, plus the
    difference.

    If they were only scaled, the search's errors in both would go into the difference of the two.
    """
    mine = (fast.exposed_ns, fast.bubble_ns, fast.host_ns)
    exposed, bubble, host = (part * ratio for part in mine)
    if best is not None:
        exposed += best.exposed_ns - best.fast.exposed_ns * ratio
        bubble += best.bubble_ns - best.fast.bubble_ns * ratio
        host += best.host_ns - best.fast.host_ns * ratio
    exposed, bubble, host = max(0.0, exposed), max(0.0, bubble), max(0.0, host)
    fit = min(1.0, fast.step_ns * ratio / max(1.0, exposed + bubble + host))
    return round(exposed * fit), round(bubble * fit), round(host * fit)


def _likeness(one: Candidate, other: Candidate) -> int:
    if (one.mesh.tp, one.mesh.ep, one.mesh.pp > 1) != (other.mesh.tp, other.mesh.ep, other.mesh.pp > 1):
        return 0
    names = ("ac", "reshard", "sync", "batch_size", "offload", "pp_schedule")
    same: int = sum(getattr(one.policy, name) == getattr(other.policy, name) for name in names)
    return 1 + 2 * same + (one.mesh.fsdp_size == other.mesh.fsdp_size) + (one.mesh.cp == other.mesh.cp)


class Search:
    """Scores configurations and keeps the results for later queries."""

    def __init__(self, request: PlanRequest, fast: FastModel, correction: Correction) -> None:
        self.request = request
        self.fast = fast
        self.correction = correction
        self.scores: dict[Candidate, Score] = {}

    def add(self, found: Iterable[Candidate], progress: Callable[[int], None] | None = None) -> None:
        """Score candidates; ``progress`` gets their number so far from time to time."""
        for candidate in found:
            self.scores[candidate] = self.fast.score(candidate)
            if progress is not None and len(self.scores) % _REPORT_EVERY == 0:
                progress(len(self.scores))

    def all(self) -> list[Scored]:
        """Return every configuration, corrected by the engine's numbers."""
        return [self.correction.apply(candidate, score) for candidate, score in self.scores.items()]

    def fits(self, scored: Scored) -> bool:
        """Whether it leaves the requested headroom."""
        return scored.total_bytes <= self.request.limit_bytes


def ranked(request: PlanRequest, found: Iterable[Scored]) -> list[Scored]:
    """Order configurations by the objective, best first; those that do not fit come last, closest first."""

    def key(scored: Scored) -> tuple[bool, float, int]:
        fits = scored.total_bytes <= request.limit_bytes
        if not fits or request.objective == "memory":
            return (not fits, scored.total_bytes, scored.step_ns)
        return (False, scored.step_ns, scored.total_bytes)

    return sorted(found, key=key)


def simplest(found: Iterable[Scored], best: Scored, request: PlanRequest) -> Scored | None:
    """Return the configuration with the fewest kinds of parallelism that is about as fast as ``best``.

    If there are several, the fastest; None if none has fewer than ``best``.
    """
    slowest = best.step_ns * (1 + _ABOUT_AS_FAST)
    about = [one for one in found if one.total_bytes <= request.limit_bytes and one.step_ns <= slowest]
    fewest = min(about, key=lambda one: (_kinds(one), one.step_ns), default=best)
    return fewest if _kinds(fewest) < _kinds(best) else None


def _kinds(one: Scored) -> tuple[int, bool, bool]:
    """Kinds of parallelism beside FSDP, then replicas and offloading."""
    mesh = one.candidate.mesh
    kinds = sum(size > 1 for size in (mesh.tp, mesh.cp, mesh.pp, mesh.ep))
    return kinds, mesh.dp_replicate > 1, one.candidate.policy.offload


def pareto_front(found: Iterable[Scored]) -> list[Scored]:
    """Return the configurations that no other beats in both memory and speed, smallest first."""
    front: list[Scored] = []
    for scored in sorted(found, key=lambda one: (one.total_bytes, one.step_ns)):
        if not front or scored.step_ns < front[-1].step_ns:
            front.append(scored)
    return front


def by_mesh(found: Iterable[Scored]) -> Mapping[MeshSpec, list[Scored]]:
    """Group configurations by their mesh."""
    return grouped((scored.candidate.mesh, scored) for scored in found)
