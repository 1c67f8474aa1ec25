"""Optimizer state or activations in host memory, beside parameters on the device."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import About, Technique


class Offloading(Technique):
    """``offload``, ``offload_optimizer`` and ``offload_activations``; they are executed as they are."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse activations of a pipeline: torch's schedule runs the forwards."""
        if policy.offload_activations and mesh.pp > 1:
            raise ModelError("offload_activations under pipeline parallelism is not modelled: leave pp at 1")

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """What is on the host, and how it gets there."""
        if about == "memory" and policy.uses_host:
            yield "offload: host bytes are those of the tensors; pinned memory is rounded up to powers of two"
        if about == "memory" and policy.offload_optimizer:
            yield "optimizer state that is on the device for an update is counted among the temporaries"
        if about == "step" and policy.offload_optimizer:
            yield "optimizer state is copied to the device before each update and back after it, unhidden"
        if about == "step" and policy.offload_activations:
            yield (
                "activations are copied on the compute stream, as prime-rl does: trainers with a stream for "
                "them (torchtune, TRL) hide part of it"
            )
