"""``plan``: the configuration of a training that makes the most of a cluster, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.description import mesh_as_given, model_as_built, policy_as_given
from fsdp2prof.estimators.memory_fit import fit_sentence
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import LayerPattern, Model
from fsdp2prof.estimators.planner.budget import budget, room
from fsdp2prof.estimators.planner.confirm import Check, check_memory, check_step, confirmed
from fsdp2prof.estimators.planner.fast import FastModel
from fsdp2prof.estimators.planner.profile import measure, probes
from fsdp2prof.estimators.planner.reasons import why_it_lost
from fsdp2prof.estimators.planner.recipes import recipes
from fsdp2prof.estimators.planner.refine import REFINED, variants
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.estimators.planner.search import Correction, Scored, Search, pareto_front, ranked
from fsdp2prof.estimators.planner.space import candidates, meshes
from fsdp2prof.results.plan import (
    FastPathError,
    Plan,
    PlanFamily,
    PlanGiven,
    PlanPoint,
    PlanSearch,
)
from fsdp2prof.units import format_bytes, format_frac, format_ns, plural

__all__ = ["Call", "Engine", "Planning", "in_this_process", "make_plan", "run_one"]

_CONFIRMATIONS = 6
"""Configurations that the engine runs at most until one of them is the best."""
_CHANGES = ("ac", "batch_size", "sync", "reshard", "pp_schedule", *REFINED)


Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the engine and what it is given."""


class Engine(Protocol):
    """Runs the execution engine on several inputs, at once where there are processes for it."""

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        """Return what every call does, in order; a ``ModelError`` stands for what cannot run."""


def in_this_process(calls: Sequence[Call]) -> list[Any]:
    """The engine without processes."""
    return [run_one(call) for call in calls]


def run_one(call: Call) -> Any:
    """Return what a call does, or the ``ModelError`` that it raises."""
    function, item = call
    try:
        return function(item)
    except ModelError as error:
        return error


