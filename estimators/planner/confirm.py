"""A configuration's numbers by the execution engine itself, the same as ``estimate`` prints for it.

Options that the search does not score, tried on the best configuration by the engine.

Explicit prefetching changes only the order of work: it is tried where it can matter, and the best result
wins. A compiler changes a training's code, float8 its numerics: their gains are shown, and they win only
if they are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.planner.fast import Score
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.estimators.planner.search import Scored, Search, ranked
from fsdp2prof.estimators.step import StepFigures, step_figures
from fsdp2prof.estimators.techniques.pipeline import micro_batches_under_way
from fsdp2prof.estimators.techniques.pipeline_order import neighbours_of
from fsdp2prof.estimators.verdict.memory_fit import deciding, prediction_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A configuration to run through the engine."""

    model: ModelSpec
    candidate: Candidate
    cluster: Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The peak of one rank."""

    reserved_bytes: int
    total_low_bytes: int
    """Including memory that no allocator counts, with every unknown at its low end."""
    total_bytes: int
    """The same at its high end."""
    depends_on: tuple[str, ...]
    """Names of the unknowns that decide where between the two."""
    error_bytes: int
    """By how much predictions of measured runs were too low, beyond the high end."""


def check_memory(check: Check) -> EngineMemory:
    """Execute a configuration for its memory; for a pipeline with one micro-batch more than are in flight.

    Later micro-batches add the buffer in which their gradient is received. Raises ``ModelError`` for a
    configuration that cannot run.
    """
    mesh, policy = check.candidate.mesh, check.candidate.policy
    later = _not_executed(mesh, policy) if mesh.pp > 1 else 0
    executed = replace(policy, grad_accum=policy.grad_accum - later)
    made = estimate_memory(check.model, mesh, executed, hardware=check.cluster.hardware)
    more = later * _received_bytes(check)
    assert made.headroom_bytes is not None
    assert made.headroom_high_bytes is not None
    filled = check.cluster.hardware.memory_bytes + more
    return EngineMemory(
        reserved_bytes=made.peak.reserved_bytes + more,
        total_low_bytes=filled - made.headroom_high_bytes,
        total_bytes=filled - made.headroom_bytes,
        depends_on=deciding(made.unknowns),
        error_bytes=prediction_errors(made.unknowns)[0],
    )


def _not_executed(mesh: MeshSpec, policy: PolicySpec) -> int:
    """Micro-batches of a pipeline beyond those under way; whole rounds where a rank has several stages.

    None where the schedule keeps another number under way with fewer of them.
    """
    most = micro_batches_under_way(mesh, policy)
    enough = most.alive + 1
    if policy.stages_per_rank > 1:
        enough = -(-enough // mesh.pp) * mesh.pp if policy.grad_accum % mesh.pp == 0 else policy.grad_accum
    if enough >= policy.grad_accum:
        return 0
    same = micro_batches_under_way(mesh, replace(policy, grad_accum=enough)) == most
    return policy.grad_accum - enough if same else 0


def _received_bytes(check: Check) -> int:
    """Of the buffers that a pipeline's rank keeps for each micro-batch: one between two stages."""
    mesh, policy = check.candidate.mesh, check.candidate.policy
    config = build_model(check.model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype).config
    width = 0 if config is None else config.dim
    tokens = policy.batch_size * (policy.seq_len // mesh.cp // mesh.tp)
    buffers = sum(neighbours_of(policy.pp_schedule, mesh.pp, policy.pp_stage))
    return buffers * tokens * width * dtype_bytes(policy.compute_dtype)


def check_step(check: Check) -> StepFigures:
    """Execute a configuration for its step time. Raises ``ModelError`` for a configuration that cannot
    run."""
    return step_figures(check.model, check.candidate.mesh, check.candidate.policy, check.cluster)


def confirmed(candidate: Candidate, fast: Score, memory: EngineMemory, step: StepFigures) -> Scored:
    """Return a configuration with the engine's numbers."""
    return Scored(
        candidate=candidate,
        fast=fast,
        reserved_bytes=memory.reserved_bytes,
        total_low_bytes=memory.total_low_bytes,
        total_bytes=memory.total_bytes,
        depends_on=memory.depends_on,
        error_bytes=memory.error_bytes,
        step_ns=step.step_ns,
        exposed_ns=step.exposed_ns,
        bubble_ns=step.bubble_ns,
        host_ns=step.idle_ns,
        confirmed=True,
    )


REFINED = ("forward_prefetch", "backward_prefetch", "reduce_dtype", "float8", "compile")
"""Options that are tried."""

_DEPTHS: dict[str, tuple[Any, ...]] = {"forward_prefetch": (1, 2), "backward_prefetch": (2,)}
_LEAST_FRAC = 0.005
"""Share of a step that is worth an execution."""
_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed in a configuration."""

    candidate: Candidate
    only_shown: bool
    """It changes the training's numbers or code."""


def prefetches(best: Candidate, request: PlanRequest) -> list[Variant]:
    """Return a configuration with explicit prefetching of other depths, if no depth is fixed."""
    gathers = best.mesh.fsdp_size > 1 and best.mesh.pp == 1
    if not gathers or any(name in request.fixed_policy for name in _DEPTHS):
        return []
    return [
        Variant(replace(best, policy=replace(best.policy, **{name: depth})), only_shown=False)
        for name, depths in _DEPTHS.items()
        for depth in depths
    ]


def prefetching_can_matter(best: Scored, kinds: int) -> bool:
    """Whether a gather may begin earlier than FSDP2's default.

    It may if the host is late, or if blocks of several kinds let a long gather overlap more than one
    block. Otherwise the host runs ahead, and the next gather begins when the previous one has been copied
    out.
    """
    least = _LEAST_FRAC * best.step_ns
    return best.host_ns > least or (kinds > 1 and best.exposed_ns > least)


def variants(best: Candidate, request: PlanRequest) -> list[Variant]:
    """Return further options to try on a configuration, without those that are fixed or already set."""
    tried: dict[str, Any] = {}
    if not best.policy.compile:
        tried["compile"] = True
    elif request.cluster.hardware.flops.get(_FLOAT8):
        tried["float8"] = "tensorwise"
    return [
        Variant(replace(best, policy=replace(best.policy, **{name: value})), only_shown=True)
        for name, value in tried.items()
        if name not in request.fixed_policy and getattr(best.policy, name) != value
    ]


_PRECISIONS: Mapping[str, Any] = {"reduce_dtype": "bfloat16", "orig_dtype": "bfloat16"}
"""Gradients reduced, or shards, gradients and optimizer state kept, in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPrecision:
    """The best configuration with one option of another precision."""

    option: str
    value: str
    best: Scored
    configurations: int
    """Scored to find it."""


def other_precisions(
    request: PlanRequest, search: Search, dropped: frozenset[Candidate]
) -> list[OtherPrecision]:
    """Return the best of a search in each other precision that is not fixed; ``dropped`` cannot run."""
    base = [scored for scored in search.all() if scored.candidate not in dropped]
    base.sort(key=_least_ns)
    found = []
    for option, value in _PRECISIONS.items():
        if option in request.fixed_policy:
            continue
        other = [one for one in base if getattr(one.candidate.policy, option) != value]
        made = _scored(request, search, other, {option: value})
        if made:
            best = ranked(request, made)[0]
            found.append(OtherPrecision(option=option, value=value, best=best, configurations=len(made)))
    return found


def in_other_precisions(request: PlanRequest, search: Search, one: Candidate) -> list[Scored]:
    """Return a configuration in each other precision that is not fixed."""
    found = []
    for option, value in _PRECISIONS.items():
        if option not in request.fixed_policy and getattr(one.policy, option) != value:
            candidate = replace(one, policy=replace(one.policy, **{option: value}))
            found.append(search.correction.apply(candidate, search.fast.score(candidate)))
    return found


def _scored(
    request: PlanRequest, search: Search, base: Sequence[Scored], changes: Mapping[str, Any]
) -> list[Scored]:
    """Score, in another precision, every configuration that could be the best."""
    made: list[Scored] = []
    fastest = float("inf")
    policies: dict[PolicySpec, PolicySpec] = {}  # meshes share them, and each is checked when it is made
    for one in base:
        if _least_ns(one) >= fastest and request.objective != "memory":
            break
        policy = one.candidate.policy
        if policy not in policies:
            policies[policy] = replace(policy, **changes)
        candidate = Candidate(one.candidate.mesh, policies[policy])
        scored = search.correction.apply(candidate, search.fast.score(candidate))
        made.append(scored)
        if scored.total_bytes <= request.limit_bytes:
            fastest = min(fastest, scored.step_ns)
    return made


def _least_ns(one: Scored) -> float:
    """Return the shortest that its step takes in any precision of shards and gradients."""
    return one.fast.least_ns * one.step_ns / max(1, one.fast.step_ns)
