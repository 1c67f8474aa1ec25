"""From a description of a run that has not happened to its estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fsdp2prof.errors import UsageError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.inputs import EstimateSpec
from fsdp2prof.estimators.config.measured import Measured, MeasuredRun, read_measured
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec
from fsdp2prof.estimators.verdict.memory_range import MeasuredPeaks
from fsdp2prof.readers.execution_trace import read_execution_trace
from fsdp2prof.readers.run.documents import read_lengths
from fsdp2prof.results.estimate import (
    CheckpointEstimate,
    CommEstimate,
    MemoryEstimate,
    PackingEstimate,
    StepEstimate,
)
from fsdp2prof.units import format_bytes
from fsdp2prof.workflows.description import Described, micro_batches_of, refuse_decided_by_a_script
from fsdp2prof.workflows.rehearsed import RehearsedRank, rehearsed
from fsdp2prof.workflows.saved_estimates import refuse_existing_run, save_run, save_step_run

if TYPE_CHECKING:
    from fsdp2prof.estimators.config.cluster import Cluster
    from fsdp2prof.estimators.step import Anchor, StepPrediction
    from fsdp2prof.estimators.timeline.calibrated import Calibration


_GIB = 1 << 30


def estimate_memory(
    described: Described,
    *,
    hardware: str | None = None,
    measured: Measured | Sequence[MeasuredRun] | None = None,
    save: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> MemoryEstimate:
    """Estimate peak memory; ``save`` writes memory and collectives as a run, ``progress`` gets the
    alternative that is executed.

    ``measured`` is the run's own peak, which replaces the range and determines the verdict; or peaks of
    other runs, whose prediction errors give the range. Raises ``ModelError`` for settings that cannot be
    estimated, ``RunDirectoryError`` for an existing run.
    """
    if save is not None:
        refuse_existing_run(save)
    if described.rehearsal is not None or described.is_recorded_only:
        return _memory_of_rehearsal(described, hardware=hardware, measured=measured, save=save)
    spec = described.spec(hardware=hardware)
    peaks = None if measured is None else _peaks(described, measured, spec.hardware)
    from fsdp2prof.estimators.communication import estimate_comm
    from fsdp2prof.estimators.memory import predict_memory
    from fsdp2prof.estimators.memory_trials import with_tried_changes

    others = {} if peaks is not None else described.under_older(spec)
    prediction = predict_memory(
        spec.model,
        spec.mesh,
        spec.policy,
        hardware=spec.hardware,
        measured=peaks,
        older={stack: other.policy for stack, other in others.items()},
        progress=progress,
    )
    if save is not None:
        save_run(save, prediction, estimate_comm(spec.model, spec.mesh, spec.policy))
    estimate = prediction.estimate
    if spec.hardware is not None:
        estimate = with_tried_changes(
            estimate,
            spec.model,
            spec.mesh,
            spec.policy,
            spec.hardware,
            allocations=len(prediction.recording.allocations),
            known=prediction.older,
            progress=progress,
        )
    return _noted(estimate, spec, described, "memory")


def _memory_of_rehearsal(
    described: Described,
    *,
    hardware: str | None,
    measured: Measured | Sequence[MeasuredRun] | None,
    save: Path | None,
) -> MemoryEstimate:
    """Estimate from the allocations of the script itself, or of the recorded command, run as one rank."""
    if save is not None:
        raise UsageError("--save-run needs --model: `fsdp2prof rehearse --meta` keeps the run of a script")
    if measured is not None and not isinstance(measured, Measured):
        raise UsageError("--measured FILE needs --model: its runs differ in options")
    refuse_decided_by_a_script(described.values.get("policy", {}))
    name = hardware or described.values.get("hardware")
    device = None if name is None else HardwareSpec.parse(str(name))
    peaks = None if measured is None else _peaks(described, measured, device)
    found = described.rehearsal or _again(described)
    from fsdp2prof.estimators.memory import memory_of_rehearsal

    groups = found.manifest.param_groups
    first = groups[0]
    mesh = MeshSpec(dp_replicate=first.replicate_world_size, dp_shard=first.shard_world_size)
    policy = PolicySpec.from_mapping(dict(described.values.get("policy", {})))
    prediction = memory_of_rehearsal(
        found.recording,
        found.manifest,
        mesh,
        policy,
        hardware=device,
        measured=peaks,
    )
    known = {"torch": policy.torch, "allocator": policy.allocator}
    return replace(prediction.estimate, policy=policy_as_recorded(**known))


def _again(described: Described) -> RehearsedRank:
    """Rehearse the command of a recorded run."""
    command = described.command
    if not command:
        raise UsageError("--from-run: the run has no recorded command; add --model")
    assert described.manifest is not None
    return rehearsed(command, described.manifest.world_size)


def _peaks(
    described: Described, measured: Measured | Sequence[MeasuredRun], hardware: HardwareSpec | None
) -> MeasuredPeaks:
    """Return the memory measurement: this run's own peak, or the errors of predictions of other runs."""
    if isinstance(measured, Measured):
        if hardware is not None and measured.value * _GIB > hardware.memory_bytes:
            room = format_bytes(hardware.memory_bytes)
            raise UsageError(f"--measured {measured}: more than {hardware.name} has, {room}")
        return MeasuredPeaks(own_bytes=round(measured.value * _GIB))
    from fsdp2prof.estimators.memory import predict_memory

    specs = [described.changed(run.values).spec() for run in measured]
    peaks = [predict_memory(one.model, one.mesh, one.policy).estimate.peak.reserved_bytes for one in specs]
    pairs = zip(measured, peaks, strict=True)
    return MeasuredPeaks(off_fracs=tuple(run.measured.value * _GIB / peak - 1 for run, peak in pairs))


