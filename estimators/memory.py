"""``estimate memory``: the memory that a rank allocates and reserves in a run that has not happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.prepared import allocated_totals, reserved_totals
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.allocator.caching import allocator_settings, replay
from fsdp2prof.estimators.allocator.cuda_kernels import (
    as_in_torch,
    as_on_cuda,
    with_fused_blocks,
    with_recorded_streams,
)
from fsdp2prof.estimators.compiler.graphs import CannotCompile
from fsdp2prof.estimators.config.choices import Allocator
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.description import mesh_as_given, policy_as_given
from fsdp2prof.estimators.execution.engine import Execution
from fsdp2prof.estimators.execution.stitching import execute_stitched
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.sharding.groups import parameter_groups
from fsdp2prof.estimators.simulate.micro_batches import captured_policy
from fsdp2prof.estimators.techniques.compilation import compile_notes
from fsdp2prof.estimators.techniques.registry import check_parallelism, part_of
from fsdp2prof.estimators.verdict.memory_fit import (
    advice,
    depends_on,
    expert_padding,
    remedies,
    room_on,
    verdict,
)
from fsdp2prof.estimators.verdict.memory_notes import assumptions, outside_allocator_bytes
from fsdp2prof.estimators.verdict.memory_range import (
    MeasuredPeaks,
    active_range,
    as_measured,
    memory_class,
    of_older_software,
    unknowns,
    widest_first,
    with_prediction,
)
from fsdp2prof.manifest import DeviceInfo, RankManifest, TensorInfo
from fsdp2prof.results.estimate import EstimatedModel, MemoryEstimate, PredictedPeak, PredictedStep, Unknown
from fsdp2prof.results.peak import Remedy
from fsdp2prof.tables.allocations import AllocationTable, MemoryRecording
from fsdp2prof.tables.columns import NEVER

_NONE: Mapping[str, Any] = {}
_ANY_DEVICE = "any GPU"
"""Stands where a device's name would, for an estimate that is for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPrediction:
    """An estimate with the tables behind it, which every memory analysis reads like a recorded rank's."""

    estimate: MemoryEstimate
    recording: MemoryRecording
    manifest: RankManifest
    older: Mapping[PolicySpec, MemoryEstimate] = field(default_factory=dict)
    """Estimates under older software."""


def estimate_memory(
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    *,
    hardware: HardwareSpec | None = None,
    executed: Execution | None = None,
) -> MemoryEstimate:
    """Predict the memory of rank 0; ``hardware`` is the device that it must fit on.

    ``executed``: an execution of this same configuration, if there is one. Raises ``ModelError`` for a
    model, mesh or policy that cannot be built or is not modelled.
    """
    return predict_memory(model, mesh, policy, hardware=hardware, executed=executed).estimate


