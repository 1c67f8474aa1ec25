"""From a description of a run that has not happened to its estimates.

The description is checked before torch is imported, so that a wrong option is reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.documents import read_text
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.inputs import EstimateSpec, load_config, make_spec
from fsdp2prof.estimators.config.measured import Measured, MeasuredRun, read_measured
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.pipeline import LayersPerStage
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import stack_named, with_stack
from fsdp2prof.estimators.config.trainers import read_trainer_files
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.models.build import builtin_of
from fsdp2prof.estimators.models.builtin_plan import outline_of
from fsdp2prof.estimators.of_run.policy import norm_of_run, values_of_run
from fsdp2prof.estimators.sharding.wrapping import EMBEDDING, HEAD, NORM
from fsdp2prof.estimators.techniques.registry import check_parallelism
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec
from fsdp2prof.estimators.verdict.memory_range import MeasuredPeaks
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.execution_trace import read_execution_trace
from fsdp2prof.readers.run.directory import open_run, read_sharded_manifests
from fsdp2prof.readers.run.documents import read_lengths
from fsdp2prof.results.estimate import (
    CheckpointEstimate,
    CommEstimate,
    ConfigRead,
    MemoryEstimate,
    PackingEstimate,
    StepEstimate,
)
from fsdp2prof.units import format_bytes
from fsdp2prof.workflows.rehearsed import RehearsedRank, rehearsed
from fsdp2prof.workflows.saved_estimates import refuse_existing_run, save_run, save_step_run

if TYPE_CHECKING:
    from fsdp2prof.estimators.config.cluster import Cluster
    from fsdp2prof.estimators.step import Anchor, StepPrediction
    from fsdp2prof.estimators.timeline.calibrated import Calibration


_GIB = 1 << 30
_BESIDE_A_TRACE = {"batch_size", "seq_len", "grad_accum", "param_dtype"}
"""Options of a policy that say something of an execution trace's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A run as it was described: by options, a file, a recorded run."""

    values: Mapping[str, Any]
    """As :func:`~fsdp2prof.estimators.config.inputs.make_spec` takes them."""
    manifest: RankManifest | None
    """Of the recorded run, if there is one."""
    read: ConfigRead | None = None
    """How the trainer's configuration was read, if there is one."""
    given: frozenset[str] = frozenset()
    """Options given by the user, by name."""
    command: tuple[str, ...] = ()
    """Of the recorded run."""
    rehearsal: RehearsedRank | None = None
    """Allocations of the training command itself, if the estimate ran it."""
    older: tuple[Described, ...] = ()
    """The run under older software, which its files do not rule out."""

    @property
    def is_recorded_only(self) -> bool:
        """Whether only the recorded run determines the model."""
        return self.manifest is not None and "model" not in self.values

    def of_execution_trace(self, path: Path) -> Described:
        """Return the description with a file's operators as the model. Raises ``UsageError`` for options
        that they determine."""
        policy = self.values.get("policy", {})
        if idle := sorted(policy.keys() - _BESIDE_A_TRACE):
            raise UsageError(
                f"{idle[0]} would have no effect: the operators of {path.name} are used as recorded"
            )
        if not {"batch_size", "seq_len"} <= policy.keys():
            raise UsageError(f"{path.name} has no token count: add --batch-size and --seq-len of a rank")
        return replace(self, values={**self.values, "model": f"execution trace {path.name}"})

    def changed(self, values: Mapping[str, Any]) -> Described:
        """Return the description with other values of ``make_spec``; ``policy`` names only options that
        differ.

        Another mesh sets its own world size.
        """
        policy = {**self.values.get("policy", {}), **values.get("policy", {})}
        kept = {
            name: value for name, value in self.values.items() if "mesh" not in values or name != "world_size"
        }
        return replace(self, values={**kept, **values, "policy": policy})

    def under_older(self, spec: EstimateSpec) -> dict[str, EstimateSpec]:
        """Return the run under each older stack whose settings differ from those of ``spec``."""
        found: dict[str, EstimateSpec] = {}
        for described in self.older:
            other = described.spec()
            if other.policy.grad_accum == 1:
                other = replace(other, policy=replace(other.policy, sync=spec.policy.sync))
            if all(other.policy != one.policy for one in (spec, *found.values())):
                found[str(described.values["stack"])] = other
        return found

    def spec(self, **more: Any) -> EstimateSpec:
        """Build and check it; ``more`` overrides values. Raises ``ModelError`` and ``UsageError``."""
        if self.is_recorded_only:
            raise UsageError("--from-run needs the model too: a recorded run does not hold it; add --model")
        values = {**self.values, **{key: value for key, value in more.items() if value is not None}}
        if self.read is not None and "seq_len" not in values["policy"]:
            raise UsageError("no file has the sequence length: add --seq-len")
        head = _head_of(values.get("model"))
        layers = values.get("layers") or head.pop("layers", None)
        head.pop("layers", None)
        stages: LayersPerStage | None = values.get("stages")
        if stages is not None and "pp_schedule" not in self.given:
            decided = with_stack(values.get("stack"), values["policy"], pipelined=True)
            ends = decided.get("pp_end_layers", 0)
            schedule = stages.schedule(layers, ends)
            values = {**values, "policy": {**values["policy"], "pp_schedule": schedule}}
        read = {*head.get("own_kernels", ())} & values.get("policy", {}).keys() - self.given
        if self.read is not None and read:
            kept = {name: value for name, value in values["policy"].items() if name not in read}
            spec = make_spec({**values, "policy": kept}, **head)
            said = f"{' and '.join(sorted(read))} of the files are those of the model's own modules here"
            spec = replace(spec, notes=(*spec.notes, said))
        else:
            spec = make_spec(values, **head)
        _refuse_early(spec)
        return spec


