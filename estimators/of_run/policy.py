"""A recorded run's mesh, policy and software, as the input of estimates.

No setting is lost: a setting that a policy cannot express is refused by its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import Norm
from fsdp2prof.estimators.config.option import ByUnit
from fsdp2prof.estimators.of_run.communication import RootStep, step_of_root
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo, RankManifest
from fsdp2prof.vocabulary import Sync

_FUSED_NORMS = (
    "apex.",
    "flash_attn.",
    "liger_kernel.",
    "quack.",
    "torchtitan.models.norms.FusedRMSNorm",
    "transformer_engine.",
    "xformers.",
)
"""Where classes are defined that compute an RMSNorm in one kernel."""
_COMPOSED_NORMS = ("fsdp2prof.", "torchtitan.models.norms.RMSNorm", "transformers.models.")
"""Where those are that compute it by separate operators in fp32."""
_NORM_OF_TORCH = "torch.nn.modules.normalization.RMSNorm"


def values_of_run(
    manifest: RankManifest, *, grad_accum: int | None = None, sync: Sync | None = None
) -> dict[str, Any]:
    """A recorded rank's mesh, policy and software, as the values of ``make_spec``.

    A manifest contains neither the model itself, nor the batch or activation checkpointing. Raises
    ``ModelError`` for settings that ``PolicySpec`` cannot express: each by the name of the call that set
    it.
    """
    groups = manifest.param_groups
    if not groups:
        raise ModelError(f"rank {manifest.rank} recorded no FSDP parameter group: nothing to estimate")
    refusal = next(_refusals(manifest, grad_accum, sync), None)
    if refusal is not None:
        raise ModelError(f"the run {refusal}, which an estimate cannot express yet")
    first = groups[0]
    inner = [group for group in groups if group.fqn]
    step = step_of_root(manifest, groups[0].root, grad_accum, sync)
    policy: dict[str, Any] = {
        "wrap": tuple(_unit(group.fqn) for group in inner) or ("root",),
        "reshard": _by_unit(inner or groups, lambda group: _reshard(group.reshard_after_forward)),
        "param_dtype": _by_unit(groups, lambda group: group.param_dtype),
        "reduce_dtype": _by_unit(groups, lambda group: group.reduce_dtype),
        "output_dtype": _by_unit(groups, lambda group: group.output_dtype),
        "orig_dtype": first.parameters[0].dtype,
        "offload": first.offload,
        "trainable": _trainable([parameter for group in groups for parameter in group.parameters]),
        "forward_prefetch": _prefetch(groups, lambda group: group.forward_prefetch),
        "backward_prefetch": _prefetch(groups, lambda group: group.backward_prefetch),
        "unshard_in_backward": _by_unit(groups, lambda group: group.unshard_in_backward),
        "separate_reduce_scatter_group": first.reduce_scatter_group != first.shard_group,
        "reduce_scatter_buffers": max(group.reduce_scatter_max_input_buffers or 1 for group in groups),
        "grad_accum": step.micro_batches,
        "sync": step.sync,
        **_software(manifest),
    }
    policy |= _root_reshard(next((group for group in groups if not group.fqn), None), policy["reshard"])
    if manifest.optimizers:
        policy |= _optimizer(manifest)
    mesh = {"dp_replicate": first.replicate_world_size, "dp_shard": first.shard_world_size}
    tensor_parallel = manifest.world_size // (first.replicate_world_size * first.shard_world_size)
    if any(parameter.tensor_parallel for group in groups for parameter in group.parameters):
        mesh["tp"] = tensor_parallel
    return {"mesh": mesh, "policy": policy}


def norm_of_run(manifest: RankManifest) -> Norm | None:
    """How a run's RMSNorms were computed, by their classes; ``None`` if these do not show it, or differ.

    Applies to a model that stands for the recorded one: a model of its own classes has its own norms.
    """
    match = re.match(r"\d+\.\d+", manifest.versions.get("torch", ""))
    found: set[Norm | None] = set()
    for name in manifest.norms:
        if not name.endswith("RMSNorm"):
            continue
        if name == _NORM_OF_TORCH and match is not None:
            found.add("fused" if torch_rules(match[0]).rms_norm_is_fused else "composed")
        elif name.startswith(_FUSED_NORMS):
            found.add("fused")
        elif name.startswith(_COMPOSED_NORMS):
            found.add("composed")
        else:
            found.add(None)
    return found.pop() if len(found) == 1 else None


def _refusals(manifest: RankManifest, grad_accum: int | None, sync: Sync | None) -> Iterator[str]:
    """The run's settings that a policy cannot express, named by their calls."""
    groups = manifest.param_groups
    if manifest.root_count > 1:
        shared = len({group.comm_context for group in groups}) < manifest.root_count
        yield f"has {manifest.root_count} root modules{' that share_comm_ctx joins' if shared else ''}"
    if manifest.ignored_parameters:
        yield f"leaves parameters out of FSDP (ignored_params), {manifest.ignored_parameters[0]} for one"
    for group in groups:
        where = f"{group.fqn or 'the root'}"
        if group.shard_group is None:
            yield f"replicates {where} (replicate(): give --mesh dp_replicate=N instead of the run)"
        if group.group_count > 1:
            yield f"shards {where} in {group.group_count} groups (shard_placement_fn)"
        if any(parameter.placement != "Shard(0)" for parameter in group.parameters):
            yield f"shards parameters of {where} on another dimension than 0 (shard_placement_fn)"
        if any(re.search(r"(?<!tp): ", parameter.tensor_parallel or "") for parameter in group.parameters):
            yield f"had DTensors in {where} before fully_shard on a mesh dimension that is not tp"
        if not group.reshard_after_backward:
            yield f"calls set_reshard_after_backward(False) on {where}"
        if group.unshard_async_op:
            yield f"unshards {where} asynchronously (_set_unshard_async_op)"
        if not group.cast_forward_inputs:
            yield f"does not cast the inputs of {where} (MixedPrecisionPolicy.cast_forward_inputs)"
        for comm in (group.all_gather_comm, group.reduce_scatter_comm):
            if comm is not None:
                yield f"allocates the communication buffers of {where} by {comm}"
    yield from _step_refusals(manifest, step_of_root(manifest, groups[0].root, grad_accum, sync))
    for name in ("shard_world_size", "replicate_world_size", "offload"):
        if len({getattr(group, name) for group in groups}) > 1:
            yield f"has groups that differ in {name}"
    if len({parameter.dtype for group in groups for parameter in group.parameters}) > 1:
        yield "has parameters of several original dtypes"
    if len(manifest.optimizers) > 1 and all(optimizer.parameters == 1 for optimizer in manifest.optimizers):
        yield "steps a separate optimizer for each parameter (in backward, or on the host)"
    if len({optimizer.class_name for optimizer in manifest.optimizers}) > 1:
        yield "has optimizers of several classes"


