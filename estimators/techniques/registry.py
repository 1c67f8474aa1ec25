"""All techniques, and the queries of an estimate to each of them."""

from __future__ import annotations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import Program
from fsdp2prof.estimators.techniques.batches import FusedAttention, Images, PackedDocuments
from fsdp2prof.estimators.techniques.checkpointing import Checkpointing
from fsdp2prof.estimators.techniques.compilation import Compilation
from fsdp2prof.estimators.techniques.context_parallel import ContextParallel
from fsdp2prof.estimators.techniques.expert_parallel import ExpertParallel
from fsdp2prof.estimators.techniques.float8.program import Float8Training
from fsdp2prof.estimators.techniques.lora import LowRankAdapters
from fsdp2prof.estimators.techniques.losses import Losses, SecondModels
from fsdp2prof.estimators.techniques.offloading import Offloading
from fsdp2prof.estimators.techniques.pipeline import Pipeline
from fsdp2prof.estimators.techniques.technique import About, Technique
from fsdp2prof.estimators.techniques.tensor_parallel import AsyncTensorParallel, TensorParallelism

TECHNIQUES: tuple[Technique, ...] = (
    Images(),
    FusedAttention(),
    PackedDocuments(),
    LowRankAdapters(),
    Checkpointing(),
    Losses(),
    Offloading(),
    Pipeline(),
    TensorParallelism(),
    ExpertParallel(),
    ContextParallel(),
    Float8Training(),
    Compilation(),
    AsyncTensorParallel(),
    SecondModels(),
)
"""In the order in which they change a model and a program."""


def check_parallelism(model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
    """Raise ``ModelError`` if the mesh does not divide the model or the batch, or is not modelled for it."""
    for technique in TECHNIQUES:
        technique.check(model, mesh, policy)
    plan = model.tensor_parallel
    divides_sequence = plan is not None and plan.divides_sequence(policy.sequence_parallel)
    pieces = (2 * mesh.cp if mesh.cp > 1 else 1) * (mesh.tp if divides_sequence else 1)
    if policy.seq_len % pieces:
        raise ModelError(
            f"seq_len {policy.seq_len} is not a multiple of {pieces} (tp x 2 cp): it cannot be split"
        )


def part_of(model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
    """The part of a model that a rank builds: its pipeline stage, its experts, with its adapters.

    Its batches contain the policy's images. Raises ``ModelError`` for images or techniques that the model
    does not support.
    """
    for technique in TECHNIQUES:
        model = technique.change_model(model, mesh, policy)
    return model


def changed_program(program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
    """Return a captured step as all techniques change it that were not captured with it."""
    for technique in TECHNIQUES:
        program = technique.change_program(program, model, mesh, policy)
    return program


def notes_of(about: About, mesh: MeshSpec, policy: PolicySpec) -> list[str]:
    """Assumptions of the techniques in use, one sentence each."""
    return [note for technique in TECHNIQUES for note in technique.notes(about, mesh, policy)]
