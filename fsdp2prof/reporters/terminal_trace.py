"""A trace analysis as text: where the step goes, communication by layer worst first, ranks, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from fsdp2prof.reporters.advice import trace_advice
from fsdp2prof.reporters.layers import LayerRow, fold, layer_name, layer_rows
from fsdp2prof.reporters.terminal import (
    bullets,
    cell,
    findings_view,
    heading,
    new_table,
    plural,
    right,
    stack,
)
from fsdp2prof.reporters.wording import dtype_label, op_label
from fsdp2prof.results import BreakdownNs, RankTrace, TraceAnalysis
from fsdp2prof.units import format_frac, format_ns

__all__ = ["trace_view"]

_STEP_ROWS = 12
"""Step windows shown one by one; more are averaged per rank, then shortened."""

_LAYER_ROWS = 20

_MS, _MIB = 10**6, 1 << 20

_PART_NAMES = [field.name for field in fields(BreakdownNs)]

_SHORT_PARTS = {
    "compute": "compute",
    "fsdp_copy": "FSDP\ncopies",
    "exposed_all_gather": "all-\ngather",
    "exposed_reduce_scatter": "reduce-\nscatter",
    "exposed_all_reduce": "all-\nreduce",
    "exposed_other_comm": "other\ncomm.",
    "exposed_memcpy": "memcpy",
    "idle": "idle",
}


def trace_view(
    analysis: TraceAnalysis, *, source: str, verbose: bool = False, advice: bool = True
) -> RenderableType:
    """Lay out a trace analysis; ``verbose`` shows every step and layer, ``source`` names it in the advice."""
    return stack(
        _headline(analysis),
        _breakdown(analysis, verbose),
        _communication(analysis, verbose),
        _ranks(analysis),
        findings_view(analysis.findings),
        bullets("What to look at next", trace_advice(analysis, source, verbose=verbose)) if advice else None,
        bullets("Warnings", analysis.warnings, style="yellow"),
    )


def _headline(analysis: TraceAnalysis) -> RenderableType:
    ranks = analysis.ranks
    worlds = [rank.world_size for rank in ranks if rank.world_size]
    of = f" of {max(worlds)}" if worlds and max(worlds) != len(ranks) else ""
    devices = ", ".join(sorted({rank.device_type for rank in ranks}))
    numbers = sorted({step.step for rank in ranks for step in rank.steps})
    text = heading("Trace", f"{plural(len(ranks), 'rank')}{of}, {devices}, {_step_list(numbers)}")
    unfinished = [f"rank {rank.rank}: {rank.state}" for rank in ranks if rank.state not in (None, "complete")]
    if unfinished:
        text.append(
            "  " + ", ".join(unfinished[:4]) + (", ..." if len(unfinished) > 4 else ""), "not bold yellow"
        )
    return text


def _step_list(numbers: list[int]) -> str:
    if not numbers:
        return "no steps"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]}-{numbers[-1]}"
    return ("step " if len(numbers) == 1 else "steps ") + ", ".join(map(str, numbers))


# Where the step goes.


def _breakdown(analysis: TraceAnalysis, verbose: bool) -> RenderableType | None:
    windows = [(rank, step) for rank in analysis.ranks for step in rank.steps]
    if not windows:
        return None
    every = [_values(step.breakdown_ns) for _, step in windows]
    shown = [
        i for i, part in enumerate(_PART_NAMES) if part in ("compute", "idle") or any(row[i] for row in every)
    ]
    labels = [right(_SHORT_PARTS[_PART_NAMES[i]]) for i in shown]
    table = new_table(right("rank"), right("step"), right("window"), *labels)
    digits = _digits(max(map(sum, every)) / _MS)
    for rank, step, values in _step_rows(analysis, verbose):
        cells = (sum(values), *(values[i] for i in shown))
        table.add_row(rank, step, *(_scaled(value, _MS, digits) for value in cells))
    mean = _means(every)
    window = sum(mean)
    cells = (window, *(mean[i] for i in shown))
    table.add_section()
    table.add_row("mean", "", *(_scaled(value, _MS, digits) for value in cells), style="bold")
    table.add_row("", "%", *(_percent(part, window) for part in cells))
    note = "ms; communication and memcpy columns hold only what no compute hides"
    return Group(heading("Where the step goes", note), table)


def _step_rows(analysis: TraceAnalysis, verbose: bool) -> list[tuple[str, str, list[float]]]:
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    if verbose or windows <= _STEP_ROWS:
        return [
            (str(rank.rank), str(step.step), _values(step.breakdown_ns))
            for rank in analysis.ranks
            for step in rank.steps
        ]
    means = [(rank, _rank_mean(rank)) for rank in analysis.ranks if rank.steps]
    if len(means) > _STEP_ROWS:
        means.sort(key=lambda item: sum(item[1]))
        rows = [("fastest", means[0]), ("median", means[len(means) // 2]), ("slowest", means[-1])]
        return [(str(rank.rank), name, values) for name, (rank, values) in rows]
    return [(str(rank.rank), "mean", values) for rank, values in means]


def _rank_mean(rank: RankTrace) -> list[float]:
    return _means([_values(step.breakdown_ns) for step in rank.steps])


def _values(breakdown: BreakdownNs) -> list[float]:
    return [getattr(breakdown, part) for part in _PART_NAMES]


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


# Communication.


def _communication(analysis: TraceAnalysis, verbose: bool) -> RenderableType | None:
    rows = layer_rows(analysis)
    if not rows:
        return Text("No collective ran in the analysed window.")
    shown = rows if verbose else fold(rows)
    table = _layer_table(shown if verbose else shown[:_LAYER_ROWS], _distinct_groups(rows))
    parts: list[RenderableType] = [
        heading("Communication by layer", "worst exposed first; mean per rank and step"),
        table,
    ]
    if len(shown) > _LAYER_ROWS and not verbose:
        rest = shown[_LAYER_ROWS:]
        exposed = format_ns(sum(row.exposed_ns for row in rest))
        parts.append(Text(f"  and {plural(len(rest), 'more row')}, {exposed} exposed together; all with -v"))
    return Group(*parts, _totals(analysis), _attribution(analysis))


def _distinct_groups(rows: Sequence[LayerRow]) -> bool:
    return len({row.group for row in rows}) > 1


def _layer_table(rows: Sequence[LayerRow], with_group: bool) -> Table:
    group = [Column("group", no_wrap=True, max_width=12)] if with_group else []
    table = new_table(
        Column("layer", min_width=14, overflow="fold"),
        "phase",
        Column("op", no_wrap=True),
        *group,
        "dtype",
        right("n"),
        right("payload\nMiB"),
        right("wire\nMiB"),
        right("total\nms"),
        right("exposed\nms"),
        right("stall\nms"),
        right("overlap"),
        right("busbw\nGB/s"),
    )
    ms = _digits(max((row.total_ns for row in rows), default=0) / _MS)
    mib = _digits(max((row.payload_bytes or 0 for row in rows), default=0) / _MIB)
    for row in rows:
        table.add_row(
            cell(layer_name(row.fqn)),
            cell(row.phase),
            cell(op_label(row.op)),
            *([cell(row.group or "-")] if with_group else []),
            dtype_label(row.dtype),
            f"{row.count:g}" if row.count == int(row.count) else f"{row.count:.1f}",
            _scaled(row.payload_bytes, _MIB, mib),
            _scaled(row.wire_bytes, _MIB, mib),
            _scaled(row.total_ns, _MS, ms),
            _scaled(row.exposed_ns, _MS, ms),
            _scaled(row.stall_ns, _MS, ms),
            format_frac(row.overlap_frac),
            "-" if row.busbw_bytes_per_s is None else f"{row.busbw_bytes_per_s / 1e9:.2f}",
        )
    return table


def _totals(analysis: TraceAnalysis) -> Text:
    total = sum(rank.communication.total_ns for rank in analysis.ranks)
    exposed = sum(rank.communication.exposed_ns for rank in analysis.ranks)
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    overlap = format_frac(1 - exposed / total if total else None)
    return Text(
        f"  A rank communicates {format_ns(total / windows)} of a step, {format_ns(exposed / windows)} of it "
        f"exposed: overlap {overlap}."
    )


def _attribution(analysis: TraceAnalysis) -> Text:
    found = analysis.attribution
    share = format_frac(found.attributed_ns / found.comm_ns if found.comm_ns else None)
    text = Text(
        f"  On a layer: {found.attributed:,} of {plural(found.collectives, 'collective')}, "
        f"{share} of communication time."
    )
    for reason, count in found.unattributed_reasons.items():
        text.append_text(cell(f"\n  Not on a layer: {plural(count, 'collective')}, {reason}.", "yellow"))
    return text


# Ranks against each other.


def _ranks(analysis: TraceAnalysis) -> RenderableType | None:
    across = analysis.cross_rank
    if len(analysis.ranks) < 2:
        return None
    title = heading("Ranks against each other")
    if across.match_key is None:
        return Group(title, Text("  Collectives could not be matched over the ranks."))
    lines = [
        f"  {plural(across.matched, 'collective')} matched over the ranks by {across.match_key}"
        + (f", {across.unmatched:,} not." if across.unmatched else ".")
    ]
    if across.wait_ns:
        waits = sorted(across.wait_ns.items(), key=lambda item: -item[1])
        listed = ", ".join(f"rank {rank} {format_ns(wait)}" for rank, wait in waits[:8])
        lines.append(f"  Waiting for a peer to start: {listed}" + (", ..." if len(waits) > 8 else ""))
    for straggler in across.stragglers[:5]:
        where = f" in {layer_name(straggler.fqn)}" if straggler.fqn is not None else ""
        cause = f": {straggler.cause}" if straggler.cause else ""
        lines.append(
            f"  Rank {straggler.rank} kept others waiting {format_ns(straggler.wait_caused_ns)}{where}{cause}"
        )
    return Group(title, *(cell(line) for line in lines))


def _digits(largest: float) -> int:
    """Decimals of a column: three significant ones for its largest number, so that the column lines up."""
    return 3 if largest < 10 else 2 if largest < 1000 else 1


def _scaled(value: float | None, scale: int, digits: int) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value / scale:,.{digits}f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
