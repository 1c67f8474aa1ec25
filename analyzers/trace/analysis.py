"""``analyze trace``: one rank at a time into a small, mergeable summary, then all ranks together.

:func:`analyze_rank` needs only one rank's tables, and its result is small and picklable, so ranks can be
analysed in separate processes; :func:`merge` compares them and builds the result.

Rates of collectives by op, process group and size, against the best of the run and the hardware's peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

import numpy as np

from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.ledger.charges import RankCharges, settle
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds
from fsdp2prof.analyzers.ranks import comparison as ranks
from fsdp2prof.analyzers.ranks import summary as rank_summary
from fsdp2prof.analyzers.ranks.summary import DeviceWork, RankSummary
from fsdp2prof.analyzers.steps import Window, mean, unrecorded_step, waited_for, window_count
from fsdp2prof.analyzers.trace import by_layer
from fsdp2prof.analyzers.trace.accounting import breakdown, step_flops, step_work
from fsdp2prof.analyzers.trace.charges import rank_charges
from fsdp2prof.analyzers.trace.evaluation import layer_paces
from fsdp2prof.analyzers.trace.idle import host_syncs, idle_causes
from fsdp2prof.analyzers.trace.lines import LineSums, line_rows, line_sums
from fsdp2prof.analyzers.trace.operators import (
    KernelSum,
    OperatorSum,
    additional_ns,
    kernel_rows,
    kernel_sums,
    operator_rows,
    operator_sums,
)
from fsdp2prof.analyzers.trace.prefetch import AwaitedTable, awaited, transfer_ns, verdicts
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.analyzers.trace.spans import RankSpans, loading, rank_spans
from fsdp2prof.analyzers.trace.summary import summarise
from fsdp2prof.analyzers.trace.timeline import RankSteps, step_timeline
from fsdp2prof.by_key import summed
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.communication import Attribution, BandwidthRow, CrossRank, GroupRow, PrefetchRow
from fsdp2prof.results.step import StepBreakdown, Throughput, UnrecordedStep
from fsdp2prof.results.trace import HostSyncRow, RankTrace, TraceAnalysis
from fsdp2prof.tables.columns import BoolArray, IntArray, concat_strings, concat_tables
from fsdp2prof.tables.trace import CollectiveTable, Trace

_NS = 1e9


def bandwidth_rows(
    ranks: Sequence[tuple[CollectiveTable, IntArray, BoolArray]],
    peak_bus_bytes_per_s: float | None = None,
    numbers: Sequence[int] | None = None,
) -> list[BandwidthRow]:
    """Return one row per (op, process group, dtype, payload) over all ranks, most bytes first.

    ``ranks`` are each rank's collectives with their waits for the last rank (-1 unknown), and whether all
    ranks of its group were compared. algbw is payload over duration; busbw is wire bytes over transfer, as in
    nccl-tests; both are medians. Where ranks are missing, the duration may be waiting: such a rate is held
    against nothing. A collective of unknown payload has no row. ``numbers`` are the ranks' own; counted from
    0 unless given.
    """
    if not ranks:
        return []
    table = concat_tables([collectives for collectives, _, _ in ranks])
    transfer = np.concatenate([transfer_ns(collectives, wait) for collectives, wait, _ in ranks])
    whole = np.concatenate([whole for _, _, whole in ranks])
    known = (table.payload_bytes >= 0) & (transfer > 0)
    given = range(len(ranks)) if numbers is None else numbers
    number = np.repeat(given, [len(collectives) for collectives, _, _ in ranks])[known]
    table, transfer, whole = table.take(known), transfer[known], whole[known]
    algbw = table.payload_bytes * _NS / (table.end_ns - table.start_ns)
    busbw = np.where(table.wire_bytes >= 0, table.wire_bytes * _NS / transfer, np.nan)
    texts = (table.op, table.process_group, table.mesh_dim, table.dtype)
    keys = np.stack([*(column.codes for column in texts), table.group_size, table.payload_bytes])
    _, first, kind, count = np.unique(
        keys, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    members = np.split(np.argsort(kind.reshape(-1), kind="stable"), np.cumsum(count)[:-1])
    best: dict[tuple[str | None, str | None], float] = {}
    for row in np.flatnonzero(~np.isnan(busbw)).tolist():
        key = table.op[row], table.process_group[row]
        best[key] = max(best.get(key, 0.0), float(busbw[row]))
    rows = []
    for row, mine in zip(first.tolist(), members, strict=False):
        rated = bool(whole[mine].any())
        transfers = mine[whole[mine]] if rated else mine
        bus = None if np.isnan(busbw[row]) else median(busbw[transfers].tolist())
        judged = bus if rated else None
        peak = best.get((table.op[row], table.process_group[row]))
        rows.append(
            BandwidthRow(
                op=table.op[row] or "other",
                process_group=table.process_group[row],
                mesh_dim=table.mesh_dim[row],
                group_size=None if table.group_size[row] < 0 else int(table.group_size[row]),
                dtype=table.dtype[row],
                payload_bytes=int(table.payload_bytes[row]),
                count=len(mine),
                algbw_bytes_per_s=median(algbw[mine].tolist()),
                busbw_bytes_per_s=bus,
                best_busbw_bytes_per_s=None if bus is None else float(busbw[transfers].max()),
                of_best_frac=None if judged is None or not peak else judged / peak,
                of_peak_frac=None
                if judged is None or not peak_bus_bytes_per_s
                else judged / peak_bus_bytes_per_s,
                ranks=np.unique(number[mine]).tolist(),
                waits_known=rated,
            )
        )

    def most_bytes(row: BandwidthRow) -> tuple[int, str, str, str]:
        return -row.payload_bytes * row.count, row.op, row.process_group or "", row.dtype or ""

    return sorted(rows, key=most_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAnalysis:
    """One rank, analysed on its own and ready to be merged with others."""

    rank: RankTrace
    groups: list[GroupRow]
    attribution: Attribution
    summary: RankSummary
    awaited: AwaitedTable
    host_syncs: list[HostSyncRow]
    spans: list[RankSpans]
    kernels: list[KernelSum]
    operators: list[OperatorSum]
    lines: LineSums
    charges: RankCharges
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """Facts that a trace does not contain; null is unknown here too."""

    tokens_per_step: int | None = None
    """All ranks together."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of one device, by dtype."""
    peak_memory_bytes_per_s: float | None = None
    """Of one device's memory."""
    peak_bus_bytes_per_s: float | None = None
    """Of the fabric, as nccl-tests' busbw."""
    thresholds: FindingThresholds = field(default_factory=FindingThresholds)
    """When a finding is worth reporting."""

    @property
    def of_accelerator(self) -> bool:
        """Whether they are the peaks of a device that is no CPU."""
        return bool(self.peak_flops_per_s) or self.peak_bus_bytes_per_s is not None


