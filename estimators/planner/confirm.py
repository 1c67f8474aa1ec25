"""A configuration's numbers by the execution engine itself, the same as ``estimate`` prints for it."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.planner.fast import Score
from fsdp2prof.estimators.planner.request import Candidate
from fsdp2prof.estimators.planner.search import Scored
from fsdp2prof.estimators.spec.cluster import Cluster
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.step import StepFigures, step_figures

__all__ = ["Check", "EngineMemory", "check_memory", "check_step", "confirmed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A configuration to run through the engine."""

    model: ModelSpec
    candidate: Candidate
    cluster: Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The peak of a rank."""

    reserved_bytes: int
    outside_bytes: int
    """That no allocator counts, at the high end of its range."""


def check_memory(check: Check) -> EngineMemory:
    """Execute a configuration for its memory. Raises ``ModelError`` for what cannot be run."""
    one = check.candidate
    made = estimate_memory(check.model, one.mesh, one.policy, hardware=check.cluster.hardware)
    return EngineMemory(
        reserved_bytes=made.peak.reserved_bytes, outside_bytes=made.outside_allocator_bytes.high
    )


def check_step(check: Check) -> StepFigures:
    """Execute a configuration for its step time. Raises ``ModelError`` for what cannot be run."""
    return step_figures(check.model, check.candidate.mesh, check.candidate.policy, check.cluster)


def confirmed(candidate: Candidate, fast: Score, memory: EngineMemory, step: StepFigures) -> Scored:
    """Return a configuration with the engine's numbers."""
    return Scored(
        candidate=candidate,
        fast=fast,
        reserved_bytes=memory.reserved_bytes,
        total_bytes=memory.reserved_bytes + memory.outside_bytes,
        step_ns=step.step_ns,
        exposed_ns=step.exposed_ns,
        bubble_ns=step.bubble_ns,
        confirmed=True,
    )