def predict_memory(
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    *,
    hardware: HardwareSpec | None = None,
    executed: Execution | None = None,
    measured: MeasuredPeaks | None = None,
    older: Mapping[str, PolicySpec] = _NONE,
    progress: Callable[[str], None] = lambda _: None,
) -> MemoryPrediction:
    """As :func:`estimate_memory`, and keep the predicted allocations.

    ``measured`` peaks, of this run or of others, take the place of the range. ``older`` are policies of the
    run under older software by its name; the range holds their peaks.
    """
    built = build_model(model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    check_parallelism(built, mesh, policy)
    part = part_of(built, mesh, policy)
    groups = parameter_groups(part, mesh, policy)  # refuses what fully_shard would
    local = replace(policy, seq_len=policy.seq_len // mesh.cp)
    if executed is None:
        execution, how, why_guessed = _executed(model, mesh, captured_policy(mesh, local))
    else:
        execution, how, why_guessed = executed, f"all {len(executed.blocks)} blocks executed", None
    padding = expert_padding(groups, policy)
    told = [
        how,
        *compile_notes(policy, why_guessed),
        *part.all_notes,
        *([] if padding is None else [padding.how]),
    ]
    if mesh.tp > 1 and built.tensor_parallel is not None:
        told.append(built.tensor_parallel.note(policy.sequence_parallel))
    told = assumptions(told, mesh, policy)
    guessed = execution.blocks if why_guessed is not None else ()
    before = {}
    for stack, other in older.items():
        progress(f"executing the model as with {stack}")
        before[other] = estimate_memory(model, mesh, other, hardware=hardware)
    prediction = _predicted(
        execution,
        told,
        mesh,
        policy,
        hardware,
        measured,
        guessed=guessed,
        padding=padding,
        margin=memory_class(mesh, policy, has_experts=bool(built.experts)),
        older={stack: before[other].peak.reserved_bytes for stack, other in older.items()},
    )
    return replace(prediction, older=before)


def _predicted(
    execution: Execution,
    told: Sequence[str],
    mesh: MeshSpec,
    policy: PolicySpec,
    hardware: HardwareSpec | None,
    measured: MeasuredPeaks | None,
    *,
    guessed: tuple[str, ...] = (),
    padding: Remedy | None = None,
    margin: str,
    older: Mapping[str, int] = _NONE,
) -> MemoryPrediction:
    """Replay an execution on a device. ``guessed`` are compiled blocks of which only a bound is known.

    ``margin`` names the prediction's in ``ranges.yaml``, ``older`` are reserved peaks under older stacks.
    """
    as_cuda = as_on_cuda(execution.recording, execution.host, of_plain_tensors=mesh.tp == 1)
    on_device = as_in_torch(as_cuda, policy.rules)
    if guessed:
        on_device = with_fused_blocks(on_device, guessed)
    released = None
    if mesh.tp > 1 and policy.records_streams:  # the answer is what may be held, not the least of it
        released, on_device = on_device, with_recorded_streams(on_device)
    device = DeviceInfo(
        type="cuda",
        name=_ANY_DEVICE if hardware is None else hardware.name,
        total_bytes=None if hardware is None else hardware.memory_bytes,
    )
    recording = replace(replay(on_device, allocator_settings(policy.allocator)), device=device.name)
    manifest = RankManifest(
        state="complete",
        world_size=mesh.world_size,
        device=device,
        tensors=[
            *_at_replayed_addresses(execution.tensors, on_device, recording),
            *_blas_workspaces(recording),
        ],
        memory_source=recording.source,
    )
    reserved = int(recording.segments.size.sum())
    room = None if hardware is None else hardware.memory_bytes - outside_allocator_bytes(mesh, policy).low
    found = [
        *unknowns(on_device, released, reserved, execution.blocks, bool(guessed), mesh, policy, room),
        *of_older_software(reserved, older, margin),
    ]
    unknown = widest_first(with_prediction(found, reserved, margin))
    if measured is not None:
        in_use = int(allocated_totals(recording.allocations, recording.events).max())
        unknown = [as_measured(reserved, in_use, measured)]
    estimate = _estimate(execution, told, recording, manifest, mesh, policy, hardware, unknown, padding)
    return MemoryPrediction(estimate=estimate, recording=recording, manifest=manifest)


def memory_of_rehearsal(
    recording: MemoryRecording,
    manifest: RankManifest,
    mesh: MeshSpec,
    policy: PolicySpec,
    *,
    hardware: HardwareSpec | None = None,
    measured: MeasuredPeaks | None = None,
) -> MemoryPrediction:
    """Predict the memory of a rank whose script ran itself on tensors without data.

    Only torch and the allocator are taken from ``policy``: everything else is as in the script. If the
    policy leaves the allocator open, the script's environment decides it, otherwise torch's default.
    Raises ``ModelError`` for parameters on the host.
    """
    if any(group.offload for group in manifest.param_groups):
        raise ModelError(
            "CPUOffloadPolicy in a script that runs itself is not modelled: its host memory looks like the "
            "device's; give the model with --model and --offload"
        )
    if policy.allocator is None:
        policy = replace(policy, allocator=_allocator_of(manifest.environment))
    parameters = [one for group in manifest.param_groups for one in group.parameters]
    execution = Execution(
        name=" ".join(manifest.script),
        parameters=sum(prod(parameter.global_shape) for parameter in parameters),
        blocks=(),
        recording=recording,
        tensors=manifest.tensors,
        host=frozenset(),
        block_of={},
    )
    how = [
        f"the script ran itself as rank {manifest.rank} of {manifest.world_size} on tensors without data, "
        "for three steps: batch, loss, checkpointing and optimizer are its own",
        "operators of the CPU took the place of CUDA's: kernels of a GPU alone may hold other buffers",
    ]
    return _predicted(execution, how, mesh, policy, hardware, measured, margin="memory_of_scripts")


def _allocator_of(environment: Mapping[str, str]) -> Allocator:
    """The segments of the CUDA allocator that a process of this environment has."""
    said = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable" if "expandable_segments:true" in said.lower().replace(" ", "") else "classic"


def _executed(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec) -> tuple[Execution, str, str | None]:
    """Execute, compiled blocks as such; say how, and why their memory has to be guessed if it has."""
    if policy.compile:
        try:
            return *execute_stitched(model, mesh, policy, graphs={}), None
        except CannotCompile as refusal:
            return *execute_stitched(model, mesh, policy), str(refusal)
    return *execute_stitched(model, mesh, policy), None


def _estimate(
    execution: Execution,
    told: Sequence[str],
    recording: MemoryRecording,
    manifest: RankManifest,
    mesh: MeshSpec,
    policy: PolicySpec,
    hardware: HardwareSpec | None,
    unknown: list[Unknown],
    padding: Remedy | None,
) -> MemoryEstimate:
    rank = analyze_memory([(0, recording, manifest)]).ranks[0]
    peak = rank.peak
    assert peak.reserved_bytes is not None
    predicted = PredictedPeak(
        reserved_bytes=peak.reserved_bytes,
        active_bytes=peak.allocated_bytes,
        step=peak.step,
        phase=peak.phase,
        fqn=peak.fqn,
        categories=peak.categories,
        by_layer=peak.by_layer,
        streams=_reserved_by_stream(recording),
        by_category=peak.by_category,
        layers=peak.layers,
        layers_folded=peak.layers_folded,
    )
    outside = outside_allocator_bytes(mesh, policy)
    room = room_on(hardware, predicted, outside, unknown)
    missing = None if room is None else max(0, -room.most_bytes)
    in_use = active_range(predicted.active_bytes, predicted.reserved_bytes, unknown)
    options = remedies(rank.remedies, predicted, mesh, policy, missing, padding)
    return MemoryEstimate(
        model=EstimatedModel(
            name=execution.name, parameters=execution.parameters, blocks=len(execution.blocks)
        ),
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        verdict=verdict(predicted, room, options, unknown),
        peak=predicted,
        steps=_steps(recording),
        layers=rank.layers,
        host_bytes=_host_bytes(execution),
        outside_allocator_bytes=outside,
        device=None if room is None else room.device,
        device_total_bytes=None if room is None else room.total_bytes,
        fits=None if room is None or room.fit == "depends" else room.fit == "fits",
        fit=None if room is None else room.fit,
        headroom_bytes=None if room is None else room.least_bytes,
        headroom_high_bytes=None if room is None else room.most_bytes,
        remedies=options,
        advice=[] if room is None or room.fit == "fits" else advice(options, missing or 0),
        assumptions=list(told),
        reserved_low_bytes=predicted.reserved_bytes + sum(one.low_bytes for one in unknown),
        reserved_high_bytes=predicted.reserved_bytes + sum(one.high_bytes for one in unknown),
        active_low_bytes=None if in_use is None else in_use[0],
        active_high_bytes=None if in_use is None else in_use[1],
        unknowns=unknown,
        depends_on=depends_on(room, outside, unknown),
    )


def _host_bytes(execution: Execution) -> int:
    """Most bytes on the host at once."""
    allocations = execution.recording.allocations
    on_host = allocations.take(np.isin(allocations.address, list(execution.host)))
    return int(allocated_totals(on_host, execution.recording.events).max())


def _at_replayed_addresses(
    tensors: Sequence[TensorInfo], before: MemoryRecording, after: MemoryRecording
) -> list[TensorInfo]:
    """Move storages known by their address in one recording to their address in its replay."""
    alive = before.allocations.free_order == NEVER
    moved = dict(
        zip(
            before.allocations.address[alive].tolist(),
            after.allocations.address[alive].tolist(),
            strict=True,
        )
    )
    return [
        TensorInfo(
            category=tensor.category,
            fqn=tensor.fqn,
            name=tensor.name,
            address=moved[tensor.address],
            nbytes=tensor.nbytes,
        )
        for tensor in tensors
        if tensor.address in moved
    ]


def _blas_workspaces(recording: MemoryRecording) -> Iterator[TensorInfo]:
    """Yield the workspaces that matrix products keep permanently."""
    allocations = recording.allocations
    rows = allocations.op.matches(lambda name: name.endswith("(workspace)")) & (
        allocations.free_order == NEVER
    )
    for address, size in zip(
        allocations.address[rows].tolist(), allocations.size[rows].tolist(), strict=True
    ):
        yield TensorInfo(category="temporary", fqn="", name="cuBLAS workspace", address=address, nbytes=size)


def _steps(recording: MemoryRecording) -> list[PredictedStep]:
    active = allocated_totals(recording.allocations, recording.events)
    reserved = reserved_totals(recording.segments, recording.events)
    assert reserved is not None
    steps = recording.steps
    return [
        PredictedStep(
            step=step,
            reserved_bytes=int(reserved[orders].max()),
            active_bytes=int(active[orders].max()),
        )
        for step, start, end in zip(steps.step.tolist(), steps.start_ns, steps.end_ns, strict=True)
        if step > 0 and (orders := _orders_within(recording.allocations, start, end))
    ]


def _orders_within(allocations: AllocationTable, start_ns: int, end_ns: int) -> slice:
    """Orders between the first and the last event of an interval of host time."""
    born = (allocations.alloc_ns >= start_ns) & (allocations.alloc_ns < end_ns)
    orders = allocations.alloc_order[born]
    return slice(int(orders.min()), int(orders.max()) + 1)


def _reserved_by_stream(recording: MemoryRecording) -> dict[str, int]:
    names = _stream_names(recording)
    sums: dict[str, int] = {}
    for stream, size in zip(
        recording.segments.stream.tolist(), recording.segments.size.tolist(), strict=True
    ):
        sums[names[stream]] = sums.get(names[stream], 0) + size
    return sums


def _stream_names(recording: MemoryRecording) -> dict[int, str]:
    """Name the streams by FSDP's first allocation on them."""
    allocations = attribute(recording, recording.steps).allocations
    names = {0: "default"}
    for stream in np.unique(allocations.stream).tolist()[1:]:
        activity = allocations.activity[int(np.flatnonzero(allocations.stream == stream)[0])]
        reduces = "all_reduce" if "reduce_scatter" in names.values() else "reduce_scatter"
        names[stream] = "all_gather_copy_in" if activity == "all_gather" else reduces
    return names
