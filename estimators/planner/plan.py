"""``plan``: the configuration of a training that makes the most of a cluster, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.confirm import (
    Check,
    OtherPrecision,
    Variant,
    check_memory,
    check_step,
    confirmed,
    in_other_precisions,
    other_precisions,
    prefetches,
    prefetching_can_matter,
    variants,
)
from fsdp2prof.estimators.planner.fast import FastModel, Score
from fsdp2prof.estimators.planner.outcome import fast_path_error, name_of, outcome
from fsdp2prof.estimators.planner.profile import measure, probes, repeated_kinds
from fsdp2prof.estimators.planner.request import Call, Candidate, Engine, PlanRequest, in_this_process
from fsdp2prof.estimators.planner.search import (
    Correction,
    Scored,
    Search,
    candidates,
    meshes,
    ranked,
    simplest,
)
from fsdp2prof.results.plan import Plan, PlanSearch
from fsdp2prof.units import plural

_CONFIRMATIONS = 6
"""Configurations that the engine runs at most until one of them is the best."""


@dataclass
class Planning:
    """A search in progress: the data of its result, also when it is interrupted."""

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
    precisions: list[OtherPrecision] = field(default_factory=list)
    simplest: Scored | None = None
    """Configuration with fewer kinds of parallelism that is about as fast as the best."""
    notes: list[str] = field(default_factory=list)
    """Options that were tried in addition to the search, and those that were not."""

    def run(self, *, refine: bool = False) -> None:
        """Search, confirm, and ``refine`` if requested. Raises ``ModelError`` for a request that cannot be
        met."""
        self.profile()
        self.find()
        self.confirm()
        self.prefetch(refine=refine)
        self.other_precisions()
        if refine:
            self.refine()
        self.simplify()
        self.complete = True

    def prefetch(self, *, refine: bool = False) -> None:
        """Let the engine try explicit prefetching on the best configuration, if it can matter or to
        ``refine``."""
        best = self._best_that_fits()
        tried = [] if best is None else prefetches(best.candidate, self.request)
        if best is None or not tried:
            return
        names = ", ".join(name_of(one.candidate).rpartition(", ")[2] for one in tried)
        kinds = len(repeated_kinds(self.model()))
        if not refine and not prefetching_can_matter(best, kinds):
            self.notes.append(
                f"explicit prefetching ({names}) was not tried: the host runs ahead, and blocks are alike or "
                "hide what they gather, so FSDP2 alone begins each gather as early (--refine tries it)"
            )
            return
        self.progress(f"trying prefetching on {name_of(best.candidate)}")
        steps = self.ran([(check_step, self._check(one.candidate)) for one in tried])
        faster = [
            one
            for one, step in zip(tried, steps, strict=True)
            if not isinstance(step, ModelError) and (refine or step.step_ns < best.step_ns)
        ]
        self._try(faster, best)
        won = any(one.step_ns < best.step_ns for one, _ in self.refined)
        self.notes.append(
            f"explicit prefetching ({names}) was tried by the engine on the winner"
            + ("" if won else ": no depth is faster")
        )

    def refine(self) -> None:
        """Let the engine try options that the search does not see on the best configuration, and confirm
        other precisions."""
        best = self._best_that_fits()
        if best is None:
            return
        tried = variants(best.candidate, self.request)
        self.progress(f"trying {plural(len(tried), 'variant')} of {name_of(best.candidate)}")
        self._try(tried, best)
        for index, one in enumerate(self.precisions):
            self.progress(f"confirming {name_of(one.best.candidate)}")
            made = self._confirmed(one.best.candidate, one.best.fast)
            if made is not None:
                self.precisions[index] = replace(one, best=made)

    def simplify(self) -> None:
        """Find a configuration with fewer kinds of parallelism than the best that is about as fast.

        The engine has to say so: the search's error is larger than the difference.
        """
        best = self._best_that_fits()
        for _ in range(_CONFIRMATIONS if best is not None and self.request.objective != "memory" else 0):
            assert best is not None
            one = simplest(ranked(self.request, self.all()), best, self.request)
            if one is None or one.confirmed:
                self.simplest = one
                return
            self.progress(f"confirming {name_of(one.candidate)}")
            self._confirm(one)

    def _best_that_fits(self) -> Scored | None:
        best = self.chosen(ranked(self.request, self.all()))
        return None if best is None or best.total_bytes > self.request.limit_bytes else best

    def _try(self, tried: Sequence[Variant], best: Scored) -> None:
        """Note the engine's results for variants of the best; variants that cannot run are left out."""
        made = [self._confirmed(one.candidate, best.fast) for one in tried]
        self.refined += [
            (scored, one.only_shown) for one, scored in zip(tried, made, strict=True) if scored is not None
        ]

    def _check(self, candidate: Candidate) -> Check:
        return Check(model=self.request.model, candidate=candidate, cluster=self.request.cluster)

    def _confirmed(self, candidate: Candidate, fast: Score) -> Scored | None:
        """Return a configuration with the engine's numbers; ``None`` if it cannot run."""
        check = self._check(candidate)
        memory, step = self.ran([(check_memory, check), (check_step, check)])
        if isinstance(memory, ModelError) or isinstance(step, ModelError):
            return None
        return confirmed(candidate, fast, memory, step)

    def profile(self) -> None:
        """Execute a few blocks for every way to divide one. Raises ``ModelError``."""
        request = self.request
        model = self.model()
        found = list(meshes(request, model))
        if not found:
            raise ModelError(_no_mesh(request, model))
        wanted = probes(request, sorted({(mesh.tp, mesh.ep) for mesh in found}), model)
        self.progress(f"executing a few blocks of {model.name} in {plural(len(wanted), 'way')}")
        profiles = {}
        for probe, profile in zip(wanted, self.ran([(measure, probe) for probe in wanted]), strict=True):
            if isinstance(profile, ModelError):
                raise profile
            profiles[probe.tp, probe.ep, str(probe.policy.ac)] = profile
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
        """Let the engine run the best configuration, until the best is one that it has run."""
        assert self.search is not None
        for _ in range(_CONFIRMATIONS):
            found = ranked(self.request, self.all())
            best = self.winner(found) or self.perhaps(found)
            if best is None or best.confirmed:
                return
            self.progress(f"confirming {name_of(best.candidate)}")
            self._confirm(best)

    def other_precisions(self) -> None:
        """Find the best of the search in each precision that changes the training's numbers."""
        assert self.search is not None
        self.progress("other precisions")
        self.precisions = other_precisions(self.request, self.search, frozenset(self.dropped))

    def winner(self, found: Sequence[Scored]) -> Scored | None:
        """Return the first of a ranking that surely fits."""
        return self._first(found, lambda one: one.total_bytes)

    def perhaps(self, found: Sequence[Scored]) -> Scored | None:
        """Return the first that may fit, given the unknowns."""
        return self._first(found, lambda one: one.total_low_bytes)

    def chosen(self, found: Sequence[Scored]) -> Scored | None:
        """Return the best of a ranking that the engine ran, otherwise of the search; those that certainly
        fit first."""
        ran = [one for one in found if one.confirmed]
        return self.winner(ran) or self.winner(found) or self.perhaps(ran) or self.perhaps(found)

    def _first(self, found: Sequence[Scored], size: Callable[[Scored], int]) -> Scored | None:
        return next((one for one in found if size(one) <= self.request.limit_bytes), None)

    def _confirm(self, one: Scored) -> None:
        made = self._confirmed(one.candidate, one.fast)
        if made is None:
            self.dropped.add(one.candidate)
        else:
            self.correction.learn(made)

    def all(self) -> list[Scored]:
        """Return every configuration that the engine did not refuse."""
        if self.search is None:
            return []
        found = [scored for scored in self.search.all() if scored.candidate not in self.dropped]
        return [*found, *(scored for scored, only_shown in self.refined if not only_shown)]

    def plan(self) -> Plan:
        """Return the result of the search so far. Raises ``ModelError`` if there is none."""
        found = ranked(self.request, self.all())
        if not found:
            raise ModelError("plan: interrupted before the first configuration was scored")
        limit = self.request.limit_bytes
        best = self.chosen(found)
        shown = [scored for scored, only_shown in self.refined if only_shown]
        if self.precisions and self.search is not None and best is not None:
            shown += in_other_precisions(self.request, self.search, best.candidate)
        return outcome(
            self.request,
            self.model(),
            found,
            shown,
            self.precisions,
            self.notes,
            best,
            None if best is None or self.simplest is None else simplest(found, best, self.request),
            PlanSearch(
                configurations=len(found),
                fitting=sum(one.total_bytes <= limit for one in found),
                engine_runs=self.engine_runs,
                complete=self.complete,
                error=fast_path_error(list(self.correction.known.values())),
            ),
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


def _offloaded(candidate: Candidate) -> Candidate:
    return replace(candidate, policy=replace(candidate.policy, offload=True))


def _no_mesh(request: PlanRequest, model: Model) -> str:
    fixed = ", ".join(f"{name}={size}" for name, size in request.fixed_mesh.items())
    given = f" with {fixed}" if fixed else ""
    said = (
        f"plan: no mesh of {request.gpus} GPUs{given} divides the model, a sequence of "
        f"{request.policy.seq_len} and a global batch of {request.global_batch}"
    )
    others = meshes(replace(request, global_batch=request.gpus), model)
    ranks = sorted({mesh.dp_replicate * mesh.dp_shard for mesh in others})
    if not ranks:
        return said  # whatever the batch
    return (
        f"{said}: give a global batch that is a multiple of {ranks[0]}, the fewest data-parallel ranks here"
    )


def _no_batch(request: PlanRequest) -> str:
    fixed = ", ".join(f"{name}={value}" for name, value in request.fixed_policy.items())
    return f"plan: a global batch of {request.global_batch} cannot be divided on any mesh with {fixed}"