def _refuse_early(spec: EstimateSpec) -> None:
    """Raise ``ModelError`` for options that a built-in model does not support, before torch is loaded."""
    if spec.model.kind == "builtin":
        check_parallelism(outline_of(builtin_of(spec.model)), spec.mesh, spec.policy)


_HUGGING_FACE_NAMES = {"tok_embeddings": EMBEDDING, "norm": NORM, "output": HEAD}
"""Modules of transformers' decoders, by the names that stacks have for them."""


_KERNELS = ("norm", "mlp")
"""Options for modules of the built-in models; other models have modules of their own."""


def _head_of(source: object) -> dict[str, Any]:
    """Whether a model ties head and embedding, the options for modules that it has of its own, and its
    names of modules that stacks wrap.

    Raises ``ModelError`` for an unknown built-in model.
    """
    if not source:
        return {}
    model = ModelSpec(source=str(source))
    if model.kind == "builtin":
        config = builtin_config(model.source)
        biased = config.experts is not None and config.experts.bias  # gpt-oss: another activation, clamped
        own = _KERNELS if config.family == "gpt" else _KERNELS[1:] if biased else ()
        return {"tied": config.tied, "own_kernels": own, "layers": config.layers}
    if model.kind == "factory":
        return {"tied": True, "own_kernels": _KERNELS}  # where its head is, is not known
    known = model.configuration()
    try:
        text = json.dumps(known) if isinstance(known, dict) else read_text(known)
        tied = '"tie_word_embeddings": false' not in text
        found = re.search(r'"num_hidden_layers": *(\d+)', text)  # of the text model, the first to have it
        layers = None if found is None else int(found[1])
        return {"tied": tied, "own_kernels": _KERNELS, "names": _HUGGING_FACE_NAMES, "layers": layers}
    except ValueError:
        return {}  # building the model says why