def estimate_communication(described: Described, *, weight_sync: str | None = None) -> CommEstimate:
    """Estimate the collectives of a step; without a model those of the recorded parameter groups.

    ``weight_sync`` describes inference engines that receive the weights. Raises ``ModelError`` for
    settings that cannot be estimated.
    """
    if described.manifest is not None and described.is_recorded_only:
        from fsdp2prof.estimators.of_run.communication import estimate_comm_of_run

        return estimate_comm_of_run(described.manifest, **micro_batches_of(described.values["policy"]))
    spec = described.spec()
    from fsdp2prof.estimators.communication import estimate_comm

    sync = None if weight_sync is None else WeightSyncSpec.parse(weight_sync)
    return _noted(estimate_comm(spec.model, spec.mesh, spec.policy, sync), spec, described, "comm")


_WITHOUT_MEMORY = (
    "Whether it fits in memory is not checked here: `fsdp2prof estimate memory` takes the same options."
)


def _of_execution_trace(path: Path, spec: EstimateSpec, cluster: Cluster) -> StepPrediction:
    from fsdp2prof.estimators.step import simulate_program
    from fsdp2prof.estimators.timeline.execution_trace import program_of_trace

    trace = read_execution_trace(path)
    policy = spec.policy
    program = program_of_trace(trace, spec.mesh, policy.sequences * policy.seq_len * policy.grad_accum)
    made = simulate_program(program, spec.model, spec.mesh, policy, cluster)
    said = (
        f"operators, shapes and their order are those of {path.name} (schema {trace.version}); the "
        "optimizer's bytes and the collectives are scaled to the mesh; streams follow from FSDP2's labels"
    )
    estimate = replace(made.estimate, assumptions=[said, *made.estimate.assumptions[1:]])
    return replace(made, estimate=estimate)


def estimate_step(
    described: Described,
    cluster: Cluster | None,
    *,
    calibrate: Path | None = None,
    execution_trace: Path | None = None,
    measured: Measured | Sequence[MeasuredRun] | None = None,
    save: Path | None = None,
) -> StepEstimate:
    """Estimate the time of a step; ``save`` writes it as a run.

    ``execution_trace`` is a file whose operators replace the model's. ``calibrate`` is a recorded run of
    the same model whose measured costs replace the models'; without a ``cluster`` it is on CPUs. Raises
    ``ModelError`` for settings that cannot be estimated, ``UsageError`` for a run on accelerators without
    ``cluster``, and ``RunDirectoryError`` for an existing run.
    """
    if save is not None:
        refuse_existing_run(save)
    spec = described.spec()
    from fsdp2prof.estimators.step import predict_step, with_older

    calibration = None
    if calibrate is not None:
        calibration, cluster = _calibrated(spec, calibrate, cluster)
    if cluster is None:
        raise UsageError("estimate step needs an accelerator: add --hardware, for example h100-sxm")
    if execution_trace is not None:
        prediction = _of_execution_trace(execution_trace, spec, cluster)
    else:
        own = measured if isinstance(measured, Measured) else None
        others = [] if measured is None or own is not None else anchors_of(described, measured)
        prediction = predict_step(spec.model, spec.mesh, spec.policy, cluster, calibration, own, others)
        if calibration is None and measured is None:
            older = described.under_older(spec)
            steps = {
                stack: predict_step(other.model, other.mesh, other.policy, cluster).estimate
                for stack, other in older.items()
            }
            prediction = replace(prediction, estimate=with_older(prediction.estimate, steps))
    if save is not None:
        save_step_run(save, prediction)
    noted = _noted(prediction.estimate, spec, described, "step")
    return noted if execution_trace is not None else replace(noted, verdict=[*noted.verdict, _WITHOUT_MEMORY])


