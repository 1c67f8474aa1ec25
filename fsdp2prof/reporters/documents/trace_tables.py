"""The tables of a trace analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Column, Table, Value
from fsdp2prof.reporters.formats import show_bytes
from fsdp2prof.results.communication import BandwidthRow, GroupRow
from fsdp2prof.results.step import BreakdownNs, RankMeans
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.units import format_flops, format_frac, format_ns, format_numbers, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, IDLE_CAUSES, LANES, LATE_CAUSES, Word

_LAYER_ROWS = 20
_KERNEL_ROWS = 10
_LATE_ROWS = 10
_BANDWIDTH_ROWS = 12
_SYNC_ROWS = 8
_WAIT_ROWS = 6
_RANK_ROWS = 8
_STRAGGLER_ROWS = 5

_ALWAYS_SHOWN = ("compute", "idle")


# Each step by activity.


_ENOUGH = 12
"""Step windows shown one by one; more are one mean a rank, then three ranks."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One bar or row: a step window, or a rank's mean."""

    rank: int
    step: int | str
    """Number of the step, or what else the row is: ``mean``, ``fastest``, ``median``, ``slowest``."""
    window_ns: float
    breakdown_ns: Mapping[str, float]


def every_step(analysis: TraceAnalysis) -> list[StepRow]:
    """Return every step window."""
    return [
        StepRow(rank.rank, step.step, step.duration_ns, asdict(step.breakdown_ns))
        for rank in analysis.ranks
        for step in rank.steps
    ]


def step_rows(analysis: TraceAnalysis) -> list[StepRow]:
    """Return every step window, or each rank's mean, or the fastest, median and slowest rank: what fits."""
    totals = analysis.totals
    if totals.windows <= _ENOUGH:
        return every_step(analysis)
    if len(analysis.by_rank) <= _ENOUGH:
        return [_mean_of(rank, "mean") for rank in analysis.by_rank]
    by_number = {rank.rank: rank for rank in analysis.by_rank}
    chosen = {"fastest": totals.fastest_rank, "median": totals.median_rank, "slowest": totals.slowest_rank}
    return [_mean_of(by_number[rank], name) for name, rank in chosen.items() if rank is not None]


def _mean_of(rank: RankMeans, name: str) -> StepRow:
    return StepRow(rank.rank, name, rank.step_ns, rank.breakdown_ns)


def breakdown_table(analysis: TraceAnalysis, predicted: bool) -> Table:
    """Return the parts of the steps that fit, in milliseconds, with their mean and percentages.

    A ``predicted`` step's speed is in the estimate itself, which knows the model's share of its work.
    """
    totals, rows, every = analysis.totals, step_rows(analysis), every_step(analysis)
    parts = [part for part in BREAKDOWN_PARTS if part in _ALWAYS_SHOWN or totals.breakdown_ns[part]]
    columns = [
        c.number("rank"),
        c.number("step"),
        c.ms("window_ns", "window"),
        *(c.ms(f"{part}_ns", BREAKDOWN_PARTS[part].header, of=_part_of(part)) for part in parts),
    ]
    mean: dict[str, Value] = {f"{part}_ns": totals.breakdown_ns[part] for part in parts}
    shares: dict[str, Value] = {f"{part}_ns": f"{100 * totals.breakdown_frac[part]:.1f}" for part in parts}
    return c.table(
        "breakdown",
        "Each step by activity",
        columns,
        rows,
        every=None if rows == every else every,
        note="ms; communication and memcpy: exposed; the causes count memcpy as compute or offload",
        noun="step",
        totals=[
            {"rank": "mean", "window_ns": totals.step_ns, **mean},
            {"rank": "%", "window_ns": "100.0", **shares},
        ],
        remarks=[*_idle_sentence(analysis), *([] if predicted else _speed_sentence(analysis))],
    )


def _part_of(part: str) -> Callable[[StepRow], float]:
    return lambda row: row.breakdown_ns[part]


