"""Losses that do not have all logits at once, logits that a script keeps, and frozen models beside."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import ChunkedBlocks, ChunkedVocabulary
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import About, Technique


class Losses(Technique):
    """How the loss is computed of the hidden states (``loss``, ``keep_logits``, ``loss_parallel``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse chunked losses on a pipeline's last stage, and those that need a head that is divided."""
        if mesh.pp > 1 and policy.loss_in_pieces:
            raise ModelError(
                f"loss={policy.loss} on a pipeline's last stage is not modelled: use loss=full, which takes "
                "more"
            )
        plan = model.tensor_parallel
        if mesh.tp == 1 or plan is None:
            return
        if policy.loss == "fused" or isinstance(policy.loss, (ChunkedVocabulary, ChunkedBlocks)):
            whose = "Liger's kernel" if policy.loss == "fused" else "prime-rl's fused head"
            raise ModelError(
                f"loss={policy.loss}: {whose} needs the whole head, and tensor parallelism divides it: use "
                "loss=compiled, or chunked:8"
            )
        if policy.loss_in_pieces and model.config is not None and policy.loss_parallel is False:
            raise ModelError(
                f"loss={policy.loss} over gathered logits is not modelled for {model.name}: leave "
                "loss_parallel=false out"
            )
        if policy.loss in ("logprobs", "dpo") and plan.divides_logits(policy.loss_parallel):
            raise ModelError(
                f"loss={policy.loss} over logits that tensor parallelism divides is not modelled: "
                "gather them (loss_parallel=false)"
            )

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """The logits that are kept."""
        if about == "memory" and policy.keep_logits is not None:
            yield (
                "the script holds the logits "
                + ("in fp32 " if policy.keep_logits == "fp32" else "")
                + "through backward and until the next forward has made others"
            )
        if about == "memory" and policy.loss == "fused":
            yield "fused loss: chunked as by Liger's kernel; gradients of head and input are held"


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
        """The extra models that run, and how."""
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
