"""What a mesh asks of a model and a policy: each limit that is not met is refused in one line."""

from __future__ import annotations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import (
    ChunkedBlocks,
    ChunkedVocabulary,
    values_of,
)
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal
from fsdp2prof.estimators.traffic.pipeline_order import enough_micro_batches, order_of

_BEFORE_ATTENTION = {"wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "qkv_proj"}
"""Layers whose adapters let the first block's attention have a backward."""


def check_parallelism(model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
    """Raise ``ModelError`` if the mesh does not divide the model or the batch, or is not modelled for it."""
    if mesh.pp > 1 and policy.extra_model is not None:
        raise ModelError("a second model (extra_model) beside a pipeline is not modelled: leave pp at 1")
    if mesh.pp > 1 and model.width is None:
        raise ModelError(f"mesh: pp={mesh.pp}: {model.name} {model.no_pipeline}")
    if mesh.cp > 1 and policy.documents is not None:
        raise ModelError("documents: torch's ring attention takes no documents: leave cp at 1")
    if mesh.cp > 1 and not model.ring_width:
        raise ModelError(f"mesh: cp={mesh.cp}: {model.name} {model.no_ring}")
    if mesh.ep == 1 and policy.imbalance != 1:
        raise ModelError("imbalance: rows are exchanged under expert parallelism only: add ep to the mesh")
    if policy.images and mesh.tp > 1:
        raise ModelError("images: a vision tower under tensor parallelism is not modelled: leave tp at 1")
    if mesh.ep > 1:
        _check_expert_parallelism(model, mesh, policy)
    if policy.async_tp and mesh.tp == 1:
        raise ModelError("async_tp: there is no tensor parallelism on this mesh; add tp to it")
    if mesh.tp > 1:
        _check_tensor_parallelism(model, mesh, policy)
    divides_sequence = model.tensor_parallel is not None and model.tensor_parallel.divides_sequence
    pieces = (2 * mesh.cp if mesh.cp > 1 else 1) * (mesh.tp if divides_sequence else 1)
    if policy.seq_len % pieces:
        raise ModelError(
            f"seq_len {policy.seq_len} is not a multiple of {pieces} (tp x 2 cp): it cannot be split"
        )
    if policy.lora is not None and mesh.tp > 1:
        raise ModelError(
            "lora: adapters under tensor parallelism are not modelled, since trainers divide them in "
            "different ways: use dp_shard for these ranks"
        )
    if policy.freezes and mesh.cp > 1 and not (policy.lora and _BEFORE_ATTENTION & {*policy.lora.targets}):
        raise ModelError(
            f"{'trainable' if policy.lora is None else 'lora'}: with cp modelled for adapters at queries, "
            "keys or values alone, where every block's attention has a backward: add q_proj to the targets, "
            "or use dp_shard for these ranks"
        )
    _check_pipeline(model, mesh, policy)


def _check_pipeline(model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
    layers = len(model.blocks)
    if mesh.pp > 1 and layers < mesh.pp:
        raise ModelError(f"mesh: pp={mesh.pp} stages for {layers} layers of {model.name}")
    if mesh.pp > 1 and policy.reshard != "never":
        raise ModelError("with pp use reshard=never: stages keep parameters gathered between micro-batches")
    if mesh.pp > 1 and policy.sync != "last":
        raise ModelError("with pp use sync=last: the schedule reduces gradients after its last backward")
    if not 0 <= policy.pp_stage < mesh.pp:
        raise ModelError(f"pp_stage: {policy.pp_stage} is not one of the {mesh.pp} pipeline stages")
    if mesh.pp > 1 and policy.loss_in_pieces:
        raise ModelError(
            f"loss={policy.loss} on a pipeline's last stage is not modelled: use loss=full, which takes more"
        )
    stages = policy.stages_per_rank
    if policy.pp_schedule != "1f1b" and mesh.pp == 1:
        raise ModelError("pp_schedule: there is no pipeline on this mesh; add pp to it")
    if policy.splits_backward and policy.ac == "op":
        raise ModelError(
            f"pp_schedule: {policy.pp_schedule} runs a backward in two parts, and torch's selective "
            "checkpointing allows one backward: use ac=none (or full, recomputed for each part)"
        )
    if policy.splits_backward and policy.compile:
        raise ModelError(
            f"pp_schedule: {policy.pp_schedule} runs a backward in two parts, and compiled blocks have one: "
            "torch refuses it; leave compile out"
        )
    if mesh.pp > 1 and stages > 1 and layers % (mesh.pp * stages):
        raise ModelError(
            f"pp_schedule: {stages} stages on each of {mesh.pp} ranks do not divide the {layers} "
            f"layers of {model.name}"
        )
    if mesh.pp > 1:
        order_of(
            policy.pp_schedule,
            mesh.pp,
            enough_micro_batches(policy.pp_schedule, mesh.pp, policy.grad_accum),
        )


def _check_tensor_parallelism(model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
    plan = model.tensor_parallel
    if plan is None:
        raise ModelError(f"mesh: tp={mesh.tp}: {model.name} {model.no_tensor_parallel}")
    if mesh.ep > 1:
        plan = plan.with_experts_apart(model.experts)
    if refusal := plan.refusal(mesh.tp):
        raise ModelError(f"mesh: {refusal}")
    if policy.extra_model is not None and not plan.is_analysed:
        raise ModelError(
            "tensor parallelism with a second model (extra_model) is modelled for dense built-ins only"
        )
    if policy.async_tp and not plan.is_analysed:
        raise ModelError(f"async_tp: modelled for dense built-in models, not {model.name}")
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
    if any(isinstance(value, int) for value in values_of(policy.reshard)):
        raise ModelError("reshard to a number of ranks is not supported by FSDP2 with tensor parallelism")


def _check_expert_parallelism(model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
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
        raise ModelError("reshard to a number of ranks with experts on a mesh of their own is not modelled")
    if refusal := expert_mesh_refusal():
        raise ModelError(f"mesh: ep={mesh.ep}: {refusal}; 2.11 or newer gives experts one of their own")
