"""One rank's trace joined up: every table that the analyses of a rank share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.launches import DeviceTable, device_activities
from fsdp2prof.analyzers.phases import build_phases
from fsdp2prof.analyzers.steps import Window, host_steps, step_windows
from fsdp2prof.analyzers.trace.accounting import (
    Exposure,
    Parts,
    Timeline,
    WorkTable,
    device_work,
    expose,
    host_work,
    split,
    timeline,
)
from fsdp2prof.analyzers.trace.collectives import Collectives, collect
from fsdp2prof.analyzers.trace.gloo import gloo_ranges
from fsdp2prof.analyzers.trace.unknown_kernels import beside_communication
from fsdp2prof.analyzers.trace.waits import WaitTable, charging_order, find_waits
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables import LabelTable, PhaseTable, StepTable, Strings, Trace, concat_tables

__all__ = ["RankTables", "phase_labels", "rank_tables"]

_ALWAYS = StepTable(
    step=np.zeros(1, dtype=np.int64),
    start_ns=np.full(1, np.iinfo(np.int64).min),
    end_ns=np.full(1, np.iinfo(np.int64).max),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTables:
    """What :func:`rank_tables` found."""

    trace: Trace
    manifest: RankManifest | None
    steps: StepTable
    """All labelled steps, in host time."""
    analysed: StepTable
    """What is analysed, in host time."""
    windows: StepTable
    """What is analysed, in the time of the device (host-only: of the host)."""
    measurable: tuple[int, ...]
    """Every step that has a window, analysed or not."""
    device: DeviceTable
    """Empty on a host-only trace."""
    phases: PhaseTable
    collectives: Collectives
    work: WorkTable
    waits: WaitTable
    run: Timeline
    parts: Parts
    exposure: Exposure
    warnings: list[str]


def rank_tables(
    trace: Trace,
    manifest: RankManifest | None = None,
    window: Window = "steps",
    chosen: Collection[int] | None = None,
) -> RankTables:
    """Join a rank's trace: launches to streams, host time to phases, collectives to layers and waits.

    ``chosen`` steps are analysed, by default all of them.
    """
    steps = host_steps(trace.labels)
    device = device_activities(trace)
    windows, warnings = step_windows(trace, steps, device, window)
    phases = build_phases(phase_labels(trace), steps, manifest.root_count if manifest else 0)
    labelled = window == "steps" and bool(np.isin(windows.step, steps.step).all())
    host = steps if labelled else _ALWAYS
    measurable = tuple(windows.step.tolist())
    if chosen is not None:
        windows = windows.take(np.isin(windows.step, sorted(chosen)))
    collectives = collect(trace, device, phases, host, windows, manifest)
    if len(device):
        work = device_work(trace, device, phases, collectives)
        warnings += [f"{trace.source}: {line}" for line in beside_communication(trace, work, collectives)]
        if len(aside := gloo_ranges(trace)):
            warnings.append(
                f"{trace.source}: {len(aside)} collectives ran on the host (gloo); the device's account"
                " leaves them out"
            )
    else:
        work = host_work(trace, phases)
        if collectives.unserved:
            warnings.append(
                f"{trace.source}: {collectives.unserved} collectives were issued without a recorded transfer"
            )
    waits = find_waits(trace, phases, work, collectives)
    run = timeline(work, device, collectives)
    parts = split(run, windows)
    return RankTables(
        trace=trace,
        manifest=manifest,
        steps=steps,
        analysed=host.take(np.isin(host.step, windows.step)),
        windows=windows,
        measurable=measurable,
        device=device,
        phases=phases,
        collectives=collectives,
        work=work,
        waits=waits,
        run=run,
        parts=parts,
        exposure=expose(parts, windows, collectives, charging_order(collectives, waits)),
        warnings=[*trace.warnings, *warnings],
    )


def phase_labels(trace: Trace) -> LabelTable:
    """Return the trace's labels with autograd's node ranges, which mark backward work without FSDP labels."""
    events = trace.events
    node = events.name.matches(lambda name: name.startswith(AUTOGRAD_NODE))
    nodes = LabelTable(
        thread=events.thread[node].astype(np.int64),
        start_ns=events.start_ns[node],
        end_ns=events.end_ns[node],
        name=Strings.full(int(node.sum()), AUTOGRAD_NODE),
    )
    return concat_tables([trace.labels, nodes])
