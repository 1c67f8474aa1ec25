"""Text of a trace analysis, built from its measurements: means, layers, causes, sentences.

Waits of each rank's compute stream: by layer.

Latency and rate of each kind of collective, from the sizes that ran.

The mean traced step: of each rank, and of all ranks together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from fsdp2prof.analyzers.layers import named_layer, natural_key
from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.ledger.words import trace_advice, trace_verdict
from fsdp2prof.analyzers.steps import mean, means, window_count
from fsdp2prof.analyzers.trace.by_layer import (
    arrivals,
    fold,
    late_rows,
    layer_rows,
    layer_rows_by_kind,
    layer_totals,
    overlap_frac,
)
from fsdp2prof.analyzers.trace.idle import host_sync_places
from fsdp2prof.by_key import summed
from fsdp2prof.results.communication import Attribution, BandwidthRow, CrossRank, PrefetchRow, RankWait
from fsdp2prof.results.step import RankMeans, StepBreakdown, Throughput, TraceTotals
from fsdp2prof.results.trace import BandwidthFit, LayerWait, RankTrace, TraceAnalysis
from fsdp2prof.units import format_frac, format_ns, plural
from fsdp2prof.vocabulary import layer_name

_WORTH_NAMING = 0.01
"""Part of the ranks' time below which no rank is blamed for waiting."""

_NAMED_SHARE = 0.1
"""Part of all waiting from which on a rank that caused it is named."""
_NAMED = 3


def sum_up(cross: CrossRank, ranks: int, analysed_ns: float) -> CrossRank:
    """Add the results of a comparison: the ranks by the waiting they caused, and sentences.

    ``ranks`` were compared over ``analysed_ns``, the sum of all their steps.
    """
    rows = [
        RankWait(rank=int(rank), wait_ns=wait, wait_caused_ns=cross.wait_caused_ns.get(rank, 0))
        for rank, wait in cross.wait_ns.items()
    ]
    rows.sort(key=lambda row: (-row.wait_caused_ns, -row.wait_ns))
    rows = [row for row in rows if row.wait_ns or row.wait_caused_ns]
    return replace(cross, ranks=rows, summary=_sentences(cross, rows, analysed_ns) if ranks > 1 else [])


def _sentences(cross: CrossRank, rows: list[RankWait], analysed_ns: float) -> list[str]:
    if not cross.matched and not cross.unmatched:
        return []
    if cross.match_key is None:
        return ["Collectives could not be matched across ranks."]
    unmatched = f", {cross.unmatched:,} could not be" if cross.unmatched else ""
    matched = plural(cross.matched, "collective")
    lines = [f"{matched} matched across ranks by {cross.match_key.replace('_', ' ')}{unmatched}."]
    total = sum(row.wait_caused_ns for row in rows)
    if not total:
        return lines
    if total < _WORTH_NAMING * analysed_ns:
        return [
            *lines,
            f"The ranks wait for each other less than {format_frac(_WORTH_NAMING)} of their time.",
        ]
    for row in rows[:_NAMED]:
        if row.wait_caused_ns < _NAMED_SHARE * total:
            continue
        share = format_frac(row.wait_caused_ns / total)
        lines.append(
            f"The others waited {format_ns(row.wait_caused_ns)} for rank {row.rank}, {share} of all waiting, "
            f"and it {format_ns(row.wait_ns)} for them{_mostly(cross, row.rank)}."
        )
    return lines


def _mostly(cross: CrossRank, rank: int) -> str:
    worst = next((one for one in cross.stragglers if one.rank == rank), None)
    if worst is None or worst.cause is None:
        return ""
    where = "" if worst.fqn is None else f", at {named_layer(worst.fqn)}"
    return f"; main cause: {worst.cause}{where}"