def anchors_of(described: Described, measured: Measured | Sequence[MeasuredRun]) -> list[Anchor]:
    """Return the measured runs, as differences from the described one.

    Raises ``ModelError`` for a run that cannot be predicted.
    """
    from fsdp2prof.estimators.step import program_of

    anchors: list[Anchor] = []
    for run in [MeasuredRun(values={}, measured=measured)] if isinstance(measured, Measured) else measured:
        spec = described.changed(run.values).spec()
        program = program_of(spec.model, spec.mesh, spec.policy)
        anchors.append((run.measured, program, spec.model, spec.mesh, spec.policy))
    return anchors


def corrected(cluster: Cluster, path: Path) -> tuple[Cluster, str]:
    """Return a cluster as the measured runs of a file have it, and how far off their predictions were.

    Raises ``UsageError`` for a number of memory, and as :func:`anchors_of`.
    """
    from fsdp2prof.estimators.step import anchored_on

    runs = read_measured(path)
    if any(run.measured.is_memory for run in runs):
        raise UsageError(f"--measured {path}: a peak does not determine time; give step_ms, mfu or tokens/s")
    found = anchored_on(anchors_of(Described(values={}, manifest=None), runs), cluster, exact=False)
    return found.cluster, found.note


def estimate_checkpoint(
    described: Described, *, bandwidth_bytes_per_s: int | None = None
) -> CheckpointEstimate:
    """Estimate the size of a distributed checkpoint, and its time at the bandwidth of one writing rank.

    Raises ``ModelError`` for settings that cannot be estimated.
    """
    spec = described.spec()
    from fsdp2prof.estimators import checkpoint

    estimate = checkpoint.estimate_checkpoint(
        spec.model, spec.mesh, spec.policy, bandwidth_bytes_per_s=bandwidth_bytes_per_s
    )
    return _noted(estimate, spec, described, "checkpoint")


def estimate_packing(lengths: Path, *, seq_len: int, batch_size: int) -> PackingEstimate:
    """Estimate the cost of padding for the documents whose lengths a file lists.

    Raises ``ModelError`` for a file without lengths.
    """
    from fsdp2prof.estimators import packing

    return packing.estimate_packing(read_lengths(lengths), seq_len=seq_len, batch_size=batch_size)


_Estimate = TypeVar("_Estimate", MemoryEstimate, CommEstimate, StepEstimate, CheckpointEstimate)


_CLUSTER = frozenset({"hardware", "gpus_per_node", "network", "nics_per_node"})
_CHECKPOINTED = frozenset(
    {"wrap", "orig_dtype", "optimizer", "optimizer_impl", "lora", "trainable", "extra_model"}
)


def _idle(verb: str, given: frozenset[str], model: ModelSpec) -> list[str]:
    """Say which options of a run's description were given and change nothing in one kind of estimate."""
    options = options_of(PolicySpec)
    memory_only = {name for name, declared in options.items() if declared.memory_only}
    idle = {
        "memory": _CLUSTER - {"hardware"} | {"expert_dispatch"},
        "comm": memory_only | _CLUSTER | {"attention", "norm", "mlp", "fused_kernels", "expert_dispatch"},
        "step": memory_only,
        "checkpoint": _CLUSTER | (options.keys() - _CHECKPOINTED),
    }[verb]
    if model.kind != "builtin" or builtin_config(model.source).latent is not None:
        idle |= {"repeat_kv"}  # of the built-in models' attention
    named = [f"--{name.replace('_', '-')}" for name in sorted(given & idle)]
    return [f"without effect on this estimate: {', '.join(named)}"] if named else []


def _noted(estimate: _Estimate, spec: EstimateSpec, described: Described, verb: str) -> _Estimate:
    """An estimate with the assumptions of its input, and the inputs without effect."""
    return replace(
        estimate,
        assumptions=[*estimate.assumptions, *spec.notes, *_idle(verb, described.given, spec.model)],
        config=described.read,
    )


def _calibrated(spec: EstimateSpec, run: Path, cluster: Cluster | None) -> tuple[Calibration, Cluster]:
    """Measure the costs of a recorded run's commands; without a cluster, on CPUs of its own kind."""
    from fsdp2prof.analyzers.whatif.what_if import replay_job
    from fsdp2prof.estimators.of_run.calibration import calibration_of, recorded_configuration, recorded_cpus
    from fsdp2prof.estimators.step import program_of
    from fsdp2prof.workflows.job.job_files import open_job
    from fsdp2prof.workflows.whatif import recorded_ranks

    ranks, _ = recorded_ranks(open_job(run))
    job = replay_job([(one.program, one.analysis.summary) for one in ranks]).job
    if cluster is None:
        if job[0].on_device:
            raise UsageError(f"--calibrate {run}: recorded on accelerators; name them with --hardware")
        cluster = recorded_cpus(spec.mesh)
    tables = [one.tables for one in ranks]
    model, mesh, policy = recorded_configuration(tables[0], spec.model, spec.policy)
    program = program_of(model, mesh, policy)
    recorded_on = cluster.with_attention_of(policy)
    return calibration_of(tables, job, program, recorded_on, str(run)), cluster