def analyze_trace(
    traces: Iterable[tuple[Trace, RankManifest | None]],
    window: Window = "steps",
    references: References | None = None,
) -> TraceAnalysis:
    """Analyse ranks one after the other and merge them."""
    analyses, manifests = [], []
    for position, (trace, manifest) in enumerate(traces):
        analyses.append(analyze_rank(trace, manifest, window=window, default_rank=position))
        if manifest is not None:
            manifests.append(manifest)
    return merge(analyses, references, manifests)


def analyze_rank(
    trace: Trace,
    manifest: RankManifest | None = None,
    *,
    window: Window = "steps",
    chosen: Collection[int] | None = None,
    default_rank: int = 0,
) -> RankAnalysis:
    """Analyse one rank's trace, all its steps or the ``chosen`` ones.

    ``default_rank`` is its number if neither file nor manifest says.
    """
    return analyze_tables(rank_tables(trace, manifest, window, chosen), default_rank=default_rank)


def analyze_tables(tables: RankTables, *, default_rank: int = 0, ranks: int = 1) -> RankAnalysis:
    """Analyse one rank whose tables are joined up already, as :func:`analyze_rank` does.

    It is one of ``ranks`` that a chart will show together.
    """
    trace, manifest = tables.trace, tables.manifest
    rank, world_size = trace.rank, trace.world_size
    if manifest is not None:
        rank, world_size = manifest.rank, manifest.world_size
    rank = default_rank if rank is None else rank
    traced = RankTrace(
        rank=rank,
        world_size=world_size,
        device_type=trace.device.type,
        device_name=trace.device.name or None,
        steps=_steps(tables),
        communication=by_layer.communication(tables.run, tables.windows, tables.exposure),
        source=trace.source,
        state=manifest.state if manifest else None,
        incomplete_steps=tables.incomplete,
        paces=layer_paces(tables),
    )
    if manifest is not None:
        traced = replace(traced, unrecorded_step=waited_for(unrecorded_step([manifest.steps]), [traced]))
    return RankAnalysis(
        rank=traced,
        groups=by_layer.group_rows(rank, tables.windows, tables.collectives, tables.exposure, tables.waits),
        attribution=by_layer.attribution(tables.windows, tables.collectives),
        summary=_summary(tables, rank, world_size),
        awaited=awaited(tables),
        host_syncs=host_syncs(trace, tables.phases, tables.analysed, rank, tables.sighted.lines),
        spans=rank_spans(tables, ranks),
        kernels=kernel_sums(tables),
        operators=operator_sums(tables),
        lines=line_sums(tables),
        charges=rank_charges(tables, rank),
        warnings=tables.warnings,
    )