@dataclass
class Planning:
    """A search under way: what makes its result, also when it is interrupted."""

    request: PlanRequest
    engine: Engine = in_this_process
    progress: Callable[[str], None] = lambda _: None
    engine_runs: int = 0
    complete: bool = False
    fast: FastModel | None = None
    search: Search | None = None
    correction: Correction = field(default_factory=Correction)
    dropped: set[Candidate] = field(default_factory=set)
    refined: list[tuple[Scored, bool]] = field(default_factory=list)
    """Variants of the best that the engine ran, and whether they are only shown."""

    def run(self, *, refine: bool = False) -> None:
        """Search, confirm, and ``refine`` if asked. Raises ``ModelError`` for what cannot be fulfilled."""
        self.profile()
        self.find()
        self.confirm()
        if refine:
            self.refine()
        self.complete = True

    def refine(self) -> None:
        """Let the engine try on the best what the search does not see."""
        best = self.winner(ranked(self.request, self.all()))
        if best is None:
            return
        tried = variants(best.candidate, self.request)
        self.progress(f"trying {plural(len(tried), 'variant')} of {name_of(best.candidate)}")
        model, cluster = self.request.model, self.request.cluster
        checks = [Check(model=model, candidate=one.candidate, cluster=cluster) for one in tried]
        ran = self.ran([(check, one) for one in checks for check in (check_memory, check_step)])
        for one, memory, step in zip(tried, ran[::2], ran[1::2], strict=True):
            if not isinstance(memory, ModelError) and not isinstance(step, ModelError):
                scored = confirmed(one.candidate, best.fast, memory, step)
                self.refined.append((scored, one.only_shown))

    def profile(self) -> None:
        """Execute a few blocks for every way to divide one. Raises ``ModelError``."""
        request = self.request
        model = self.model()
        if model.pattern != LayerPattern():
            raise ModelError(
                f"plan: the blocks of {model.name} are not all alike, and the search takes them so"
            )
        found = list(meshes(request, model))
        if not found:
            raise ModelError(_no_mesh(request))
        wanted = probes(request, sorted({mesh.tp for mesh in found}), model)
        self.progress(f"executing a few blocks of {model.name} in {plural(len(wanted), 'way')}")
        profiles = {}
        for probe, profile in zip(wanted, self.ran([(measure, probe) for probe in wanted]), strict=True):
            if isinstance(profile, ModelError):
                raise profile
            profiles[probe.tp, str(probe.policy.ac)] = profile
        self.fast = FastModel(request, profiles, model)

    def find(self) -> None:
        """Score every configuration of the request. Raises ``ModelError`` if there is none."""
        assert self.fast is not None
        model = self.model()
        self.search = Search(self.request, self.fast, self.correction)
        for mesh in meshes(self.request, model):
            self.search.add(
                candidates(self.request, model, mesh),
                lambda count: self.progress(f"{count:,} configurations"),
            )
        if not self.search.scores:
            raise ModelError(_no_batch(self.request))
        if "offload" not in self.request.fixed_policy and self.winner(self.all()) is None:
            self.search.add([_offloaded(candidate) for candidate in list(self.search.scores)])

    def model(self) -> Model:
        """Build the model whole. Raises ``ModelError``."""
        policy = self.request.policy
        return build_model(self.request.model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)

    def ran(self, calls: Sequence[Call]) -> list[Any]:
        """Run the engine and count."""
        self.engine_runs += len(calls)
        return self.engine(calls)

    def confirm(self) -> None:
        """Let the engine run the best until the best is one that it ran."""
        assert self.search is not None
        for _ in range(_CONFIRMATIONS):
            found = ranked(self.request, self.all())
            best = self.winner(found) or self.perhaps(found)
            if best is None or best.confirmed:
                return
            self.progress(f"confirming {name_of(best.candidate)}")
            self._confirm(best)

    def winner(self, found: Sequence[Scored]) -> Scored | None:
        """Return the first of a ranking that surely fits."""
        return self._first(found, lambda one: one.total_bytes)

    def perhaps(self, found: Sequence[Scored]) -> Scored | None:
        """Return the first that may fit, by what is not known."""
        return self._first(found, lambda one: one.total_low_bytes)

    def _first(self, found: Sequence[Scored], size: Callable[[Scored], int]) -> Scored | None:
        return next((one for one in found if size(one) <= self.request.limit_bytes), None)

    def _confirm(self, one: Scored) -> None:
        assert self.search is not None
        check = Check(model=self.request.model, candidate=one.candidate, cluster=self.request.cluster)
        memory, step = self.ran([(check_memory, check), (check_step, check)])
        if isinstance(memory, ModelError) or isinstance(step, ModelError):
            self.dropped.add(one.candidate)
        else:
            self.correction.learn(confirmed(one.candidate, one.fast, memory, step))

    def all(self) -> list[Scored]:
        """Return every configuration that the engine did not refuse."""
        if self.search is None:
            return []
        found = [scored for scored in self.search.all() if scored.candidate not in self.dropped]
        return [*found, *(scored for scored, only_shown in self.refined if not only_shown)]

    def plan(self) -> Plan:
        """Return the result of what was searched so far. Raises ``ModelError`` if that is nothing."""
        found = ranked(self.request, self.all())
        if not found:
            raise ModelError("plan: interrupted before the first configuration was scored")
        request = self.request
        fitting = [one for one in found if one.total_bytes <= request.limit_bytes]
        winner = self.winner(found) or self.perhaps(found)
        shown = [scored for scored, only_shown in self.refined if only_shown]
        model = self.model()
        parameters = sum(parameter.numel() for parameter in model.module.parameters())
        point = None if winner is None else _point(winner, request)
        plan = Plan(
            model=model_as_built(model, parameters),
            given=_given(request),
            verdict=[],
            winner=point,
            families=_families(found, winner, request),
            changes=[] if winner is None else _changes([*found, *shown], winner, request),
            pareto=[_point(one, request) for one in pareto_front(fitting)],
            answer=budget(point, request),
            recipes=[] if winner is None else recipes(request, winner.candidate),
            search=PlanSearch(
                configurations=len(found),
                fitting=len(fitting),
                engine_runs=self.engine_runs,
                complete=self.complete,
                error=self._error(),
            ),
            assumptions=_assumptions(request),
        )
        return replace(plan, verdict=_verdict(plan, winner, found[0], request))

    def _error(self) -> FastPathError:
        known = list(self.correction.known.values())
        steps = [one.fast.step_ns / one.step_ns - 1 for one in known]
        sizes = [one.fast.reserved_bytes / one.reserved_bytes - 1 for one in known]
        return FastPathError(
            configurations=len(known),
            step_low_frac=min(steps, default=None),
            step_high_frac=max(steps, default=None),
            memory_low_frac=min(sizes, default=None),
            memory_high_frac=max(sizes, default=None),
        )