def rank_means(ranks: Sequence[RankTrace]) -> list[RankMeans]:
    """Average each rank's steps; ranks without steps are left out."""
    return [
        RankMeans(
            rank=rank.rank,
            steps=len(rank.steps),
            step_ns=_mean_step(rank.steps),
            breakdown_ns=_mean_parts(rank.steps),
            communication_ns=mean(rank.communication.total_ns, len(rank.steps)),
            exposed_ns=mean(rank.communication.exposed_ns, len(rank.steps)),
            overlap_frac=rank.communication.overlap_frac,
        )
        for rank in ranks
        if rank.steps
    ]


def trace_totals(
    ranks: Sequence[RankTrace], by_rank: Sequence[RankMeans], attribution: Attribution
) -> TraceTotals:
    """Average the steps of all ranks; ``by_rank`` are their :func:`rank_means`."""
    windows = window_count(ranks)
    if not windows:
        return TraceTotals()
    steps = [step for rank in ranks for step in rank.steps]
    step_ns, parts = _mean_step(steps), _mean_parts(steps)
    total = sum(rank.communication.total_ns for rank in ranks)
    exposed = sum(rank.communication.exposed_ns for rank in ranks)
    placed, placeable = attribution.attributed_ns, attribution.comm_ns
    speeds = [rank.throughput for rank in ranks if rank.throughput is not None]
    in_order = [one.rank for one in sorted(by_rank, key=lambda one: one.step_ns)]
    return TraceTotals(
        windows=windows,
        step_ns=step_ns,
        breakdown_ns=parts,
        breakdown_frac={part: time / step_ns for part, time in parts.items()} if step_ns else {},
        idle_ns=_mean_idle(steps),
        communication_ns=mean(total, windows),
        exposed_ns=mean(exposed, windows),
        exposed_frac=mean(exposed, windows) / step_ns if step_ns else None,
        overlap_frac=overlap_frac(exposed, total),
        attributed_frac=placed / placeable if placeable else None,
        **_speed(speeds),
        fastest_rank=in_order[0],
        median_rank=in_order[len(in_order) // 2],
        slowest_rank=in_order[-1],
    )


def _mean_step(steps: Sequence[StepBreakdown]) -> float:
    return mean(sum(step.duration_ns for step in steps), len(steps))


def _mean_parts(steps: Sequence[StepBreakdown]) -> dict[str, float]:
    return means([asdict(step.breakdown_ns) for step in steps])


def _mean_idle(steps: Sequence[StepBreakdown]) -> dict[str, float]:
    causes: Counter[str] = Counter()
    for step in steps:
        causes.update(step.idle_ns)
    return {cause: mean(time, len(steps)) for cause, time in causes.most_common() if time}


def _speed(speeds: Sequence[Throughput]) -> dict[str, float | None]:
    """Tokens of the slowest rank, since all ranks together train no faster; means of each rank's work."""

    def known(name: str) -> list[float]:
        return [value for speed in speeds if (value := getattr(speed, name)) is not None]

    flops, mfu = known("flops_per_s"), known("mfu")
    return {
        "tokens_per_s": min(known("tokens_per_s"), default=None),
        "flops_per_s": sum(flops) / len(flops) if flops else None,
        "mfu": sum(mfu) / len(mfu) if mfu else None,
    }


_NS = 1e9
_SIZES = 3
"""Sizes that two unknowns and a doubt need."""


def wire_of_payload(op: str, group_size: int) -> float | None:
    """Return wire bytes over payload as nccl-tests counts them; None for an op that it has no factor for."""
    factor = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}.get(op)
    return None if factor is None or group_size < 2 else factor * (group_size - 1) / group_size