def merge(
    analyses: Sequence[RankAnalysis],
    references: References | None = None,
    manifests: Sequence[RankManifest] = (),
) -> TraceAnalysis:
    """Compare ranks and combine their results, in order of rank.

    ``manifests`` of all ranks of the run give facts that a trace does not contain: the time of an untraced
    step, and the padding of uneven shards.
    """
    references = references or References()
    dtype = _computing_dtype(analyses)
    analyses = sorted(analyses, key=lambda analysis: analysis.rank.rank)
    comparison = ranks.match([analysis.summary for analysis in analyses])
    collectives = [
        (summary.collectives, comparison.wait_ns[summary.rank], comparison.waits_known[summary.rank])
        for summary in (analysis.summary for analysis in analyses)
    ]
    prefetch = [
        verdicts(analysis.rank.rank, table, analysis.awaited, wait_ns, known)
        for analysis, (table, wait_ns, known) in zip(analyses, collectives, strict=True)
    ]
    steps = [
        RankSteps(summary=one.summary, steps=one.spans, awaited=one.awaited, verdicts=rows)
        for one, rows in zip(analyses, prefetch, strict=True)
    ]
    on_host = unrecorded_step(manifest.steps for manifest in manifests)
    step = waited_for(on_host, [one.rank for one in analyses])
    result = TraceAnalysis(
        ranks=[_with_speed(analysis.rank, references, dtype) for analysis in analyses],
        unrecorded_step=step,
        host_runs_ahead=step != on_host,
        rehearsed=any(manifest.rehearsal is not None for manifest in manifests),
        groups=[row for analysis in analyses for row in analysis.groups],
        attribution=_total(analysis.attribution for analysis in analyses),
        cross_rank=comparison.result,
        findings=[],
        warnings=[
            *dict.fromkeys(line for analysis in analyses for line in analysis.warnings),
            *comparison.warnings,
        ],
        prefetch=[row for rows in prefetch for row in rows],
        bandwidth=bandwidth_rows(
            collectives, references.peak_bus_bytes_per_s, [analysis.rank.rank for analysis in analyses]
        ),
        host_syncs=sorted((row for a in analyses for row in a.host_syncs), key=lambda row: -row.blocked_ns),
        timeline=step_timeline(steps, comparison),
    )
    windows = window_count(result.ranks)
    if windows:
        peaks = references.peak_flops_per_s, references.peak_memory_bytes_per_s
        step_ns = mean(sum(step.duration_ns for one in result.ranks for step in one.steps), windows)
        result = replace(
            result,
            kernels=kernel_rows((one.kernels for one in analyses), windows, step_ns),
            operators=operator_rows((one.operators for one in analyses), windows, *peaks),
            lines=line_rows(
                (one.lines for one in analyses),
                windows,
                step_ns,
                on_device=any(one.device_type != "cpu" for one in result.ranks),
            ),
            peak_flops_per_s=dict(references.peak_flops_per_s),
            peak_memory_bytes_per_s=references.peak_memory_bytes_per_s,
        )
    if result.rehearsed:  # whatever depends on how long a collective took
        groups = [replace(row, busbw_bytes_per_s=None) for row in result.groups]
        result = replace(result, groups=groups, prefetch=[], bandwidth=[], timeline=None)
    else:
        charges = [
            charge
            for one, (table, wait_ns, _), rows in zip(analyses, collectives, prefetch, strict=True)
            for charge in settle(
                one.rank.rank,
                one.charges,
                table,
                wait_ns,
                comparison.lateness[one.rank.rank],
                _why(one, rows),
            )
        ]
        extra = dict(
            zip(
                (one.rank.rank for one in analyses),
                additional_ns([(one.kernels, len(one.rank.steps)) for one in analyses]),
                strict=True,
            )
        )
        result = with_ledger(result, charges, manifests, references.thresholds, extra)
    return summarise(result)


def _why(one: RankAnalysis, rows: Sequence[PrefetchRow]) -> list[str | None]:
    """Return why each collective is late, waiting for a peer apart; the verdicts are in order of need."""
    why: list[str | None] = [None] * len(one.summary.collectives)
    order = np.argsort(one.awaited.needed_ns, kind="stable").tolist()
    for position, row in zip(order, rows, strict=True):
        own = sorted(((ns, cause) for cause, ns in row.late_ns.items() if cause != "peer"), reverse=True)
        why[int(one.awaited.collective[position])] = own[0][1] if own else None
    return why


def merge_results(
    analyses: Sequence[TraceAnalysis],
    manifests: Sequence[RankManifest],
    thresholds: FindingThresholds,
) -> TraceAnalysis:
    """Combine the results of single ranks, without the collectives by which ranks are compared.

    The ranks' waits for each other are then unknown. Bandwidth, kernels, operators, lines and timeline are
    those of the lowest rank.
    """
    analyses = sorted(analyses, key=lambda one: one.ranks[0].rank)
    steps = {manifest.rank: unrecorded_step([manifest.steps]) for manifest in manifests}
    ranks = [
        replace(rank, unrecorded_step=waited_for(steps.get(rank.rank, rank.unrecorded_step), [rank]))
        for one in analyses
        for rank in one.ranks
    ]
    alone = [] if len(ranks) < 2 else ["recorded as summaries: waiting between ranks is unknown"]
    on_host = unrecorded_step(manifest.steps for manifest in manifests)
    step = waited_for(on_host, ranks)
    result = TraceAnalysis(
        ranks=ranks,
        unrecorded_step=step,
        host_runs_ahead=step != on_host,
        rehearsed=any(one.rehearsed for one in analyses),
        groups=[row for one in analyses for row in one.groups],
        attribution=_total(one.attribution for one in analyses),
        cross_rank=CrossRank(match_key=None, matched=0, unmatched=0),
        findings=[],
        warnings=[*(line for one in analyses for line in one.warnings), *alone],
        prefetch=[row for one in analyses for row in one.prefetch],
        bandwidth=analyses[0].bandwidth,
        kernels=analyses[0].kernels,
        operators=analyses[0].operators,
        lines=analyses[0].lines,
        peak_flops_per_s=analyses[0].peak_flops_per_s,
        peak_memory_bytes_per_s=analyses[0].peak_memory_bytes_per_s,
        timeline=analyses[0].timeline,
        host_syncs=sorted((row for a in analyses for row in a.host_syncs), key=lambda row: -row.blocked_ns),
    )
    if not result.rehearsed:
        result = with_ledger(result, None, manifests, thresholds)
    return summarise(result)


def merged_part(analysis: TraceAnalysis) -> TraceAnalysis:
    """Return what :func:`merge_results` takes of the result of any rank but the lowest."""
    return TraceAnalysis(
        ranks=analysis.ranks,
        rehearsed=analysis.rehearsed,
        groups=analysis.groups,
        attribution=analysis.attribution,
        cross_rank=analysis.cross_rank,
        findings=[],
        warnings=analysis.warnings,
        prefetch=analysis.prefetch,
        host_syncs=analysis.host_syncs,
    )


