"""Experts distributed over the ranks of ``ep``, with a separate mesh for FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import Collective, Program
from fsdp2prof.estimators.techniques.technique import About, Technique
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal

_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
"""Names of that number in configurations of Hugging Face."""


def _chosen(model: Model) -> int:
    """Experts that a token goes to. Raises ``ModelError`` if the model does not say."""
    if model.config is not None and model.config.experts is not None:
        return model.config.experts.top_k
    config = getattr(model.module, "config", None)
    text = config.get_text_config() if config is not None else None
    found = next((one for name in _TOP_K if (one := getattr(text, name, None))), None)
    if found is None:
        raise ModelError(f"expert_dispatch: {model.name} does not say how many experts a token goes to")
    return int(found)


def _sends_tokens(command: Collective) -> bool:
    return command.mesh_dim == "ep" and not command.dtype.startswith("int")


class ExpertParallel(Technique):
    """The ranks of ``ep`` (``imbalance``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a model without experts, or whose experts the ranks do not divide."""
        if mesh.ep == 1:
            if policy.expert_dispatch != "all-to-all":
                raise ModelError("expert_dispatch needs expert parallelism: add ep to the mesh")
            if policy.imbalance != 1:
                raise ModelError(
                    "imbalance: rows are exchanged under expert parallelism only: add ep to the mesh"
                )
            return
        if not model.experts:
            raise ModelError(f"mesh: ep={mesh.ep} for {model.name}, which has no experts")
        if model.reach_experts is None:
            raise ModelError(f"mesh: ep={mesh.ep}: {model.name} {model.no_expert_parallel}")
        count = model.expert_count
        if count % mesh.ep:
            raise ModelError(f"mesh: ep={mesh.ep} does not divide the {count} experts of {model.name}")
        if (ranks := mesh.fsdp_size * mesh.tp) % mesh.ep:
            raise ModelError(f"mesh: ep={mesh.ep} does not divide the {ranks} ranks of dp_shard x cp x tp")
        if isinstance(policy.reshard, int):
            raise ModelError("reshard to a number of ranks with experts on a separate mesh is not modelled")
        if refusal := expert_mesh_refusal():
            raise ModelError(f"mesh: ep={mesh.ep}: {refusal}; 2.11 or newer gives experts a separate mesh")

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Leave this rank's experts."""
        if mesh.ep == 1:
            return model
        from torch import nn

        for fqn in model.experts:
            module = model.module.get_submodule(fqn)
            for name, parameter in list(module.named_parameters(recurse=False)):
                local = parameter.data.narrow(0, 0, parameter.shape[0] // mesh.ep).clone()
                module.register_parameter(name, nn.Parameter(local))
        plan = model.tensor_parallel
        if plan is not None:
            plan = plan.with_experts_apart(model.experts)
        return replace(model, expert_ranks=mesh.ep, tensor_parallel=plan)

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Say which exchanges send a token once to each place."""
        if policy.expert_dispatch != "once" or mesh.ep == 1:
            return program
        chosen = _chosen(model), model.expert_count * model.expert_ranks
        commands = [
            replace(command, chosen=chosen)
            if isinstance(command, Collective) and command.op == "all_to_all" and _sends_tokens(command)
            else command
            for command in program.commands
        ]
        return replace(program, commands=commands)

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """How tokens spread."""
        if about == "memory" and mesh.ep > 1:
            yield (
                f"expert parallelism executed: tokens spread evenly, and this rank's experts receive "
                f"{policy.imbalance:g} times the mean; none is dropped"
            )