def _idle_sentence(analysis: TraceAnalysis) -> list[str]:
    named = [
        f"{format_ns(time)} {IDLE_CAUSES[cause].label if cause in IDLE_CAUSES else cause}"
        for cause, time in analysis.totals.idle_ns.items()
    ]
    return [f"Idle: {'; '.join(named)}."] if named else []


def _speed_sentence(analysis: TraceAnalysis) -> list[str]:
    totals = analysis.totals
    parts = [] if totals.tokens_per_s is None else [f"{totals.tokens_per_s:,.0f} tokens/s over all ranks"]
    parts += [] if totals.flops_per_s is None else [f"{format_flops(totals.flops_per_s)} a rank"]
    parts += [] if totals.mfu is None else [f"MFU {format_frac(totals.mfu)}"]
    unrecorded = any(r.throughput and r.throughput.measured_on == "unrecorded" for r in analysis.ranks)
    where = "unrecorded steps" if unrecorded else "traced steps"
    return [f"Speed in {where}: {', '.join(parts)}."] if parts else []


def step_table(analysis: TraceAnalysis) -> Table:
    """Return every step of every rank, for data formats."""
    parts = [f"{field.name}_ns" for field in fields(BreakdownNs)]
    columns = [
        c.number("rank", of="0.rank"),
        *(c.number(name, of=f"1.{name}") for name in ("step", "start_ns", "duration_ns")),
        *(c.number(name, of=f"1.breakdown_ns.{name.removesuffix('_ns')}") for name in parts),
    ]
    rows = [(rank, step) for rank in analysis.ranks for step in rank.steps]
    return c.table("steps", "Every step", columns, rows)


def kernel_table(analysis: TraceAnalysis) -> Table:
    """Return the kernels that take longest, by name."""
    on_device = any(rank.device_type != "cpu" for rank in analysis.ranks)
    title, of = ("Kernels", "kernel") if on_device else ("Operators", "operator")
    columns = [
        c.name("name", of, lambda name: "all others" if name is None else str(name)),
        c.word("kind", None, LANES),
        c.ms("total_ns", "ms"),
        c.frac("step_frac", "of the step"),
        c.mean(),
        c.time("mean_ns", "each"),
    ]
    note = "per rank and step, longest first; collectives are in their own table"
    return c.table("kernels", title, columns, analysis.kernels, note=note, limit=_KERNEL_ROWS, noun="name")


def line_table(analysis: TraceAnalysis) -> Table:
    """Return the lines of model and loss that compute most."""
    columns = [
        c.name("line", "line"),
        c.ms("forward_ns", "forward ms"),
        c.ms("backward_ns", "backward ms"),
        c.frac("step_frac", "of the step"),
    ]
    note = "compute, per rank and step, longest first; estimated by sampling the training's thread"
    return c.table("lines", "Lines", columns, analysis.lines, note=note, limit=_KERNEL_ROWS, noun="line")


def operator_table(analysis: TraceAnalysis) -> Table:
    """Return the rates of products and attention, by shape."""
    peaks = [
        c.frac("of_peak_flops_frac", "of peak\nFLOP/s"),
        c.frac("of_peak_bytes_frac", "of peak\nGB/s"),
        c.frac("roof_frac", "of the\nroof"),
    ]
    columns = [
        c.name("name", "operator"),
        c.name("shapes"),
        c.dtype(),
        c.ms("total_ns", "ms"),
        c.mean(),
        c.time("mean_ns", "each"),
        c.number("flops_per_s", "achieved", format_flops),
        c.gb_per_s("bytes_per_s", "GB/s at\nleast"),
        *(peaks if analysis.peak_flops_per_s else ()),
    ]
    note = "per rank and step, longest first; bytes: operands and results once"
    title, rows = "Achieved rates of products and attention", analysis.operators
    return c.table("operators", title, columns, rows, note=note, limit=_KERNEL_ROWS, noun="shape")


# Communication by layer.


