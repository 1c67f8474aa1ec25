"""``estimate step --calibrate``: measured costs of a recorded run, for runs of the same model.

The recorded configuration is captured like any other. The ratio of the recorded times of its commands to
their modelled times is applied to the commands of other batches, layers, meshes and policies.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.whatif.program import Job, Points
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.of_run.policy import values_of_run
from fsdp2prof.estimators.simulate.micro_batches import with_all_commands
from fsdp2prof.estimators.simulate.program import Kernel, Program
from fsdp2prof.estimators.timeline.calibrated import Calibration
from fsdp2prof.estimators.timeline.costs import Place, family_of, kernel_ns, places_of
from fsdp2prof.manifest import RankManifest


def recorded_cpus(mesh: MeshSpec) -> Cluster:
    """Return a cluster for a run on CPUs that were recorded: its figures only weigh operators."""
    hardware = HardwareSpec(
        name="the recorded CPU",
        memory_mib=0,
        achieved_memory_gb_per_s=10,
        multiprocessors=1,
        peak_tflops={},
        achieved_tflops={"fp32": 0.05, "bf16": 0.05, "fp16": 0.05},
        attention_tflops=0.02,
        on_host=True,
        source="its recorded run",
    )
    return Cluster(hardware=hardware, gpus_per_node=mesh.world_size)


def recorded_configuration(
    tables: RankTables, model: ModelSpec, policy: PolicySpec | None = None
) -> tuple[ModelSpec, MeshSpec, PolicySpec]:
    """Return a recorded rank's configuration: mesh and policy from its manifest, batch and sequence from
    its shapes.

    ``policy`` gives the settings that a recording does not contain (checkpointing, clipping). Raises
    ``ModelError`` for a run without a manifest, parameter groups or recorded shapes of attention or
    embeddings.
    """
    manifest = tables.manifest
    if manifest is None:
        raise ModelError(
            f"{tables.trace.source}: calibration needs a run recorded by fsdp2prof; this one has no manifest"
        )
    values = values_of_run(manifest)
    batch, length = _batch_and_length(tables, manifest)
    known = {**values["policy"], "batch_size": batch, "seq_len": length}
    if tables.trace.device.type == "cpu":
        known["optimizer_impl"] = "for-loop"  # torch's own choice there
    base = policy or PolicySpec()
    spec = PolicySpec.from_mapping(known)
    spec = replace(spec, ac=base.ac, clip_grad=base.clip_grad)
    mesh = MeshSpec(**values["mesh"])
    return _as_deep(model, _layers(manifest)), mesh, spec


def calibration_of(
    ranks: Sequence[RankTables], job: Job, program: Program, cluster: Cluster, source: str
) -> Calibration:
    """Compare a recording with what ``program``, captured of its configuration, costs by the models.

    ``job`` are the same ranks, ready to run again.
    """
    on_host = not job[0].on_device
    program = with_all_commands(program)
    places = places_of(program)
    counted: dict[Place, int] = defaultdict(int)
    modelled: dict[Place, float] = defaultdict(float)
    for command, place in zip(program.commands, places, strict=True):
        if isinstance(command, Kernel):
            counted[place] += 1
            if command.work is not None and command.work.bytes:
                modelled[place] += kernel_ns(command.work, cluster.hardware)
    host, computed, steps = _recorded(ranks, job)
    rest = sum(time for place, time in host.items() if not counted[place])
    factor = {p: computed.get(p, 0.0) / modelled[p] for p in modelled if modelled[p] and computed.get(p)}
    issued = {
        place: max(0.0, host.get(place, 0.0) - (computed.get(place, 0.0) if on_host else 0.0)) / count
        for place, count in counted.items()
        if count and place in host
    }
    low, middle, high = np.percentile(steps, [25, 50, 75]).tolist()
    return Calibration(
        source=source,
        on_host=on_host,
        kernel_factor=factor,
        operator_ns=issued,
        rest_ns=round(rest),
        collectives=_collectives(job),
        low_frac=low / middle,
        high_frac=high / middle,
        steps=len(steps),
    )


def _as_deep(model: ModelSpec, layers: int | None) -> ModelSpec:
    """Return the model with the recorded number of blocks; a factory without ``layers`` has its own
    number."""
    fixed = model.kind == "factory" and model.layers is None
    return model if layers is None or fixed else replace(model, layers=layers)


def _batch_and_length(tables: RankTables, manifest: RankManifest) -> tuple[int, int]:
    """Of the first attention; of a model without one, of the embedding that looks up the most tokens."""
    names = tables.trace.events.name.take(tables.trace.shapes.event)
    looked_up: list[tuple[int, int]] = []
    for name, dims in zip(names.to_list(), tables.trace.shapes.dims.to_list(), strict=True):
        if name and dims and "scaled_dot_product" in name and "backward" not in name:
            shape = json.loads(dims)[0]
            if isinstance(shape, list) and len(shape) == 4:
                return int(shape[0]), int(shape[2])
        elif name == "aten::embedding" and dims:
            match json.loads(dims):
                case [_, [int(batch), int(length)], *_]:
                    looked_up.append((batch, length))
    if looked_up:
        return max(looked_up, key=lambda size: size[0] * size[1])
    raise ModelError(
        f"rank {manifest.rank}: no shapes of an attention or of an embedding were recorded, so its batch and "
        "sequence length are unknown; record with --shapes"
    )


def _layers(manifest: RankManifest) -> int | None:
    """Repeated blocks: the most groups whose names differ only in a number."""
    families: dict[str, set[str]] = defaultdict(set)
    for group in manifest.param_groups:
        if any(part.isdecimal() for part in group.fqn.split(".")):
            families[family_of(group.fqn, None)[0]].add(group.fqn)
    return max(map(len, families.values()), default=None)


def _recorded(
    ranks: Sequence[RankTables], job: Job
) -> tuple[dict[Place, float], dict[Place, float], list[int]]:
    """Return host time and compute time by place, means of a step, and the steps' durations.

    On a CPU, compute time is the operators' time, which is part of the host time.
    """
    host: dict[Place, float] = defaultdict(float)
    computed: dict[Place, float] = defaultdict(float)
    windows = 0
    durations: list[int] = []
    for tables, program in zip(ranks, job, strict=True):
        spans = list(zip(tables.analysed.start_ns.tolist(), tables.analysed.end_ns.tolist(), strict=True))
        windows += len(spans)
        durations += (tables.windows.end_ns - tables.windows.start_ns).tolist()
        inside = [(a <= program.points.begin) & (program.points.end <= b) for a, b in spans]
        points = program.points.take(np.any(inside, axis=0) if inside else np.empty(0, dtype=np.int64))
        own = _places(tables, points)
        for work_ns, place in zip(points.work_ns.tolist(), own, strict=True):
            host[place] += work_ns
        if program.on_device:
            table = program.activities
            ran = table.kind.equals("compute") | table.kind.equals("fsdp_copy")
            table = table.take(ran & np.isin(table.step, program.steps))
            columns = table.fqn.to_list(), table.phase.to_list(), table.duration.tolist()
            for fqn, phase, duration in zip(*columns, strict=True):
                computed[family_of(fqn, phase)] += duration
        else:
            for place, time in zip(own, _operator_time(tables, points), strict=True):
                computed[place] += time
    return (
        {place: time / windows for place, time in host.items()},
        {place: time / windows for place, time in computed.items()},
        durations,
    )


def _places(tables: RankTables, points: Points) -> list[Place]:
    phases = tables.phases
    middle = (points.begin + points.end) // 2
    row = np.full(len(points), -1, dtype=np.int64)
    for thread in intervals.distinct(phases.thread).tolist():
        found = find_rows(phases, np.full(len(points), thread), middle)
        row = np.where(found >= 0, found, row)
    fqn, phase = phases.fqn.lookup(row).to_list(), phases.phase.lookup(row).to_list()
    return [family_of(one, when) for one, when in zip(fqn, phase, strict=True)]


def _operator_time(tables: RankTables, points: Points) -> list[int]:
    ran = intervals.union(tables.work.start_ns, tables.work.end_ns)
    times: list[int] = intervals.covered(ran, points.begin, points.begin + points.work_ns).tolist()
    return times


def _collectives(job: Job) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Times by payload: medians of transfers; on a CPU means of how long the host was blocked, waiting for
    other ranks included.
    """
    found: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for program in job:
        points, table = program.points, program.activities
        time = table.transfer_ns
        if not program.on_device:
            time = np.zeros(len(table), dtype=np.int64)
            awaits = points.awaits >= 0
            blocked = points.end - points.begin - points.work_ns
            np.add.at(time, points.awaits[awaits], blocked[awaits])
        sent = table.kind.equals("collective") & (table.payload_bytes > 0)
        rows = np.flatnonzero(sent & np.isin(table.step, program.steps))
        columns = (table.group_size[rows], table.payload_bytes[rows], time[rows])
        for op, (ranks, size, took) in zip(
            table.op.take(rows).to_list(), zip(*(one.tolist() for one in columns), strict=True), strict=True
        ):
            found[op or "other", ranks][size].append(took)
    typical = median if job[0].on_device else mean
    return {
        key: [(size, round(typical(times))) for size, times in sorted(sizes.items())]
        for key, sizes in found.items()
    }
