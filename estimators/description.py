"""The configuration of an estimate, as its result reports it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.results.estimate import EstimatedMesh, EstimatedModel, EstimatedPolicy


def model_as_built(built: Model, parameters: int) -> EstimatedModel:
    """Describe a model of ``parameters`` elements."""
    return EstimatedModel(name=built.name, parameters=parameters, blocks=len(built.blocks))


def mesh_as_given(mesh: MeshSpec) -> EstimatedMesh:
    """Describe a mesh."""
    return EstimatedMesh(**asdict(mesh), world_size=mesh.world_size)


def policy_as_given(policy: PolicySpec) -> EstimatedPolicy:
    """Describe a policy: every option as it was checked and completed."""
    return EstimatedPolicy(policy.to_mapping())


def policy_as_recorded(**known: Any) -> EstimatedPolicy:
    """Describe the policy that a recorded run reports; the other options are None."""
    return EstimatedPolicy({**dict.fromkeys(options_of(PolicySpec)), **known})
