"""Batches other than plain sequences: images, and several documents in one sequence."""

from __future__ import annotations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import Technique


class Images(Technique):
    """Images in the batches (``images``, ``image_size``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse tensor parallelism, and a tower that no batch reaches beside gradients that accumulate."""
        if policy.images and mesh.tp > 1:
            raise ModelError("images: a vision tower under tensor parallelism is not modelled: leave tp at 1")
        idle = tuple(f"{fqn}." for fqn in model.idle)
        unreached = [fqn for fqn in model.towers if fqn.startswith(idle)]
        accumulates = policy.grad_accum > 1 and policy.sync == "last" and mesh.pp == 1
        if unreached and accumulates and not policy.images and "block" in policy.wrap:
            raise ModelError(
                f"no batch reaches {unreached[0]}, and FSDP2 fails to accumulate gradients over "
                "micro-batches beside a unit that was never gathered: add images=N, or sync=each, which "
                "reduces each time"
            )

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Bring images in its batches."""
        from fsdp2prof.estimators.models.images import with_images

        return with_images(model, policy)


class FusedAttention(Technique):
    """A fused attention stated for a model that would run its eager one (``attention``)."""

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Let it run the stated kernel."""
        from fsdp2prof.estimators.models.documents import with_fused_attention

        return with_fused_attention(model, policy)


class PackedDocuments(Technique):
    """Several documents in a sequence (``documents``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse context parallelism."""
        if mesh.cp > 1 and policy.documents is not None:
            raise ModelError("documents: torch's ring attention takes no documents: leave cp at 1")

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Keep the documents of its batches apart."""
        from fsdp2prof.estimators.models.documents import with_documents

        return with_documents(model, policy)
