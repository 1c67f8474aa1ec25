"""Frozen models that run forward only beside the trained one: what they go with, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import About, Technique


class SecondModels(Technique):
    """References, reward models, and the trained model itself (``extra_model``, ``loss=dpo``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a pipeline, and tensor parallelism by other than the built-in plan."""
        if policy.extra_model is None:
            return
        if mesh.pp > 1:
            raise ModelError("a second model (extra_model) beside a pipeline is not modelled: leave pp at 1")
        if mesh.tp > 1 and model.tensor_parallel is not None and not model.tensor_parallel.is_analysed:
            raise ModelError(
                "tensor parallelism with a second model (extra_model) is modelled for dense built-ins only"
            )

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """What runs, and with what."""
        for extra in policy.other_models:
            yield (
                f"{extra.source} ({extra.role}) runs forward only, without gradients, before each "
                "micro-batch; sharded as the trained model is"
            )
        if policy.runs_itself_before:
            left_out = "" if policy.lora is None else ", its adapters left out"
            yield f"the trained model runs forward without gradients before each micro-batch{left_out}"
        if policy.loss == "dpo":
            known = "; the reference's log-probabilities are known before" * (policy.extra_model is None)
            yield f"dpo: a micro-batch is 2 x batch_size sequences, chosen and rejected in one forward{known}"