def steps_of_a_kind(analysis: TraceAnalysis) -> list[Column]:
    """Return the column of steps, if rows are means of only some steps: models updated in turns."""
    if not analysis.by_layer_and_kind:
        return []
    return [c.text("steps", of=lambda row: ", ".join(map(str, row.steps)) or "all")]


def step_meant(analysis: TraceAnalysis) -> str:
    """Report which step the rows by layer are means of."""
    return "step of its kind" if analysis.by_layer_and_kind else "step"


def layer_table(analysis: TraceAnalysis) -> Table:
    """Return communication by layer, worst exposed first, repeated layers folded."""
    rows = analysis.by_layer_and_kind or analysis.by_layer_folded
    columns = [
        *steps_of_a_kind(analysis),
        c.layer(),
        c.text("phase"),
        c.op(),
        c.ms("exposed_ns", "exposed\nms"),
        c.ms("total_ns", "total\nms"),
        c.frac("overlap_frac", "overlap"),
        c.ms("stall_ns", "stall\nms"),
        c.mean(),
        c.sized("payload_bytes", "payload", unit="all"),
        c.sized("wire_bytes", "wire", unit="all"),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s"),
        c.dtype(),
        *([c.text("group")] if len({row.group for row in rows}) > 1 else []),
    ]
    return c.table(
        "by_layer",
        "Communication by layer",
        columns,
        rows,
        every=analysis.by_layer,
        note=f"most exposed first; mean per rank and {step_meant(analysis)}; stall: time the layer waited, "
        "queueing included",
        limit=_LAYER_ROWS,
        remarks=[_overlap_sentence(analysis), *counted(analysis), *_attribution_sentences(analysis)],
    )


def counted(analysis: TraceAnalysis) -> list[str]:
    """Say how the step's causes count the communication by layer; nothing beside a filtered table."""
    ledger = analysis.ledger if analysis.focus is None else None
    return [ledger.collectives] if ledger is not None and ledger.collectives else []


def _overlap_sentence(analysis: TraceAnalysis) -> str:
    totals = analysis.totals
    busy, uncovered = format_ns(totals.communication_ns or 0), format_ns(totals.exposed_ns or 0)
    return (
        f"A rank communicates for {busy} per step, {uncovered} of it exposed: "
        f"overlap {format_frac(totals.overlap_frac)}."
    )


def _attribution_sentences(analysis: TraceAnalysis) -> list[str]:
    """Say which collectives have no layer, and why; nothing where all have one."""
    reasons = analysis.attribution.unattributed_reasons
    return [f"Unattributed: {plural(count, 'collective')}, {reason}." for reason, count in reasons.items()]


def group_table(analysis: TraceAnalysis) -> Table:
    """Return the collectives of every rank, step and layer, for data formats."""
    return c.data("groups", "Collectives of every rank, step and layer", GroupRow, analysis.groups)


# Behind the breakdown.


def layer_wait_table(analysis: TraceAnalysis) -> Table:
    """Return how long each rank waits for each layer."""
    columns = [c.number("rank"), c.layer(), c.ms("stall_ns", "waited")]
    rows = sorted(analysis.layer_waits, key=lambda row: -row.stall_ns)
    title = "The longest waits by rank and layer"
    return c.table("layer_waits", title, columns, rows, note="ms per step", limit=_WAIT_ROWS)


def fit_table(analysis: TraceAnalysis) -> Table:
    """Return latency and rate of each kind of collective."""
    columns = [
        c.op(),
        c.time("latency_ns", "latency"),
        c.gb_per_s("bytes_per_s", "GB/s at\nany size"),
        c.number("knee_bytes", "half rate\nat", lambda size: show_bytes(round(size))),
        c.frac("error_frac", "largest\nerror"),
        c.number("sizes"),
        c.number("group_size", "ranks"),
    ]
    note = "a collective's time fitted as latency plus wire bytes over a rate"
    return c.table("bandwidth_fits", "Latency and rate", columns, analysis.bandwidth_fits, note=note)


