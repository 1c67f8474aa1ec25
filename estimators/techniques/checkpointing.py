"""Activation checkpointing as an estimate of memory states it; :mod:`.recomputation` does it."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.techniques.technique import About, Technique


class Checkpointing(Technique):
    """The tensors that blocks save for their backward (``ac`` and options that extend ``ac=op``)."""

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """Tensors saved and recomputed in addition to the rule."""
        if about != "memory":
            return
        if policy.ac == "children":
            yield (
                "each child module of a block is checkpointed on its own, as by accelerate's "
                "fsdp_activation_checkpointing before 1.15: the inputs of all are saved; ac=full saves the "
                "block's alone"
            )
        if policy.recomputes_attention:
            yield "operator-selective checkpointing recomputes attention, too"
        if policy.ac_saves is not None:
            yield f"operator-selective checkpointing also saves {', '.join(policy.ac_saves)}"
        if policy.ac_recomputes is not None:
            names = ", ".join(policy.ac_recomputes)
            yield f"products of the shapes of {names} are recomputed and not counted"