def bandwidth_fits(rows: Sequence[BandwidthRow]) -> list[BandwidthFit]:
    """Fit every op of every process group that ran in three sizes or more; none if no line fits."""
    kinds: dict[tuple[str, str | None, str | None, int], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row.waits_known and row.busbw_bytes_per_s and row.group_size and row.payload_bytes:
            kind = row.op, row.process_group, row.mesh_dim, row.group_size
            kinds[kind][row.payload_bytes].append(row.busbw_bytes_per_s)
    fits = (_fit(kind, sizes) for kind, sizes in kinds.items() if len(sizes) >= _SIZES)
    return [fit for fit in fits if fit is not None]


def _fit(kind: tuple[str, str | None, str | None, int], sizes: dict[int, list[float]]) -> BandwidthFit | None:
    op, group, dim, ranks = kind
    factor = wire_of_payload(op, ranks)
    if factor is None:
        return None
    wire = np.array([size * factor for size in sizes])
    time = wire / np.array([float(np.mean(rates)) for rates in sizes.values()])
    latency, inverse = np.linalg.lstsq(np.stack([1 / time, wire / time], axis=1), np.ones(len(wire)))[0]
    if inverse <= 0 or latency < 0:
        return None
    return BandwidthFit(
        op=op,
        process_group=group,
        mesh_dim=dim,
        group_size=ranks,
        sizes=len(sizes),
        latency_ns=float(latency * _NS),
        bytes_per_s=float(1 / inverse),
        knee_bytes=float(latency / inverse / factor),
        error_frac=float(np.abs((latency + wire * inverse) / time - 1).max()),
    )


def layer_waits(prefetch: Sequence[PrefetchRow], ranks: Sequence[RankTrace]) -> list[LayerWait]:
    """Return one row per rank and awaited layer, by rank and layer; 0 if it was always in time."""
    steps = {rank.rank: len(rank.steps) for rank in ranks}
    stalls = summed(((row.rank, row.fqn), row.stall_ns) for row in prefetch)
    rows = [
        LayerWait(rank=rank, fqn=fqn, stall_ns=mean(stall, steps[rank]))
        for (rank, fqn), stall in stalls.items()
        if steps.get(rank)
    ]
    return sorted(rows, key=lambda row: (row.rank, natural_key(layer_name(row.fqn))))


def of_part(analysis: TraceAnalysis) -> TraceAnalysis:
    """Return the summary of an analysis whose ranks, rows or steps were cut: of those that are left.

    An exact ledger stays that of the whole, since the charges of single ranks are gone.
    """
    exact = analysis.ledger is not None and analysis.ledger.exact
    return summarise(analysis if exact else replace(analysis, ledger=None))


def summarise(analysis: TraceAnalysis) -> TraceAnalysis:
    """Return the analysis with the results that depend on its ranks and rows built again.

    A ledger stays; see :func:`of_part`.
    """
    by_rank, windows = rank_means(analysis.ranks), window_count(analysis.ranks)
    by_layer = layer_rows(analysis.groups, windows) if windows else []
    totals = trace_totals(analysis.ranks, by_rank, analysis.attribution)
    analysed_ns = windows * (totals.step_ns or 0)
    summed = replace(
        analysis,
        totals=totals,
        by_rank=by_rank,
        by_layer=by_layer,
        by_layer_folded=fold(by_layer),
        by_layer_and_kind=layer_rows_by_kind(analysis.groups, analysis.ranks),
        layers=layer_totals(by_layer),
        cross_rank=sum_up(analysis.cross_rank, len(analysis.ranks), analysed_ns),
        late=late_rows(analysis.prefetch, windows),
        late_folded=late_rows(analysis.prefetch, windows, folded=True),
        arrivals=arrivals(analysis.prefetch, windows) if windows else [],
        layer_waits=layer_waits(analysis.prefetch, analysis.ranks),
        bandwidth_fits=bandwidth_fits(analysis.bandwidth),
        host_sync_places=host_sync_places(analysis.host_syncs, windows),
    )
    if not summed.rehearsed and summed.ledger is None:
        summed = replace(summed, ledger=with_ledger(summed).ledger)
    return replace(summed, verdict=trace_verdict(summed), advice=trace_advice(summed))