def _step_refusals(manifest: RankManifest, step: RootStep) -> Iterator[str]:
    """Settings of a root that change from one micro-batch to the next and that no option expresses."""
    if step.keep_between:
        yield "keeps parameters gathered between micro-batches (set_reshard_after_backward, a pipeline stage)"
    if step.all_reduce != "each" and manifest.param_groups[0].replicate_world_size > 1:
        yield "does not all-reduce every reduced gradient over the replicas (set_requires_all_reduce)"


def _unit(fqn: str) -> str:
    return fqn.replace(", ", "+") or "root"


def _by_unit(groups: Sequence[ParamGroupInfo], value: Callable[[ParamGroupInfo], Any]) -> Any:
    """The most common value, and the units that have another."""
    values = [value(group) for group in groups]
    base = Counter(values).most_common(1)[0][0]
    own = [(_unit(group.fqn), one) for group, one in zip(groups, values, strict=True) if one != base]
    return ByUnit(base, tuple(own)) if own else base


def _reshard(recorded: bool | int) -> str | int:
    return ("always" if recorded else "never") if isinstance(recorded, bool) else recorded


def _root_reshard(root: ParamGroupInfo | None, reshard: Any) -> dict[str, Any]:
    if root is None:
        return {}
    if isinstance(root.reshard_after_forward, bool):
        return {"reshard_root": root.reshard_after_forward}
    base, units = (reshard.base, reshard.units) if isinstance(reshard, ByUnit) else (reshard, ())
    return {"reshard": ByUnit(base, (*units, ("root", root.reshard_after_forward)))}


def _prefetch(groups: Sequence[ParamGroupInfo], targets: Callable[[ParamGroupInfo], Sequence[str]]) -> Any:
    own = [
        (_unit(group.fqn), tuple(_unit(target) for target in targets(group)))
        for group in groups
        if targets(group)
    ]
    return ByUnit(0, tuple(own)) if own else 0


def _trainable(parameters: Sequence[ParameterInfo]) -> str | None:
    """A pattern that finds the trained parameters and no other; ``None`` if there is no other."""
    trained = {parameter.fqn for parameter in parameters if parameter.requires_grad}
    frozen = {parameter.fqn for parameter in parameters} - trained
    if not frozen or not trained:
        return None
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(fqn)) for fqn in trained}
    pattern = f"^(?:{'|'.join(sorted(shapes))})$"
    if any(re.search(pattern, fqn) for fqn in frozen):
        pattern = f"^(?:{'|'.join(map(re.escape, sorted(trained)))})$"
    return pattern


def _software(manifest: RankManifest) -> dict[str, Any]:
    """The manifest's values for torch, attention and the allocator; for a CPU run only the first."""
    found: dict[str, Any] = {}
    match = re.match(r"\d+\.\d+", manifest.versions.get("torch", ""))
    if match is not None:
        found["torch"] = match[0]
    if manifest.device.type != "cuda":
        return found
    if manifest.attention_backends:
        found["attention"] = manifest.attention_backends[0]
    segments = manifest.allocator_settings.get("expandable_segments")
    if segments is not None:
        found["allocator"] = "expandable" if segments == "True" else "classic"
    if match is not None and torch_rules(match[0]).collectives_record_streams:
        found["record_streams"] = manifest.environment.get("TORCH_NCCL_AVOID_RECORD_STREAMS", "0") == "0"
    if manifest.compiled_modules:
        found["compile"] = True
    return found


def _optimizer(manifest: RankManifest) -> dict[str, Any]:
    optimizer = manifest.optimizers[0]
    name = optimizer.class_name.rpartition(".")[2].lower()
    momentum = optimizer.defaults.get("momentum", "0")
    values = {"optimizer": "sgd-momentum" if name == "sgd" and momentum not in ("0", "0.0") else name}
    if optimizer.defaults.get("fused") == "True":
        values["optimizer_impl"] = "fused"
    elif optimizer.defaults.get("foreach") == "False":
        values["optimizer_impl"] = "for-loop"
    return values
