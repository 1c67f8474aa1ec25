"""What the search knows of a model: shallow runs of the execution engine, taken apart by block.

One capture and one memory execution of a few blocks are made for each way to divide and to checkpoint a
block. Their kernels are costed for any batch and sequence at the shapes they would have there, by the same
cost model as the engine's; their live bytes grow with the tokens and with the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.request import PlanRequest
from fsdp2prof.estimators.sharding import parameter_groups
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import CheckpointingMode, PolicySpec
from fsdp2prof.estimators.step import program_of
from fsdp2prof.estimators.timeline.commands import Collective, Command, Enter, Kernel, Leave, Work
from fsdp2prof.estimators.timeline.costs import HostPace
from fsdp2prof.estimators.timeline.deepen import CannotCutError, parts_of
from fsdp2prof.results import MemoryEstimate

__all__ = ["BlockProfile", "Probe", "Stretch", "measure", "probes"]

_BLOCKS = 3
"""Of a shallow run: the first, one that stands for all, the last."""
_SHARDS = 2
_TOKEN_SIZED = ("activation", "temporary", "input", "unattributed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One shallow run to make."""

    model: ModelSpec
    tp: int
    policy: PolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What the device and the host do in a forward or a backward of one block, or outside of all."""

    works: tuple[Work, ...]
    """Kernels of the model's own, at the shapes of the probe."""
    tensor_parallel: tuple[tuple[str, int], ...]
    """Collectives (op, payload bytes) that the compute stream waits for."""
    host_ns: int
    """The host needs to issue all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """A shallow run, taken apart."""

    tp: int
    batch_size: int
    seq_len: int
    forward: Stretch
    backward: Stretch
    ends: Stretch
    """Embedding, head and loss, forward and backward."""
    update_bytes: int
    """That clipping and the optimizer move, of all parameters of the probe."""
    update_host_ns: int
    shard_numel: int
    """Elements of the probe's shard."""
    block_numel: int
    """Elements of one block on a tensor-parallel rank, gathered."""
    root_numel: int
    """Elements of everything that is no block."""
    model_flops_block: int
    model_flops_ends: int
    saved_bytes: int
    """That one block keeps from forward for backward."""
    ends_bytes: int
    """In use at the peak beside the blocks', the parameters and the optimizer."""
    pool_bytes: int
    """Reserved on the all-gather streams."""
    block_peak_bytes: int
    """That one block's backward needs above what it saved, without its parameters."""


def probes(request: PlanRequest, sizes: Iterable[int], model: Model) -> list[Probe]:
    """Return the shallow runs that a search needs: every tensor-parallel size, every checkpointing."""
    fixed = request.fixed_policy.get("ac")
    modes: tuple[CheckpointingMode, ...] = ("none", "op", "full")
    if fixed in ("none", "full", "op") or not model.blocks:
        modes = tuple(dict.fromkeys(("none", fixed or "none")))
    elif fixed is not None:
        modes = ("none", "full")
    policy = replace(request.policy, reshard="default", grad_accum=1, batch_size=_batch(request, model))
    return [
        Probe(model=request.model, tp=tp, policy=replace(policy, ac=mode)) for tp in sizes for mode in modes
    ]


