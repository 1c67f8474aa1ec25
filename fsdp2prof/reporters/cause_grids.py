"""The tables behind a step breakdown: collectives that came late, their rates, host synchronisations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from fsdp2prof.reporters.grid import Cell, Col, Grid, decimals, plural, scaled
from fsdp2prof.results import BandwidthRow, HostSyncRow, PrefetchRow, TraceAnalysis
from fsdp2prof.units import format_bytes, format_frac, format_ns
from fsdp2prof.vocabulary import LATE_CAUSES, dtype_label, layer_name, op_label

__all__ = ["bandwidth_grid", "late_grid", "sync_grid"]

_LATE_ROWS = 10
_BANDWIDTH_ROWS = 12
_SYNC_ROWS = 8

_MS = 10**6


def late_grid(analysis: TraceAnalysis, *, every: bool = False) -> Grid | None:
    """Return the collectives that the compute stream had to wait for, longest wait first; None if none.

    One row per layer, phase, op and main cause; ``every`` also lists those that were in time.
    """
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    kinds: dict[tuple[str | None, str, str, str], list[PrefetchRow]] = defaultdict(list)
    for row in analysis.prefetch:
        if every or row.stall_ns > 0:
            kinds[row.fqn, row.phase, row.op, row.cause or ""].append(row)
    if not kinds:
        return None
    rows = sorted(kinds.values(), key=lambda rows: -sum(row.stall_ns for row in rows))
    shown = rows if every else rows[:_LATE_ROWS]
    rest = len(rows) - len(shown)
    largest = max(max(abs(row.issued_before_ns), abs(row.finished_before_ns)) for row in analysis.prefetch)
    digits = decimals(largest / _MS)
    return Grid(
        title="Did it arrive in time?",
        note="ms; before it was needed, negative: after; medians, and the wait per rank and step",
        columns=[
            Col("layer", "name"),
            Col("phase"),
            Col("op"),
            Col("n", "number"),
            Col("launched\nbefore", "number"),
            Col("finished\nbefore", "number"),
            Col("waited\nfor it", "number"),
            Col("mainly because"),
        ],
        rows=[_late_cells(rows, windows, digits) for rows in shown],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )


def _late_cells(rows: Sequence[PrefetchRow], windows: int, digits: int) -> list[Cell]:
    first = rows[0]
    return [
        layer_name(first.fqn),
        first.phase,
        op_label(first.op),
        f"{len(rows) / windows:g}" if len(rows) % windows == 0 else f"{len(rows) / windows:.1f}",
        scaled(median(row.issued_before_ns for row in rows), _MS, digits),
        scaled(median(row.finished_before_ns for row in rows), _MS, digits),
        scaled(sum(row.stall_ns for row in rows) / windows, _MS, digits),
        "in time" if first.cause is None else LATE_CAUSES[first.cause].label,
    ]


def bandwidth_grid(analysis: TraceAnalysis, *, every: bool = False) -> Grid | None:
    """Return the rates of collectives by op, group and size, most bytes first; None where none is known."""
    rows = sorted(analysis.bandwidth, key=lambda row: -row.payload_bytes * row.count)
    if not rows:
        return None
    shown = rows if every else rows[:_BANDWIDTH_ROWS]
    rest = len(rows) - len(shown)
    with_peak = any(row.of_peak_frac is not None for row in rows)
    return Grid(
        title="Bandwidth",
        note="GB/s, medians; algbw with the wait for the last rank, busbw (as in nccl-tests) without",
        columns=[
            Col("op"),
            Col("group"),
            Col("ranks", "number"),
            Col("dtype"),
            Col("payload", "number"),
            Col("n", "number"),
            Col("algbw", "number"),
            Col("busbw", "number"),
            Col("of the best", "number"),
            *([Col("of the peak", "number")] if with_peak else []),
        ],
        rows=[_bandwidth_cells(row, with_peak) for row in shown],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )


def _bandwidth_cells(row: BandwidthRow, with_peak: bool) -> list[Cell]:
    return [
        op_label(row.op),
        row.mesh_dim or row.process_group or "-",
        "-" if row.group_size is None else str(row.group_size),
        dtype_label(row.dtype),
        format_bytes(row.payload_bytes),
        str(row.count),
        f"{row.algbw_bytes_per_s / 1e9:.2f}",
        "-" if row.busbw_bytes_per_s is None else f"{row.busbw_bytes_per_s / 1e9:.2f}",
        format_frac(row.of_best_frac),
        *([format_frac(row.of_peak_frac)] if with_peak else []),
    ]


def sync_grid(analysis: TraceAnalysis, *, every: bool = False) -> Grid | None:
    """Return the calls by which the host waited for the device inside steps; None where there was none."""
    places: dict[tuple[str | None, str, str, str | None], list[HostSyncRow]] = defaultdict(list)
    for row in analysis.host_syncs:
        places[row.fqn, row.phase, row.call, row.operator].append(row)
    if not places:
        return None
    windows = max(1, sum(len(rank.steps) for rank in analysis.ranks))
    rows = sorted(places.values(), key=lambda rows: -sum(row.blocked_ns for row in rows))
    shown = rows if every else rows[:_SYNC_ROWS]
    rest = len(rows) - len(shown)
    return Grid(
        title="The host waited for the device",
        note="inside steps, per rank and step, longest first",
        columns=[
            Col("layer", "name"),
            Col("phase"),
            Col("call", "name"),
            Col("from operator", "name"),
            Col("n", "number"),
            Col("blocked", "number"),
        ],
        rows=[
            [
                layer_name(first.fqn),
                first.phase,
                first.call,
                first.operator or "-",
                f"{sum(row.count for row in rows) / windows:.1f}",
                format_ns(sum(row.blocked_ns for row in rows) / windows),
            ]
            for rows in shown
            for first in rows[:1]
        ],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )
