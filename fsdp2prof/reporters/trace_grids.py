"""The tables of a trace analysis: where the step goes, communication by layer, ranks against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2prof.reporters.grid import Cell, Col, Grid, decimals, plural, scaled
from fsdp2prof.reporters.layers import LayerRow, fold, layer_rows
from fsdp2prof.results import BreakdownNs, RankTrace, TraceAnalysis
from fsdp2prof.units import format_flops, format_frac, format_ns
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, IDLE_CAUSES, dtype_label, layer_name, op_label

__all__ = [
    "NO_COLLECTIVE",
    "PARTS",
    "StepRow",
    "breakdown_grid",
    "layer_grid",
    "rank_lines",
    "step_numbers",
    "step_rows",
]

PARTS = tuple(BREAKDOWN_PARTS)

NO_COLLECTIVE = "No collective ran in the analysed window."
"""Instead of the table of layers."""

_STEP_ROWS = 12
"""Step windows shown one by one; more are averaged per rank, then shortened."""

_LAYER_ROWS = 20

_MS, _MIB = 10**6, 1 << 20


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of the breakdown: a step window, or a rank's mean."""

    rank: int
    step: str
    """Step number, or ``mean``, ``fastest``, ``median``, ``slowest``."""
    parts_ns: tuple[float, ...]
    """In the order of :data:`PARTS`."""


def step_numbers(analysis: TraceAnalysis) -> str:
    """Return the analysed steps in words: ``steps 3-5``."""
    numbers = sorted({step.step for rank in analysis.ranks for step in rank.steps})
    if not numbers:
        return "no steps"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]}-{numbers[-1]}"
    return ("step " if len(numbers) == 1 else "steps ") + ", ".join(map(str, numbers))


def step_rows(analysis: TraceAnalysis, *, every: bool = False) -> list[StepRow]:
    """Return every step window, or each rank's mean, or the fastest, median and slowest rank: what fits."""
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    if every or windows <= _STEP_ROWS:
        return [
            StepRow(rank.rank, str(step.step), _parts(step.breakdown_ns))
            for rank in analysis.ranks
            for step in rank.steps
        ]
    means = [StepRow(rank.rank, "mean", _rank_mean(rank)) for rank in analysis.ranks if rank.steps]
    if len(means) <= _STEP_ROWS:
        return means
    means.sort(key=lambda row: sum(row.parts_ns))
    chosen = {"fastest": means[0], "median": means[len(means) // 2], "slowest": means[-1]}
    return [StepRow(row.rank, name, row.parts_ns) for name, row in chosen.items()]


def breakdown_grid(analysis: TraceAnalysis, *, every: bool = False) -> Grid | None:
    """Return the step breakdown in milliseconds with its mean and percentages; None without steps."""
    windows = [_parts(step.breakdown_ns) for rank in analysis.ranks for step in rank.steps]
    if not windows:
        return None
    shown = [i for i, part in enumerate(PARTS) if part in ("compute", "idle") or any(w[i] for w in windows)]
    digits = decimals(max(map(sum, windows)) / _MS)

    def cells(parts: Sequence[float]) -> list[str]:
        return [scaled(value, _MS, digits) for value in (sum(parts), *(parts[i] for i in shown))]

    mean = _means(windows)
    shares = [f"{100 * part / sum(mean):.1f}" for part in (sum(mean), *(mean[i] for i in shown))]
    return Grid(
        title="Where the step goes",
        note="ms; communication and memcpy columns hold only what no compute hides",
        columns=[
            Col("rank", "number"),
            Col("step", "number"),
            Col("window", "number"),
            *(Col(BREAKDOWN_PARTS[PARTS[i]].header, "number") for i in shown),
        ],
        rows=[[str(row.rank), row.step, *cells(row.parts_ns)] for row in step_rows(analysis, every=every)],
        totals=[["mean", "", *cells(mean)], ["", "%", *shares]],
        remarks=[*_idle_sentence(analysis), *_throughput_sentence(analysis)],
    )


def layer_grid(analysis: TraceAnalysis, *, every: bool = False) -> Grid | None:
    """Return communication by layer, worst exposed first; repeated layers folded unless ``every``.

    None where no collective ran.
    """
    rows = layer_rows(analysis)
    if not rows:
        return None
    candidates = rows if every else fold(rows)
    shown = candidates if every else candidates[:_LAYER_ROWS]
    rest = candidates[len(shown) :]
    exposed = format_ns(sum(row.exposed_ns for row in rest))
    with_group = len({row.group for row in rows}) > 1
    ms = decimals(max(row.total_ns for row in shown) / _MS)
    mib = decimals(max(row.payload_bytes or 0 for row in shown) / _MIB)
    return Grid(
        title="Communication by layer",
        note="worst exposed first; mean per rank and step",
        columns=[
            Col("layer", "name"),
            Col("phase"),
            Col("op"),
            *([Col("group")] if with_group else []),
            Col("dtype"),
            Col("n", "number"),
            Col("payload\nMiB", "number"),
            Col("wire\nMiB", "number"),
            Col("total\nms", "number"),
            Col("exposed\nms", "number"),
            Col("stall\nms", "number"),
            Col("overlap", "number"),
            Col("busbw\nGB/s", "number"),
        ],
        rows=[_layer_cells(row, with_group, ms, mib) for row in shown],
        more=f"and {plural(len(rest), 'more row')}, {exposed} exposed together" if rest else "",
        remarks=[_overlap_sentence(analysis), *_attribution_sentences(analysis)],
    )


def rank_lines(analysis: TraceAnalysis) -> list[str]:
    """Say who waited for whom, in sentences; empty for a single rank."""
    across = analysis.cross_rank
    if len(analysis.ranks) < 2:
        return []
    if across.match_key is None:
        return ["Collectives could not be matched over the ranks."]
    unmatched = f", {across.unmatched:,} could not be" if across.unmatched else ""
    matched = plural(across.matched, "collective")
    lines = [f"{matched} matched over the ranks by {across.match_key.replace('_', ' ')}{unmatched}."]
    waits = sorted(((rank, wait) for rank, wait in across.wait_ns.items() if wait), key=lambda item: -item[1])
    if waits:
        listed = ", ".join(f"rank {rank} {format_ns(wait)}" for rank, wait in waits[:8])
        more = ", ..." if len(waits) > 8 else "."
        lines.append(f"Waiting for a peer to start, all steps together: {listed}{more}")
    for straggler in across.stragglers[:5]:
        where = f", in {layer_name(straggler.fqn)}" if straggler.fqn is not None else ""
        cause = f": {straggler.cause}" if straggler.cause else ""
        wait = format_ns(straggler.wait_caused_ns)
        lines.append(f"Rank {straggler.rank} kept others waiting for {wait} in total{where}{cause}.")
    return lines


def _layer_cells(row: LayerRow, with_group: bool, ms: int, mib: int) -> list[Cell]:
    return [
        layer_name(row.fqn),
        row.phase,
        op_label(row.op),
        *([row.group or "-"] if with_group else []),
        dtype_label(row.dtype),
        f"{row.count:g}" if row.count == int(row.count) else f"{row.count:.1f}",
        scaled(row.payload_bytes, _MIB, mib),
        scaled(row.wire_bytes, _MIB, mib),
        scaled(row.total_ns, _MS, ms),
        scaled(row.exposed_ns, _MS, ms),
        scaled(row.stall_ns, _MS, ms),
        format_frac(row.overlap_frac),
        "-" if row.busbw_bytes_per_s is None else f"{row.busbw_bytes_per_s / 1e9:.2f}",
    ]


def _overlap_sentence(analysis: TraceAnalysis) -> str:
    total = sum(rank.communication.total_ns for rank in analysis.ranks)
    exposed = sum(rank.communication.exposed_ns for rank in analysis.ranks)
    windows = max(1, sum(len(rank.steps) for rank in analysis.ranks))
    overlap = format_frac(1 - exposed / total if total else None)
    busy, uncovered = format_ns(total / windows), format_ns(exposed / windows)
    return f"A rank communicates for {busy} of a step, {uncovered} of it exposed: overlap {overlap}."


def _attribution_sentences(analysis: TraceAnalysis) -> list[str]:
    found = analysis.attribution
    share = format_frac(found.attributed_ns / found.comm_ns if found.comm_ns else None)
    collectives = plural(found.collectives, "collective")
    lines = [f"On a layer: {found.attributed:,} of {collectives}, {share} of communication time."]
    for reason, count in found.unattributed_reasons.items():
        lines.append(f"Not on a layer: {plural(count, 'collective')}, {reason}.")
    return lines


def _idle_sentence(analysis: TraceAnalysis) -> list[str]:
    steps = [step for rank in analysis.ranks for step in rank.steps]
    causes: Counter[str] = Counter()
    for step in steps:
        causes.update(step.idle_ns)
    named = [
        (IDLE_CAUSES[cause].label if cause in IDLE_CAUSES else cause, time)
        for cause, time in causes.most_common()
        if time
    ]
    if not named:
        return []
    return ["Idle: " + "; ".join(f"{format_ns(time / len(steps))} {cause}" for cause, time in named) + "."]


def _throughput_sentence(analysis: TraceAnalysis) -> list[str]:
    speeds = [rank.throughput for rank in analysis.ranks if rank.throughput is not None]
    tokens = [speed.tokens_per_s for speed in speeds if speed.tokens_per_s is not None]
    flops = [speed.flops_per_s for speed in speeds if speed.flops_per_s is not None]
    mfu = [speed.mfu for speed in speeds if speed.mfu is not None]
    parts = [f"{min(tokens):,.0f} tokens/s over all ranks"] if tokens else []
    parts += [f"{format_flops(sum(flops) / len(flops))} a rank"] if flops else []
    parts += [f"MFU {format_frac(sum(mfu) / len(mfu))}"] if mfu else []
    return [f"Speed: {', '.join(parts)}."] if parts else []


def _parts(breakdown: BreakdownNs) -> tuple[float, ...]:
    return tuple(getattr(breakdown, part) for part in PARTS)


def _rank_mean(rank: RankTrace) -> tuple[float, ...]:
    return _means([_parts(step.breakdown_ns) for step in rank.steps])


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
