"""Size of a distributed checkpoint: the files that each rank writes, and the size of a full state dict."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.held_states import MOMENTS, LowBits
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.optimizers import HeldOptimizer, OptimizerFactory
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.description import mesh_as_given, model_as_built, policy_as_given
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.sharding.groups import (
    ShardedParameter,
    freeze,
    optimizer_state_bytes,
    parameter_groups,
    step_counter_bytes,
)
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.results.estimate import CheckpointEstimate
from fsdp2prof.units import format_bytes, plural

_COUNTER_BYTES = 8
"""Most of a step counter."""


def _note(low: LowBits) -> str:
    return (
        f"{low.bits}-bit states: an fp32 scale for {low.block} elements, {low.table_bytes:,} bytes of table "
        "for each state of each shard; shards of fewer than 4096 elements, or that "
        f"{low.block} does not divide, keep their own dtype (torchao)"
    )


def estimate_checkpoint(
    model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, bandwidth_bytes_per_s: int | None = None
) -> CheckpointEstimate:
    """Estimate ``torch.distributed.checkpoint`` of model and optimizer under FSDP or HSDP.

    ``bandwidth_bytes_per_s`` is the bandwidth of one writing rank. Raises ``ModelError`` for a model that
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
    parameter_bytes = sum(p.numel * dtype_bytes(p.dtype) for p in parameters)
    state = _state(model, mesh, policy, [p for p in parameters if p.requires_grad])
    sharded_bytes, full_bytes = (parameter_bytes + whole for whole in (state.sharded, state.full))
    # Rows go to the first ranks first: no rank has more than the first or less than the last.
    largest, least = (
        (sum(p.shard_numel(rank) * dtype_bytes(p.dtype) for p in parameters) + of_rank)
        for rank, of_rank in ((0, state.first), (mesh.fsdp_size - 1, state.last))
    )
    largest, least = -(-largest // mesh.dp_replicate), least // mesh.dp_replicate
    adapters = []
    if policy.lora is not None:
        trained = sum(p.numel * dtype_bytes(p.dtype) for p in parameters if p.requires_grad)
        alone = format_bytes(trained + state.full)
        adapters = [f"The adapters and their states alone, which most trainers save, are {alone}."]
    bandwidth = bandwidth_bytes_per_s
    seconds = None if bandwidth is None else (largest / bandwidth, full_bytes / bandwidth)
    return CheckpointEstimate(
        model=model_as_built(built, sum(p.numel for p in parameters)),
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        writers=mesh.world_size,
        files=mesh.world_size + 1,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=state.full,
        sharded_bytes=sharded_bytes,
        rank_bytes_max=largest,
        rank_bytes_min=least,
        full_parameter_bytes=parameter_bytes,
        full_bytes=full_bytes,
        sharded_seconds=seconds and seconds[0],
        full_seconds=seconds and seconds[1],
        bandwidth_bytes_per_s=bandwidth,
        verdict=[*_verdict(sharded_bytes, full_bytes, largest, mesh.world_size, seconds), *adapters],
        assumptions=[
            "parameters and optimizer state only: no buffers, no headers (about a kilobyte per tensor)",
            "padding is not saved; each rank writes one file, replicas share the work evenly",
            "a full state dict is gathered and written by one rank",
            *state.notes,
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Bytes of optimizer state."""

    full: int
    """Of a full state dict."""
    sharded: int
    """Of all shards."""
    first: int
    """Of the first rank's shard, step counters left out."""
    last: int
    notes: tuple[str, ...] = ()


def _state(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, trained: list[ShardedParameter]) -> _State:
    kind = policy.optimizer_kind
    if isinstance(kind, OptimizerFactory):
        return _state_as_run(model, mesh, policy, kind)

    def of_rank(parameter: ShardedParameter, rank: int) -> int:
        numel = parameter.shard_numel(rank)
        return optimizer_state_bytes(policy, (numel,), parameter.dtype) if numel else 0

    counters = len(trained) * step_counter_bytes(policy)
    every = [(p.dtype, numel, count) for p in trained for numel, count in p.shard_numels()]
    sharded = sum(count * optimizer_state_bytes(policy, (numel,), dtype) for dtype, numel, count in every)
    spare = 0
    low = kind.held if isinstance(kind, HeldOptimizer) and isinstance(kind.held, LowBits) else None
    if low is not None:  # of the tables of a state's shards a full state dict has one
        shards = sum(count for _, numel, count in every if low.is_quantized(numel))
        once = sum(low.is_quantized(p.shard_numel(0)) for p in trained)
        spare = (shards - once) * len(MOMENTS) * low.table_bytes
    return _State(
        full=sharded + counters - spare,
        sharded=sharded + counters,
        first=sum(of_rank(parameter, 0) for parameter in trained),
        last=sum(of_rank(parameter, mesh.fsdp_size - 1) for parameter in trained),
        notes=() if low is None else (_note(low),),
    )


def _state_as_run(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, kind: OptimizerFactory) -> _State:
    """State of a user-defined optimizer, found by running it as the first and as the last rank."""
    from fsdp2prof.estimators.execution.optimizer_run import states_of_rank

    first, last = (states_of_rank(model, mesh, policy, rank) for rank in (0, mesh.fsdp_size - 1))
    alone = sum(state.whole_bytes for state in first if not state.is_sharded)
    whole = sum(state.whole_bytes for state in first)
    notes = [f"optimizer {kind.source}: its state as of one step, run on shards of the first and last rank"]
    if alone > _COUNTER_BYTES * len(first):
        notes.append(
            f"{format_bytes(alone)} of its state is in plain tensors, no DTensors: a sharded checkpoint "
            "takes them for the same on every rank and saves one rank's"
        )
    return _State(
        full=whole,
        sharded=whole,
        first=sum(state.local_bytes for state in first if state.is_sharded) + -(-alone // mesh.world_size),
        last=sum(state.local_bytes for state in last if state.is_sharded) + alone // mesh.world_size,
        notes=tuple(notes),
    )


def _verdict(
    sharded_bytes: int, full_bytes: int, largest_bytes: int, writers: int, seconds: tuple[float, float] | None
) -> list[str]:
    lines = [
        f"The sharded checkpoint holds {format_bytes(sharded_bytes)} in {plural(writers + 1, 'file')}: "
        f"a rank writes at most {format_bytes(largest_bytes)}.",
        f"A full state dict passes through one rank, which needs {format_bytes(full_bytes)} for it.",
    ]
    if seconds is not None:
        lines.append(f"Writing takes {seconds[0]:.1f} s sharded, {seconds[1]:.1f} s in full.")
    return lines
