"""The interface of a training technique to the estimates."""

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
    """A way of training beyond plain FSDP2. The default refuses and changes nothing.

    Its options are fields of ``PolicySpec`` or dimensions of ``MeshSpec``; every method checks whether
    they are used.
    """

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Raise ``ModelError`` for a model it does not support, and for combinations that are not
        modelled."""

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Return the model as one rank builds it, before FSDP2 shards it; it may be changed in place."""
        return model

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Return a step that was captured without it."""
        return program

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterable[str]:
        """Its assumptions in an estimate, one sentence each."""
        return ()
