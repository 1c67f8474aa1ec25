"""What of a model one rank builds: its pipeline stage, its experts, with its adapters."""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import has_ends
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.adapters import with_adapters
from fsdp2prof.estimators.models.builtin_plan import BuiltinPlan
from fsdp2prof.estimators.models.decoder import cut_decoder
from fsdp2prof.estimators.models.documents import with_documents
from fsdp2prof.estimators.models.images import with_images
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.models.quantized import quantize_blocks
from fsdp2prof.estimators.models.transformers_plan import TransformersPlan
from fsdp2prof.estimators.torch_rules import packed_parameters_refusal


def stage_blocks(layers: int, mesh: MeshSpec, stage: int) -> range:
    """Layers of one pipeline stage: as even as possible, the first stages one longer."""
    size, longer = divmod(layers, mesh.pp)
    start = stage * size + min(stage, longer)
    return range(start, start + size + (stage < longer))


def part_of(model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
    """The part of a model that is built on a rank: its pipeline stage, its experts, with its adapters.

    Its batches bring the policy's images. Raises ``ModelError`` for what cannot be given or put into it.
    """
    model = with_documents(with_images(model, policy), policy)
    adapted = with_adapters(model, policy.lora, policy.orig_dtype, policy.compute_dtype)
    if policy.lora is not None and policy.lora.quantized is not None:
        if mesh.tp * mesh.pp > 1:
            raise ModelError("lora: a quantized base is modelled with FSDP and HSDP: leave tp and pp at 1")
        if policy.lora.quantized == "nf4" and (refusal := packed_parameters_refusal()):
            raise ModelError(f"lora: base={policy.lora.quantized}: {refusal}")
        quantize_blocks(adapted, policy.lora.quantized, policy.compute_dtype, mesh.fsdp_size)
    return _with_local_experts(stage_of(adapted, mesh, policy), mesh)


def _with_local_experts(model: Model, mesh: MeshSpec) -> Model:
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


def stage_of(model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
    """The part of a model that ``policy.pp_stage`` holds; the model itself without a pipeline.

    The module is cut in place and runs from the hidden states (B, S, D) of the stage before, if there is one,
    to those for the stage after.
    """
    if mesh.pp == 1 or model.width is None:
        return model
    kept = stage_blocks(len(model.blocks), mesh, policy.pp_stage)
    is_first, is_last = has_ends(policy.pp_schedule, mesh.pp, policy.pp_stage)
    blocks = tuple(model.blocks[at] for at in kept)
    if model.decoder is None:
        absent = _cut_builtin(model, kept, is_first=is_first, is_last=is_last)
    else:
        absent = model.decoder.absent(is_first=is_first, is_last=is_last)
        cut_decoder(model.module, absent, model.blocks, kept)
        absent |= set(model.blocks) - set(blocks)
    plan = model.tensor_parallel
    if isinstance(plan, (BuiltinPlan, TransformersPlan)):
        plan = replace(plan, absent=absent)
    return replace(
        model,
        blocks=blocks,
        experts=tuple(fqn for fqn in model.experts if fqn.startswith(tuple(f"{one}." for one in blocks))),
        tensor_parallel=plan,
    )


def _cut_builtin(model: Model, kept: range, *, is_first: bool, is_last: bool) -> frozenset[str]:
    """Leave the ``kept`` layers of a built-in model, and the ends that it has; return what is not there."""
    from torch import nn

    assert model.config is not None
    module = model.module
    layers = dict(module.layers.named_children())  # type: ignore[union-attr]
    module.layers = nn.ModuleDict({str(index): layers[str(index)] for index in kept})
    absent: set[str] = set()
    if not is_first:
        absent.add("tok_embeddings")
        if model.config.family == "gpt":
            module.pos_embeddings = None  # type: ignore[assignment]
    if not is_last:
        absent |= {"norm", "output"}
    for name in absent:
        module.register_module(name, nn.Identity())
    return frozenset(absent)