def late_table(analysis: TraceAnalysis) -> Table:
    """Return the collectives that the compute stream waited for, alike layers folded."""
    in_time = {**LATE_CAUSES, "": Word("in time")}
    columns = [
        c.layer(),
        c.text("phase"),
        c.op(),
        c.ms("stall_ns", "waited\nfor it"),
        c.word("cause", "mainly because", in_time, of=lambda row: row.cause or ""),
        c.ms("issued_before_ns", "launched\nbefore"),
        c.ms("finished_before_ns", "finished\nbefore"),
        c.mean(),
    ]
    return c.table(
        "late",
        "Arrival of collectives",
        columns,
        [row for row in analysis.late_folded if row.stall_ns > 0],
        every=analysis.late,
        note="ms; before it was needed, negative: after; medians, and the wait per rank and step",
        limit=_LATE_ROWS,
    )


def bandwidth_table(analysis: TraceAnalysis) -> Table:
    """Return the rates of collectives by op, group and size."""
    rows = analysis.bandwidth
    peak_known = any(row.of_peak_frac is not None for row in rows)
    columns = [
        c.op(),
        c.size("payload_bytes", "payload"),
        c.mean(),
        c.gb_per_s("algbw_bytes_per_s", "algbw"),
        c.gb_per_s("busbw_bytes_per_s", "busbw"),
        c.frac("of_best_frac", "of the best"),
        *([c.frac("of_peak_frac", "of the peak")] if peak_known else []),
        c.dtype(),
        c.number("group_size", "ranks"),
        c.text("group", of=lambda row: _which_group(row, rows)),
    ]
    known = all(row.waits_known for row in rows)
    missing = "" if known else ", except where other ranks' traces are missing"
    note = (
        "GB/s, medians, most bytes first; algbw includes the wait for the last rank, busbw (as in nccl-tests)"
        f" excludes it{missing}"
    )
    return c.table("bandwidth", "Bandwidth", columns, rows, note=note, limit=_BANDWIDTH_ROWS)


def _which_group(row: BandwidthRow, rows: Sequence[BandwidthRow]) -> str | None:
    """The mesh dimension, with the ranks where several of its groups have rows."""
    alike = {other.process_group for other in rows if other.mesh_dim == row.mesh_dim}
    if row.mesh_dim and row.ranks and len(alike) > 1:
        return f"{row.mesh_dim}, ranks {format_numbers(row.ranks)}"
    return row.mesh_dim or row.process_group


def host_sync_table(analysis: TraceAnalysis) -> Table:
    """Return the calls by which the host waited for the device inside steps."""
    columns = [
        c.layer(),
        c.text("phase"),
        c.name("call"),
        c.time("blocked_ns", "blocked"),
        c.mean(),
        c.name("operator", "from operator"),
    ]
    note = "inside steps, per rank and step, longest first"
    title, rows = "The host waited for the device", analysis.host_sync_places
    return c.table("host_syncs", title, columns, rows, note=note, limit=_SYNC_ROWS, noun="place")


# Ranks against each other.


def wait_table(analysis: TraceAnalysis) -> Table:
    """Return how long each rank waited, and how long it kept the others waiting."""
    columns = [
        c.number("rank"),
        c.time("wait_caused_ns", "others\nwaited"),
        c.time("wait_ns", "waited\nitself"),
    ]
    note = "in collectives, over all steps; others waited: sum over the other ranks"
    title, rows = "Waiting for each other", analysis.cross_rank.ranks
    return c.table("waits", title, columns, rows, note=note, limit=_RANK_ROWS, noun="rank")


def straggler_table(analysis: TraceAnalysis) -> Table:
    """Return the reasons that made ranks late, the costliest first."""
    columns = [
        c.number("rank"),
        c.layer(),
        c.time("wait_caused_ns", "others\nwaited"),
        c.count("collectives", "n"),
        c.prose("cause", "because"),
    ]
    note = "over all steps, largest first; n: collectives that waited"
    title, rows = "Why ranks came late", analysis.cross_rank.stragglers
    return c.table("stragglers", title, columns, rows, note=note, limit=_STRAGGLER_ROWS, noun="reason")
