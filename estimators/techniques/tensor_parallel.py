"""What tensor parallelism asks of a model and a policy."""

from __future__ import annotations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import values_of
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import Technique


class TensorParallelism(Technique):
    """The ranks of ``tp``, by the model's own plan."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a model that has no plan, or one that does not divide it."""
        if mesh.tp == 1:
            return
        plan = model.tensor_parallel
        if plan is None:
            raise ModelError(f"mesh: tp={mesh.tp}: {model.name} {model.no_tensor_parallel}")
        if mesh.ep > 1:
            plan = plan.with_experts_apart(model.experts)
        if refusal := plan.refusal(mesh.tp):
            raise ModelError(f"mesh: {refusal}")
        if any(isinstance(value, int) for value in values_of(policy.reshard)):
            raise ModelError("reshard to a number of ranks is not supported by FSDP2 with tensor parallelism")