def throughput(
    steps: Sequence[StepBreakdown],
    references: References,
    unrecorded: UnrecordedStep | None = None,
    *,
    dtype: str | None = None,
) -> Throughput | None:
    """Return one rank's speed, in its unrecorded steps if known; null if no step was traced.

    ``dtype`` is the model's compute dtype.
    """
    traced = [step for step in steps if step.duration_ns > 0]
    if not traced:
        return None
    step_ns = (
        median_low([step.duration_ns for step in traced]) if unrecorded is None else unrecorded.median_ns
    )
    counted = [step for step in traced if step.flops is not None]
    counted_ns = sum(step.duration_ns for step in counted) if unrecorded is None else step_ns * len(counted)
    flops = sum(step.flops or 0 for step in counted) * 1e9 / counted_ns if counted else None
    tokens = references.tokens_per_step
    peak = None if dtype is None else references.peak_flops_per_s.get(dtype)
    return Throughput(
        step_ns=int(step_ns),
        tokens_per_s=None if tokens is None else tokens * 1e9 / step_ns,
        flops_per_s=flops,
        mfu=None if flops is None or not peak else flops / peak,
        measured_on="traced" if unrecorded is None else "unrecorded",
    )


def _with_speed(rank: RankTrace, references: References, dtype: str | None) -> RankTrace:
    speed = throughput(rank.steps, references, rank.unrecorded_step, dtype=dtype)
    return replace(rank, throughput=speed)


def _computing_dtype(analyses: Iterable[RankAnalysis]) -> str | None:
    """Return the dtype the model computes in: that in which most parameters are gathered."""
    gathered = summed(
        (row.dtype, row.payload_bytes or 0)
        for row in (row for analysis in analyses for row in analysis.groups)
        if row.op == "all_gather" and row.dtype is not None
    )
    return next((dtype for dtype, _ in gathered.most_common(1)), None)


def _steps(tables: RankTables) -> list[StepBreakdown]:
    steps = breakdown(tables.parts, tables.windows, tables.collectives, tables.exposure)
    numbers = tables.analysed.step.tolist()
    flops, work = (
        {step: count for step, count in zip(numbers, counts.tolist(), strict=True) if count >= 0}
        for counts in (
            step_flops(tables.trace, tables.analysed),
            step_work(tables.trace, tables.analysed, tables.phases),
        )
    )
    return [
        replace(step, idle_ns=causes, flops=flops.get(step.step), work=work.get(step.step))
        for step, causes in zip(steps, idle_causes(tables), strict=True)
    ]


def _summary(tables: RankTables, rank: int, world_size: int | None) -> RankSummary:
    """Reduce the rank to the data for a comparison: the collectives of its windows and the work between
    them."""
    work, table, manifest = tables.work, tables.collectives.table, tables.manifest
    device = DeviceWork(
        start_ns=np.concatenate([work.start_ns, table.start_ns]),
        end_ns=np.concatenate([work.end_ns, table.end_ns]),
        launch_ns=np.concatenate([work.launch_ns, table.issue_ns]),
        name=concat_strings([tables.trace.events.name.take(work.event), table.op]),
        fqn=concat_strings([tables.phases.fqn.lookup(work.phase_row), table.fqn]),
        is_comm=np.concatenate([np.zeros(len(work), dtype=np.bool_), np.ones(len(table), dtype=np.bool_)]),
    )
    return rank_summary.summarise(
        table.take(np.isin(table.step, tables.windows.step)),
        device,
        rank=rank,
        clock=manifest.host if manifest and manifest.host else None,
        base_ns=tables.trace.base_time_ns,
        world_size=world_size,
        group_ranks=_group_ranks(tables),
        loading=loading(tables.trace, tables.phases),
        lines=tables.sighted.gaps,
    )


def _group_ranks(tables: RankTables) -> dict[str, str]:
    """Ranks of each process group: from the file's head or the manifest, otherwise from the collectives."""
    args, manifest = tables.trace.collective_args, tables.manifest
    groups = [*tables.trace.process_groups, *(manifest.process_groups if manifest else ())]
    known = {group.name: str(group.ranks) for group in groups if group.ranks}
    pairs = sorted(set(zip(args.process_group.codes.tolist(), args.ranks.codes.tolist(), strict=True)))
    written = {
        args.process_group.values[name]: args.ranks.values[r] for name, r in pairs if name >= 0 and r >= 0
    }
    return known | {name: ranks for name, ranks in written.items() if name not in known}


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
