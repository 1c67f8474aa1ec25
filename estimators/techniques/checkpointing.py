"""Activation checkpointing and what else decides which activations are kept."""

from __future__ import annotations

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.techniques.technique import Technique


class Checkpointing(Technique):
    """What blocks save for their backward (``ac`` and what selects more of ``ac=op``)."""

    def memory_notes(self, mesh: MeshSpec, policy: PolicySpec) -> list[str]:
        """What is saved and recomputed beside the rule."""
        notes = []
        if policy.recomputes_attention:
            notes.append("operator-selective checkpointing recomputes attention, too")
        if policy.ac_saves is not None:
            notes.append(f"operator-selective checkpointing also saves {', '.join(policy.ac_saves)}")
        if policy.ac_recomputes is not None:
            notes.append(
                f"products of the shapes of {', '.join(policy.ac_recomputes)} are recomputed and not counted"
            )
        return notes
