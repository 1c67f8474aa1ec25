"""What would bring a predicted peak down: which options are left to set, and what each takes off at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.optimizers import OptimizerFactory
from fsdp2prof.estimators.config.policy import PolicySpec, dtype_bytes
from fsdp2prof.estimators.sharding.groups import ParameterGroup, ShardedParameter
from fsdp2prof.estimators.sharding.optimizer_state import optimizer_state_bytes
from fsdp2prof.results.estimate import PredictedPeak
from fsdp2prof.results.peak import Remedy
from fsdp2prof.units import format_bytes

_CHUNKS = 8
_STATES = ("sharded_parameter", "sharded_gradient", "optimizer_state")


def remedies(
    found: Sequence[Remedy],
    peak: PredictedPeak,
    mesh: MeshSpec,
    policy: PolicySpec,
    missing_bytes: int | None,
    padding: Remedy | None = None,
) -> list[Remedy]:
    """Return the options that are left to set, most bytes first.

    ``found`` is what the memory analysis of the predicted recording says of its peak; ``missing_bytes`` what
    a device lacks at least, None without one; ``padding`` that of experts.
    """
    options = [*_of_analysis(found, mesh, policy), *_of_policy(peak, policy)]
    if padding is not None:
        options.append(replace(padding, saves_bytes=min(padding.saves_bytes, peak.active_bytes)))
    return [
        replace(option, enough=False if missing_bytes and option.saves_bytes < missing_bytes else None)
        for option in sorted(options, key=lambda option: -option.saves_bytes)
        if option.saves_bytes > 0
    ]


def expert_padding(groups: Sequence[ParameterGroup], policy: PolicySpec) -> Remedy | None:
    """What cutting every expert, instead of dealing out whole ones, saves at most: states and buffers.

    Padding is also gathered and reduced: two groups are unsharded at once and a third copy is in flight,
    and two reduce-scatter inputs are alive. ``None`` where experts are not padded: they are as many as ranks
    or more, and divide among them.
    """
    padded = {group: _padded_experts(group) for group in groups}
    every = [one for parameters in padded.values() for one in parameters]
    spare = [(one, one.padded_shard_numel - one.numel // one.shards) for one in every]
    kept = not isinstance(policy.optimizer_kind, OptimizerFactory)  # whose state is known by running it
    saved = sum(
        2 * elements * dtype_bytes(one.dtype)
        + (optimizer_state_bytes(policy, (elements,), one.dtype) if kept else 0)
        for one, elements in spare
    )
    if saved <= 0:
        return None
    saved += max(
        sum(
            (one.padded_numel - one.numel)
            * (3 * dtype_bytes(one.gather_dtype) + 2 * dtype_bytes(group.gradient_dtype))
            for one in parameters
        )
        for group, parameters in padded.items()
    )
    first = every[0]
    how = (
        f"cut each expert instead of dealing out whole ones (expert_shards=hidden): {first.shape[0]} experts "
        f"on {first.shards} ranks are padded to {first.padded_numel // first.numel} times their size"
    )
    return _remedy("even_expert_shards", saved, how)


def _padded_experts(group: ParameterGroup) -> list[ShardedParameter]:
    return [
        parameter
        for parameter in group.parameters
        if parameter.is_expert and not parameter.dim and parameter.shape[1] % parameter.shards == 0
    ]


def advice(options: Sequence[Remedy], missing_bytes: int) -> list[str]:
    """Say what to change in a run that misses ``missing_bytes`` of device memory at least."""
    lines = [f"{one.how}: takes off {format_bytes(one.saves_bytes)} at most" for one in options]
    if lines and missing_bytes > 0 and all(one.enough is False for one in options):
        lines.append(
            f"each alone is less than the {format_bytes(missing_bytes)} that is missing: combine them"
        )
    return lines


def _of_analysis(found: Sequence[Remedy], mesh: MeshSpec, policy: PolicySpec) -> Iterator[Remedy]:
    """What an analysis of any recording proposes, as options of an estimate."""
    hows = {
        "activation_checkpointing": "checkpoint every block (ac=full)" if policy.ac != "full" else None,
        "chunked_loss": f"compute head and loss in {_CHUNKS} chunks (loss=chunked:{_CHUNKS})"
        if policy.loss == "full"
        else None,
        "smaller_batch": f"halve the micro-batch (batch_size={policy.batch_size // 2}, "
        f"grad_accum={2 * policy.grad_accum})"
        if policy.batch_size > 1
        else None,
        "reshard_after_forward": "reshard what stays gathered (reshard=always)"
        if policy.reshard != "always"
        else None,
        "wider_sharding": f"shard over twice as many ranks (dp_shard={2 * mesh.dp_shard})",
    }
    for remedy in found:
        if how := hows.get(remedy.action):
            yield replace(remedy, how=how)


def _of_policy(peak: PredictedPeak, policy: PolicySpec) -> Iterator[Remedy]:
    """What only the options of an estimate tell."""
    held = peak.categories
    states = sum(held[name] for name in _STATES)
    if not policy.offload:
        yield _remedy(
            "cpu_offload", states, "keep parameters, gradients and optimizer state on the host (offload)"
        )
    if dtype_bytes(policy.orig_dtype) == 4:
        how = "hold parameters and optimizer state in bf16 (orig_dtype=bf16), at the price of precision"
        yield _remedy("low_precision_states", states // 2, how)
    if policy.optimizer_impl == "foreach" and peak.phase == "optimizer":
        how = "use the optimizer's fused implementation, which makes no temporaries (optimizer_impl=fused)"
        yield _remedy("fused_optimizer", held["temporary"], how)
    if policy.allocator == "classic":
        unused = peak.reserved_bytes - peak.active_bytes
        yield _remedy("expandable_segments", unused, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


def _remedy(action: str, saves_bytes: int, how: str) -> Remedy:
    return Remedy(action=action, saves_bytes=saves_bytes, enough=None, how=how)
