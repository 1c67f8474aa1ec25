"""``analyze trace``: one rank at a time into a small, mergeable summary, then all ranks together.

:func:`analyze_rank` needs one rank's tables and nothing else, and what it returns is small and picklable, so
ranks can be analysed in processes of their own; :func:`merge` compares them and builds the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import accounting, overlap, rank_summary, ranks, waits
from fsdp2prof.analyzers.accounting import WorkTable
from fsdp2prof.analyzers.collectives import Collectives, collect
from fsdp2prof.analyzers.launches import device_activities
from fsdp2prof.analyzers.phases import AUTOGRAD_NODE, build_phases
from fsdp2prof.analyzers.rank_summary import DeviceWork, RankSummary
from fsdp2prof.analyzers.steps import Window, host_steps, step_windows
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results import Attribution, GroupRow, RankTrace, TraceAnalysis
from fsdp2prof.tables import LabelTable, PhaseTable, StepTable, Strings, Trace, concat_strings, concat_tables

__all__ = ["RankAnalysis", "analyze_rank", "analyze_trace", "merge", "phase_labels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAnalysis:
    """One rank, analysed on its own and ready to be merged with others."""

    rank: RankTrace
    groups: list[GroupRow]
    attribution: Attribution
    summary: RankSummary
    warnings: list[str]


def analyze_trace(
    traces: Iterable[tuple[Trace, RankManifest | None]], window: Window = "steps"
) -> TraceAnalysis:
    """Analyse ranks one after the other and merge them."""
    return merge(
        [
            analyze_rank(trace, manifest, window=window, default_rank=position)
            for position, (trace, manifest) in enumerate(traces)
        ]
    )


def analyze_rank(
    trace: Trace,
    manifest: RankManifest | None = None,
    *,
    window: Window = "steps",
    default_rank: int = 0,
) -> RankAnalysis:
    """Analyse one rank's trace; ``default_rank`` is its number if neither file nor manifest says."""
    labels = phase_labels(trace)
    steps = host_steps(trace.labels)
    device = device_activities(trace)
    windows, warnings = step_windows(trace, steps, device, window)
    phases = build_phases(labels, steps)
    collectives = collect(trace, device, phases, steps, windows, manifest)
    if len(device):
        work = accounting.device_work(trace, device, phases, collectives)
    else:
        work = accounting.host_work(trace, phases)
        if collectives.unserved:
            warnings.append(
                f"{trace.source}: {collectives.unserved} collectives were issued without a recorded transfer"
            )
    waited = waits.find_waits(trace, phases, work, collectives)
    run = accounting.timeline(work, device, collectives)
    exposure = accounting.expose(run, windows, collectives, waits.charging_order(collectives, waited))
    rank, world_size = trace.rank, trace.world_size
    if manifest is not None:
        rank, world_size = manifest.rank, manifest.world_size
    rank = default_rank if rank is None else rank
    return RankAnalysis(
        rank=RankTrace(
            rank=rank,
            world_size=world_size,
            device_type=trace.device.type,
            steps=accounting.breakdown(run, windows, collectives, exposure),
            communication=overlap.communication(run, windows, exposure),
            source=trace.source,
            state=manifest.state if manifest else None,
        ),
        groups=overlap.group_rows(rank, windows, collectives, exposure, waited),
        attribution=overlap.attribution(windows, collectives),
        summary=_summary(trace, manifest, rank, work, phases, collectives, windows),
        warnings=[*trace.warnings, *warnings],
    )


def merge(analyses: Sequence[RankAnalysis]) -> TraceAnalysis:
    """Compare ranks and put their results together, in order of rank."""
    analyses = sorted(analyses, key=lambda analysis: analysis.rank.rank)
    comparison = ranks.match([analysis.summary for analysis in analyses])
    return TraceAnalysis(
        ranks=[analysis.rank for analysis in analyses],
        groups=[row for analysis in analyses for row in analysis.groups],
        attribution=_total(analysis.attribution for analysis in analyses),
        cross_rank=comparison.result,
        findings=[],
        warnings=[*(line for analysis in analyses for line in analysis.warnings), *comparison.warnings],
    )


def phase_labels(trace: Trace) -> LabelTable:
    """Return the trace's labels with autograd's node ranges, which mark backward work without FSDP labels."""
    events = trace.events
    node = events.name.matches(lambda name: name.startswith(AUTOGRAD_NODE))
    nodes = LabelTable(
        thread=events.thread[node],
        start_ns=events.start_ns[node],
        end_ns=events.end_ns[node],
        name=Strings.full(int(node.sum()), AUTOGRAD_NODE),
    )
    return concat_tables([trace.labels, nodes])


def _summary(
    trace: Trace,
    manifest: RankManifest | None,
    rank: int,
    work: WorkTable,
    phases: PhaseTable,
    collectives: Collectives,
    windows: StepTable,
) -> RankSummary:
    """Reduce the rank to what a comparison needs: the collectives of its windows and the work around them."""
    table = collectives.table
    mine = np.isin(table.step, windows.step)
    names = trace.events.name.take(work.event)
    fqn = phases.fqn.lookup(work.phase_row)
    device = DeviceWork(
        start_ns=np.concatenate([work.start_ns, table.start_ns]),
        end_ns=np.concatenate([work.end_ns, table.end_ns]),
        name=concat_strings([names, table.op]),
        fqn=concat_strings([fqn, table.fqn]),
        is_comm=np.concatenate([np.zeros(len(work), dtype=np.bool_), np.ones(len(table), dtype=np.bool_)]),
    )
    groups = [*trace.process_groups, *(manifest.process_groups if manifest else ())]
    return rank_summary.summarise(
        table.take(mine),
        device,
        rank=rank,
        clock=manifest.host if manifest and manifest.host else None,
        base_ns=trace.base_time_ns,
        group_ranks={group.name: str(group.ranks) for group in groups},
    )


def _total(parts: Iterable[Attribution]) -> Attribution:
    parts = list(parts)
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part.unattributed_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Attribution(
        collectives=sum(part.collectives for part in parts),
        attributed=sum(part.attributed for part in parts),
        comm_ns=sum(part.comm_ns for part in parts),
        attributed_ns=sum(part.attributed_ns for part in parts),
        unattributed_reasons=reasons,
    )
