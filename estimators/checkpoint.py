"""Size of a distributed checkpoint: what each rank writes, and what a full state dict would take."""

from __future__ import annotations

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.description import mesh_as_given, model_as_built, policy_as_given
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.optimizer_state import optimizer_state_bytes, step_counter_bytes
from fsdp2prof.estimators.sharding import ShardedParameter, freeze, parameter_groups
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec, dtype_bytes
from fsdp2prof.estimators.traffic.parts import part_of
from fsdp2prof.results import CheckpointEstimate
from fsdp2prof.units import format_bytes, plural

__all__ = ["estimate_checkpoint"]


def estimate_checkpoint(
    model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, bandwidth_bytes_per_s: int | None = None
) -> CheckpointEstimate:
    """Estimate ``torch.distributed.checkpoint`` of model and optimizer under FSDP or HSDP.

    ``bandwidth_bytes_per_s`` is what one writing rank sustains. Raises ``ModelError`` for a model that
    cannot be built, and for tensor or pipeline parallelism, whose files are not modelled.
    """
    if mesh.tp > 1 or mesh.pp > 1:
        raise ModelError("checkpoint sizes are modelled for FSDP and HSDP meshes: leave tp and pp at 1")
    if mesh.ep > 1:
        raise ModelError("checkpoint files under expert parallelism are not modelled: leave ep at 1")
    if bandwidth_bytes_per_s is not None and bandwidth_bytes_per_s <= 0:
        raise ModelError("bandwidth: must be more than 0 bytes per second")
    built = build_model(model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    built = part_of(built, mesh, policy)
    freeze(built, policy)
    parameters = [p for group in parameter_groups(built, mesh, policy) for p in group.parameters]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parameter_bytes = sum(p.numel * dtype_bytes(p.dtype) for p in parameters)
    counters = len(trained) * step_counter_bytes(policy)
    state_bytes = sum(optimizer_state_bytes(policy, p.shape, p.dtype) for p in trained)
    full_bytes = parameter_bytes + state_bytes + counters
    # Rows go to the first ranks first: no rank has more than the first or less than the last.
    first, last = (_shard_bytes(parameters, policy, rank) for rank in (0, mesh.fsdp_size - 1))
    largest = -(-first // mesh.dp_replicate)
    bandwidth = bandwidth_bytes_per_s
    seconds = None if bandwidth is None else (largest / bandwidth, full_bytes / bandwidth)
    return CheckpointEstimate(
        model=model_as_built(built, sum(p.numel for p in parameters)),
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        writers=mesh.world_size,
        files=mesh.world_size + 1,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=state_bytes + counters,
        sharded_bytes=full_bytes,
        rank_bytes_max=largest,
        rank_bytes_min=last // mesh.dp_replicate,
        full_parameter_bytes=parameter_bytes,
        full_bytes=full_bytes,
        sharded_seconds=seconds and seconds[0],
        full_seconds=seconds and seconds[1],
        bandwidth_bytes_per_s=bandwidth,
        verdict=_verdict(full_bytes, largest, mesh.world_size, seconds),
        assumptions=[
            "parameters and optimizer state only: no buffers, no headers (about a kilobyte per tensor)",
            "padding is not saved; each rank writes one file, replicas share the work evenly",
            "a full state dict is gathered and written by one rank",
        ],
    )


def _verdict(
    full_bytes: int, largest_bytes: int, writers: int, seconds: tuple[float, float] | None
) -> list[str]:
    lines = [
        f"The sharded checkpoint holds {format_bytes(full_bytes)} in {plural(writers + 1, 'file')}: "
        f"a rank writes {format_bytes(largest_bytes)} at most.",
        f"A full state dict passes through one rank, which needs {format_bytes(full_bytes)} for it.",
    ]
    if seconds is not None:
        lines.append(f"Writing takes {seconds[0]:.1f} s sharded, {seconds[1]:.1f} s in full.")
    return lines


def _shard_bytes(parameters: list[ShardedParameter], policy: PolicySpec, rank: int) -> int:
    total = 0
    for parameter in parameters:
        numel = parameter.shard_numel(rank)
        total += numel * dtype_bytes(parameter.dtype)
        if parameter.requires_grad and numel:
            total += optimizer_state_bytes(policy, (numel,), parameter.dtype)
    return total