def measure(probe: Probe) -> BlockProfile:
    """Run the engine on a few blocks. Raises ``ModelError`` for a model whose blocks do not repeat."""
    spec = probe.model.with_layers(_BLOCKS)
    mesh = MeshSpec(dp_shard=_SHARDS, tp=probe.tp)
    policy = probe.policy
    built = build_model(spec, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    if not built.blocks or not built.blocks[0].endswith("0"):
        raise ModelError(f"plan: {built.name} has no repeated blocks to search with")
    groups = parameter_groups(built, mesh, policy)
    numel = {group.fqn: sum(p.padded_numel for p in group.parameters) for group in groups}
    middle = built.blocks[1]
    if middle not in numel:
        raise ModelError(f"plan: the blocks of {built.name} are not sharded one by one: leave wrap at block")
    block, root = numel[middle], sum(numel.values()) - _BLOCKS * numel[middle]
    program = program_of(spec, mesh, policy)
    try:
        parts = parts_of(program, built.blocks[0].removesuffix("0"), _BLOCKS)
    except CannotCutError:
        raise ModelError(f"plan: the blocks of {built.name} do not run one after the other") from None
    ladders = [part for part in parts if part.block == 1]
    if len(ladders) != 2:
        raise ModelError(f"plan: the blocks of {built.name} do not run once forward and once backward")
    outside = [part.commands for part in parts if part.ladder is None]
    ends, update = _split(outside)
    forward, backward = (_stretch(part.commands) for part in ladders)
    memory = estimate_memory(spec, mesh, policy)
    saved = _saved(memory, middle)
    states = _states(memory)
    peak = memory.peak
    flops = sum(work.flops for work in forward.works)
    ends_bytes = peak.streams["default"] - states - root * 2 - _BLOCKS * saved
    return BlockProfile(
        tp=probe.tp,
        batch_size=policy.batch_size,
        seq_len=policy.seq_len,
        forward=forward,
        backward=backward,
        ends=_stretch(ends),
        update_bytes=sum(c.work.bytes for c in update if isinstance(c, Kernel) and c.work),
        update_host_ns=_host_ns(update),
        shard_numel=sum(numel.values()) // _SHARDS,
        block_numel=block,
        root_numel=root,
        model_flops_block=3 * flops,
        model_flops_ends=program.model_flops - 3 * flops * _BLOCKS,
        saved_bytes=saved,
        ends_bytes=max(0, ends_bytes),
        pool_bytes=peak.streams.get("all_gather_copy_in", 0),
        block_peak_bytes=_block_peak(memory, middle),
    )


def _batch(request: PlanRequest, model: Model) -> int:
    """A batch whose tokens are no size of the model's own, so that shapes tell tokens from features."""
    shapes = {size for parameter in model.module.parameters() for size in parameter.shape}
    sizes = {size // part for size in shapes for part in (1, 2, 4, 8, 16)}
    return next(batch for batch in (1, 3, 5, 7) if batch * request.policy.seq_len not in sizes or batch == 7)


def _split(outside: Sequence[list[Command]]) -> tuple[list[Command], list[Command]]:
    """Part what lies outside of blocks into the model's own work and the update of the parameters."""
    ends = [command for part in outside[:-1] for command in part]
    last = outside[-1]
    cut = next(
        (
            position
            for position, command in enumerate(last)
            if isinstance(command, Kernel) and "_foreach" in command.op
            if not _inside_fsdp(last[:position])
        ),
        len(last),
    )
    return [*ends, *last[:cut]], last[cut:]


def _inside_fsdp(before: Sequence[Command]) -> bool:
    depth = sum(isinstance(c, Enter) for c in before) - sum(isinstance(c, Leave) for c in before)
    return depth > 0


def _stretch(commands: Sequence[Command]) -> Stretch:
    works: list[Work] = []
    passed: list[tuple[str, int]] = []
    labels: list[bool] = []
    for command in commands:
        if isinstance(command, Enter):
            labels.append(command.name.startswith("FSDP::"))
        elif isinstance(command, Leave):
            if labels:
                labels.pop()
        elif isinstance(command, Collective):
            if command.mesh_dim == "tp":
                passed.append((command.op, command.payload_bytes))
        elif isinstance(command, Kernel) and command.work is not None and not any(labels):
            works.append(command.work)
    return Stretch(works=tuple(works), tensor_parallel=tuple(passed), host_ns=_host_ns(commands))


def _host_ns(commands: Iterable[Command]) -> int:
    pace = HostPace()
    cost = {Kernel: pace.operator_ns, Collective: pace.collective_ns, Enter: pace.label_ns, Leave: 0}
    return sum(cost.get(type(command), pace.event_ns) for command in commands)


def _saved(memory: MemoryEstimate, fqn: str) -> int:
    return sum(row.bytes for row in memory.peak.by_layer if row.fqn == fqn and row.category in _TOKEN_SIZED)


def _states(memory: MemoryEstimate) -> int:
    held = memory.peak.categories
    return held["sharded_parameter"] + held["optimizer_state"]


def _block_peak(memory: MemoryEstimate, fqn: str) -> int:
    """Most bytes in use during a block's backward, above what is there at its start."""
    found = [row.peak_bytes for row in memory.layers if row.fqn == fqn and row.phase == "backward"]
    held = memory.peak.categories
    fixed = _states(memory) + held["unsharded_parameter"] + held["sharded_gradient"]
    return max(0, max(found, default=0) - fixed - 2 * _saved(memory, fqn))
