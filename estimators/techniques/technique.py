"""What a technique of training is to the estimates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import Program

About: TypeAlias = Literal["memory", "step", "communication"]
"""Which estimate."""


class Technique:
    """A way of training beyond plain FSDP2. By default it is refused nowhere, and changes nothing.

    Its options are fields of ``PolicySpec`` or dimensions of ``MeshSpec``; every method sees whether they are
    used.
    """

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Raise ``ModelError`` for a model that it does not fit, and for what is not modelled beside it."""

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Return the model as one rank builds it, before FSDP2 shards it; it may be changed in place."""
        return model

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Return a step that was captured without it."""
        return program

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterable[str]:
        """What an estimate assumes of it, one sentence each."""
        return ()