def make_plan(
    request: PlanRequest,
    *,
    engine: Engine = in_this_process,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Search the configurations of a request, confirm the best by the engine, and say why the others lost.

    Raises ``ModelError`` for a model, mesh or batch that no configuration can fulfil.
    """
    planning = Planning(request=request, engine=engine, progress=progress)
    planning.run()
    return planning.plan()


def name_of(candidate: Candidate) -> str:
    """Say mesh and policy in short: ``dp_shard=256, batch 1 x 4, ac=op``."""
    policy = candidate.policy
    parts = [str(candidate.mesh).replace(",", " "), f"batch {policy.batch_size}x{policy.grad_accum}"]
    parts.append(f"ac={policy.ac}")
    if policy.grad_accum > 1 and policy.sync == "each":
        parts.append("sync=each")
    if policy.reshard != "default":
        parts.append(f"reshard={policy.reshard}")
    prefetched = [name for name in ("forward_prefetch", "backward_prefetch") if getattr(policy, name)]
    parts += [f"{name}={getattr(policy, name)}" for name in prefetched]
    if policy.stages_per_rank > 1:
        parts.append(str(policy.pp_schedule))
    if policy.offload:
        parts.append("offload")
    return ", ".join(parts)


def _offloaded(candidate: Candidate) -> Candidate:
    return replace(candidate, policy=replace(candidate.policy, offload=True))


def _point(one: Scored, request: PlanRequest) -> PlanPoint:
    mesh, policy = one.candidate.mesh, one.candidate.policy
    seconds = one.step_ns / 1e9
    tokens = request.global_batch * policy.seq_len
    speed = tokens / seconds
    peak = request.cluster.hardware.flops.get(policy.compute_dtype)
    hours = request.gpus * 1e9 / speed / 3600
    price = request.price_per_gpu_hour
    return PlanPoint(
        family=one.family,
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        name=name_of(one.candidate),
        reserved_bytes=one.reserved_bytes,
        total_low_bytes=one.total_low_bytes,
        total_bytes=one.total_bytes,
        headroom_bytes=request.limit_bytes - one.total_bytes,
        fit=room(one, request).fit,
        depends_on=list(one.depends_on) if room(one, request).fit == "depends" else [],
        step_ns=one.step_ns,
        exposed_ns=one.exposed_ns,
        exposed_frac=one.exposed_ns / one.step_ns,
        bubble_ns=one.bubble_ns,
        tokens_per_s=speed,
        tokens_per_s_per_gpu=speed / request.gpus,
        mfu=None if peak is None else one.fast.model_flops / seconds / peak,
        gpu_hours_per_billion_tokens=hours,
        cost_per_billion_tokens=None if price is None else price * hours,
        confirmed=one.confirmed,
    )


def _families(found: Sequence[Scored], winner: Scored | None, request: PlanRequest) -> list[PlanFamily]:
    groups: dict[str, list[Scored]] = {}
    for one in found:  # the best first
        groups.setdefault(one.family, []).append(one)
    return [_family(name, members, winner, request) for name, members in groups.items()]


def _family(name: str, members: Sequence[Scored], winner: Scored | None, request: PlanRequest) -> PlanFamily:
    best = members[0]
    return PlanFamily(
        name=name,
        best=_point(best, request),
        configurations=len(members),
        fitting=sum(one.total_bytes <= request.limit_bytes for one in members),
        why=why_it_lost(best, winner, request),
    )


def _changes(found: Sequence[Scored], winner: Scored, request: PlanRequest) -> list[PlanFamily]:
    """The winner with one option or one mesh dimension of another size, each at its best."""
    groups: dict[tuple[str, object], list[Scored]] = {}
    own = winner.candidate
    for one in found:
        if one.candidate.mesh == own.mesh:
            differs = _differences(one.candidate, own)
            if len(differs) == 1:
                groups.setdefault((differs[0], getattr(one.candidate.policy, differs[0])), []).append(one)
        else:
            for name in ("tp", "cp", "pp", "dp_replicate"):
                size = getattr(one.candidate.mesh, name)
                if size != getattr(own.mesh, name) and _alike_otherwise(one.candidate, own, name):
                    groups.setdefault((name, size), []).append(one)
    return [_family(f"{name}={value}", members, winner, request) for (name, value), members in groups.items()]


def _differences(one: Candidate, other: Candidate) -> list[str]:
    """Options that differ; the accumulation follows from the batch."""
    names = [name for name in _CHANGES if getattr(one.policy, name) != getattr(other.policy, name)]
    if "batch_size" in names and 1 in (one.policy.grad_accum, other.policy.grad_accum):
        names = [name for name in names if name != "sync"]
    return names


def _alike_otherwise(one: Candidate, other: Candidate, name: str) -> bool:
    names = [dim for dim in ("tp", "cp", "pp", "dp_replicate") if dim != name]
    return all(getattr(one.mesh, dim) == getattr(other.mesh, dim) for dim in names)


def _given(request: PlanRequest) -> PlanGiven:
    cluster = request.cluster
    fixed = {**request.fixed_mesh, **request.fixed_policy}
    several = request.gpus > cluster.gpus_per_node
    return PlanGiven(
        gpus=request.gpus,
        hardware=cluster.hardware.name,
        gpus_per_node=cluster.gpus_per_node,
        network=cluster.network.name if cluster.network is not None and several else None,
        global_batch=request.global_batch,
        seq_len=request.policy.seq_len,
        fixed={name: str(value) for name, value in fixed.items()},
        reserve_frac=request.reserve_frac,
        device_total_bytes=cluster.hardware.memory_bytes,
        limit_bytes=request.limit_bytes,
        objective=request.objective,
        price_per_gpu_hour=request.price_per_gpu_hour,
        tokens=request.tokens,
        budget_gpu_hours=request.budget_gpu_hours,
    )


def _verdict(plan: Plan, winner: Scored | None, best: Scored, request: PlanRequest) -> list[str]:
    point = plan.winner
    if point is None or winner is None:
        over = format_bytes(best.total_bytes - request.limit_bytes)
        return [
            f"Nothing fits: of {plan.search.configurations:,} configurations the smallest, "
            f"{name_of(best.candidate)}, is {over} over."
        ]
    mfu = "" if point.mfu is None else f", MFU {format_frac(point.mfu)}"
    lines = [
        f"{point.name}: {point.tokens_per_s:,.0f} tokens/s, a step takes {format_ns(point.step_ns)}{mfu}.",
        f"It takes {format_bytes(point.total_low_bytes)} to {format_bytes(point.total_bytes)} of "
        f"{format_bytes(plan.given.device_total_bytes)} on each GPU, and {format_frac(point.exposed_frac)} "
        f"of its step is exposed communication. {fit_sentence(room(winner, request))}",
    ]
    others = [family for family in plan.families if family.best.name != point.name]
    if others:
        second = others[0]
        place = "Next best" if second.best.step_ns >= point.step_ns else "Perhaps faster"
        lines.append(f"{place}, {second.best.family} ({second.best.name}): {second.why}.")
    return lines


def _assumptions(request: PlanRequest) -> list[str]:
    return [
        "the search scores every configuration from shallow executions of the engine; the winner is "
        "confirmed by the engine itself, and what it says corrects the configurations most like it",
        f"a configuration fits if its reserved peak, with all that is not known at the high end of its range "
        f"(what no allocator counts; the allocator, unless it is said), leaves {request.reserve_frac:.0%} of "
        "the device free; one that may not is chosen only where none surely does",
        "meshes keep tensor parallelism inside a node unless it is fixed; replicas are whole nodes or a "
        "part of one",
        *request.cluster.hardware.assumed(),
        *_network(request),
    ]


def _network(request: PlanRequest) -> list[str]:
    network = request.cluster.network
    if network is None or request.gpus <= request.cluster.gpus_per_node:
        return []
    return [f"network {network.name}: {network.source}"]


def _no_mesh(request: PlanRequest) -> str:
    fixed = ", ".join(f"{name}={size}" for name, size in request.fixed_mesh.items())
    given = f" with {fixed}" if fixed else ""
    return (
        f"plan: no mesh of {request.gpus} GPUs{given} divides the model, a sequence of "
        f"{request.policy.seq_len} and a global batch of {request.global_batch}"
    )


def _no_batch(request: PlanRequest) -> str:
    fixed = ", ".join(f"{name}={value}" for name, value in request.fixed_policy.items())
    return f"plan: a global batch of {request.global_batch} cannot be divided on any mesh with {fixed}"
