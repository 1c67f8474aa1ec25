"""Low-rank adapters: the options they combine with, and the modules they are added to."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.lora import EVERY_LAYER, Lora
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.builtin_plan import BuiltinPlan
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.technique import Technique

_BEFORE_ATTENTION = ("wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "qkv_proj")
"""Layers whose adapters let the first block's attention have a backward."""


class LowRankAdapters(Technique):
    """Adapters beside frozen layers, held as they are or in 4 bits (``lora``); other frozen parameters."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse tensor parallelism where it is not modelled, and a ring of attention without a backward."""
        if policy.lora is not None and mesh.tp > 1 and (why := _undivided(model, policy.lora, mesh.tp)):
            raise ModelError(f"lora: {why}: use dp_shard for these ranks")
        targets = () if policy.lora is None else policy.lora.targets
        trained = [target.removesuffix("?").rpartition(".")[2] for target in targets]
        trains_before = any(
            one == EVERY_LAYER or fnmatchcase(layer, one) for one in trained for layer in _BEFORE_ATTENTION
        )
        if policy.freezes and mesh.cp > 1 and not trains_before:
            raise ModelError(
                f"{'trainable' if policy.lora is None else 'lora'}: with cp modelled for adapters at "
                "queries, keys or values alone, where every block's attention has a backward: add q_proj to "
                "the targets, or use dp_shard for these ranks"
            )

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Put adapters beside the targets, and quantize the base."""
        if policy.lora is None:
            return model
        from fsdp2prof.estimators.techniques.adapters import with_adapters
        from fsdp2prof.estimators.techniques.quantized import quantize_blocks
        from fsdp2prof.estimators.torch_rules import packed_parameters_refusal

        lora = policy.lora
        adapted = with_adapters(model, lora, policy.orig_dtype, policy.compute_dtype)
        if lora.quantized is not None:
            if mesh.tp * mesh.pp > 1:
                raise ModelError(
                    "lora: a quantized base is modelled with FSDP and HSDP: leave tp and pp at 1"
                )
            if lora.quantized == "nf4" and (refusal := packed_parameters_refusal()):
                raise ModelError(f"lora: base={lora.quantized}: {refusal}")
            quantize_blocks(adapted, lora.quantized, policy.compute_dtype, mesh.fsdp_size)
        if mesh.tp > 1 and isinstance(adapted.tensor_parallel, BuiltinPlan):
            adapted = replace(adapted, tensor_parallel=replace(adapted.tensor_parallel, adapted=True))
        return adapted


def _undivided(model: Model, lora: Lora, ranks: int) -> str | None:
    """Why adapters cannot be divided among tensor-parallel ranks; ``None`` if they can.

    Only those of the layers of dense built-in blocks are.
    """
    plan = model.tensor_parallel
    if not isinstance(plan, BuiltinPlan) or not plan.is_analysed:
        return "under tensor parallelism adapters of dense built-in models alone are modelled"
    names = {target.removesuffix("?").rpartition(".")[2] for target in lora.targets}
    if lora.runs > 1 or lora.r % ranks or names & {"output", "lm_head"}:
        return f"tp={ranks} needs one run, a rank that it divides, and no adapter of the head"
    return None