def describe(
    *,
    config: Path | None = None,
    from_run: Path | None = None,
    trainer_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
    given: Mapping[str, Any],
    policy: Mapping[str, Any],
) -> Described:
    """Combine the settings of a recorded run, a trainer's files, a file and options; later ones take
    precedence.

    ``command`` starts a training: it is run as one rank on tensors without data, and replaces them.
    ``given`` are values of ``make_spec``, ``policy`` options of ``PolicySpec``. Raises
    ``RunDirectoryError``, ``InputError`` and ``ModelError`` for unreadable input.
    """
    if command:
        _refuse_beside_a_command(
            {**given, "--from-run": from_run, "--config": config, "--from-config": trainer_files or None},
            command[0],
        )
        _refuse_decided_by_a_script(policy)
    manifest = None if from_run is None else _manifest(from_run)
    of_file = {} if config is None else load_config(config)
    trainer = None
    if trainer_files:
        trainer = read_trainer_files(
            trainer_files,
            overrides=overrides,
            world_size=given.get("world_size"),
            stack=given.get("stack") or of_file.get("stack"),
            stated={*of_file.get("policy", {}), *policy},
        )
        of_file = {
            **trainer.values,
            **of_file,
            "policy": {**trainer.values["policy"], **of_file.get("policy", {})},
        }
        _refer_to_the_given_model(of_file, given.get("model"), trainer.values.get("model"))
    elif overrides:
        raise UsageError("--override changes a key of --from-config: name the file")
    has_model = "model" in of_file or "model" in given
    if trainer is not None and not has_model:
        raise ModelError(trainer.no_model)
    told = {**of_file.get("policy", {}), **policy}
    recorded = values_of_run(manifest, **_micro_batches(told)) if manifest is not None and has_model else {}
    source = given.get("model") or of_file.get("model")
    if manifest is not None and source and ModelSpec(source=str(source)).kind == "builtin":
        norm = norm_of_run(manifest)
        recorded["policy"] |= {} if norm is None else {"norm": norm}
    merged = {**recorded.get("policy", {}), **told}
    rehearsal = rehearsed(command, given.get("world_size")) if command else None
    older, before = [], None if trainer is None else trainer.stack_before
    while before is not None:
        older.append(
            describe(
                config=config,
                from_run=from_run,
                trainer_files=trainer_files,
                overrides=overrides,
                given={**given, "stack": before},
                policy=policy,
            )
        )
        before = stack_named(before).before
    return Described(
        values={**recorded, **of_file, **given, "policy": merged},
        manifest=manifest if rehearsal is None else rehearsal.manifest,
        command=() if from_run is None else tuple(open_run(from_run).info.command),
        rehearsal=rehearsal,
        read=None if trainer is None else trainer.read,
        given=frozenset((*given, *policy)),
        older=tuple(older),
    )


def _refer_to_the_given_model(of_file: dict[str, Any], given: Any, named: Any) -> None:
    """Where a trainer's file names the trained model as its own reference, so does a model given instead."""
    if given is not None and named is not None and of_file["policy"].get("extra_model") == named:
        of_file["policy"]["extra_model"] = given


def _refuse_decided_by_a_script(policy: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for options of a policy that a script which runs itself decides."""
    idle = sorted(policy.keys() - {"torch", "allocator"})
    if idle:
        raise UsageError(f"--{idle[0].replace('_', '-')} would have no effect: the script decides it")


def _refuse_beside_a_command(given: Mapping[str, Any], word: str) -> None:
    """Raise ``UsageError`` for options that the command determines."""
    idle = [name for name in given if given[name] is not None and name not in ("world_size", "hardware")]
    if idle:
        name = idle[0] if idle[0].startswith("-") else f"--{idle[0].replace('_', '-')}"
        raise UsageError(
            f"{name} would have no effect: {word!r} is read as a command; a model is --model {word}"
        )


def _micro_batches(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's settings of micro-batches, checked."""
    given = {name: policy[name] for name in ("grad_accum", "sync") if name in policy}
    PolicySpec.from_mapping(given)
    return given


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
    _refuse_decided_by_a_script(described.values.get("policy", {}))
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

        return estimate_comm_of_run(described.manifest, **_micro_batches(described.values["policy"]))
    spec = described.spec()
    from fsdp2prof.estimators.communication import estimate_comm

    sync = None if weight_sync is None else WeightSyncSpec.parse(weight_sync)
    return _noted(estimate_comm(spec.model, spec.mesh, spec.policy, sync), spec, described, "comm")


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
    return _noted(prediction.estimate, spec, described, "step")


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


def _manifest(run: Path) -> RankManifest:
    """Manifest of the lowest rank with parameter groups."""
    return next(manifest for manifest in read_sharded_manifests(run).values() if manifest.param_groups)
