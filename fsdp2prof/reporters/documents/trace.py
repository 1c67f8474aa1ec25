"""Document of a trace analysis: where the step goes, communication by layer, ranks against each other."""

from __future__ import annotations

from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import (
    Block,
    Chart,
    Document,
    KeyFigure,
    Section,
    Sentences,
    Table,
    later,
)
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents import trace_tables as tables
from fsdp2prof.reporters.documents.brief import (
    causes_section,
    changes_worth_most,
    findings_section,
    in_order,
    trace_brief,
)
from fsdp2prof.reporters.documents.timeline import timeline_section
from fsdp2prof.reporters.documents.what_if import what_if_section
from fsdp2prof.reporters.formats import show_gb_per_s, show_op
from fsdp2prof.results.ledger import LedgerEntry
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.units import format_bytes, format_flops, format_frac, format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, LEDGER_CAUSES, layer_name

_STATES_NAMED = 4
_PARTS_NAMED = 3
_SIZES = 5
"""Payloads from which a chart of bandwidth against size shows a course."""

_NO_COLLECTIVE = "No collective ran in the analysed window."
_WAITING = "of the compute stream for collectives; mean per step"
_NO_SHAPES = (
    "No matrix product or attention has its shape in the trace, so its rate is unknown: record "
    "with record_shapes=True (fsdp2prof record does). Convolutions are not among them."
)
_NO_STEP = "These traces contain no step; the warnings say why."


@builds(TraceAnalysis)
def trace_document(analysis: TraceAnalysis) -> Document:
    """Lay out a trace analysis."""
    changes = changes_worth_most(analysis)
    sections = in_order(
        [
            *findings_section(analysis.findings, analysis.advice, analysis.verdict),
            *trace_sections(analysis),
        ]
    )
    return Document(
        title=f"Trace of {_who(analysis)}",
        subtitle=_what(analysis) + (f"; only {analysis.focus}" if analysis.focus else ""),
        changes=changes,
        numbers=trace_numbers(analysis),
        sections=sections,
        data=trace_data(analysis),
        places=later(
            "documents.links.trace_links", analysis, sections, analysis.verdict, changes, analysis.findings
        ),
        brief=trace_brief(analysis, analysis.findings, analysis.verdict),
    )


def trace_numbers(analysis: TraceAnalysis) -> list[KeyFigure]:
    """Return the numbers that a reader needs first, four at most; none without steps."""
    totals, step = analysis.totals, analysis.unrecorded_step
    if totals.step_ns is None:
        return []
    numbers = [KeyFigure(value=format_ns(totals.step_ns), label="traced step, mean")]
    if step is not None:
        ledger = analysis.ledger
        typical = step.median_ns if ledger is None else ledger.unrecorded_step_ns or step.median_ns
        label = f"unrecorded step, {'median' if typical == step.median_ns else 'mean'}"
        numbers.insert(0, KeyFigure(value=format_ns(typical), label=label))
    exposed = _exposed_frac(analysis)
    if exposed is not None and any(layer.fqn is not None for layer in analysis.layers):
        label = f"of the traced step is {LEDGER_CAUSES['communication'].label}"
        numbers.append(KeyFigure(value=format_frac(exposed), label=label))
    if totals.mfu is not None:
        numbers.append(KeyFigure(value=format_frac(totals.mfu), label="MFU"))
    elif totals.tokens_per_s is not None:
        numbers.append(KeyFigure(value=f"{totals.tokens_per_s:,.0f}", label="tokens/s over all ranks"))
    return numbers


def _exposed_frac(analysis: TraceAnalysis) -> float | None:
    """Return the share that the findings state: the ledger's, which knows more than the breakdown."""
    ledger = analysis.ledger
    if ledger is None or not ledger.step_ns:
        return analysis.totals.exposed_frac
    return ledger.causes_ns.get("communication", 0.0) / ledger.step_ns


def trace_sections(analysis: TraceAnalysis, *, predicted: bool = False) -> list[Section]:
    """Show the step, the communication and the ranks, each if there is data.

    A ``predicted`` step has no remarks about missing records.
    """
    return [
        *timeline_section(analysis.timeline, _late_ranks(analysis), _first_loss(analysis)),
        *what_if_section(analysis.what_if),
        *causes_section(analysis, "predicted step" if predicted else "traced step"),
        _communication_section(analysis),
        *_rank_section(analysis),
        *_step_section(analysis, predicted),
        *_operator_section(analysis, predicted),
        *_arrival_section(analysis),
        *_bandwidth_section(analysis),
    ]


def _first_loss(analysis: TraceAnalysis) -> LedgerEntry | None:
    """Return the loss that the verdict begins with."""
    entries = [] if analysis.ledger is None else analysis.ledger.entries
    return next((one for one in entries if one.told), None)


def _late_ranks(analysis: TraceAnalysis) -> list[int]:
    """Return the ranks that losses are charged to, those reported first, then the costliest."""
    entries = [] if analysis.ledger is None else analysis.ledger.entries
    return list(dict.fromkeys(one.rank for one in entries if one.rank is not None))


def trace_data(analysis: TraceAnalysis) -> list[Table]:
    """Return the tables that only data formats hold."""
    return [tables.group_table(analysis), tables.step_table(analysis)]


def _who(analysis: TraceAnalysis) -> str:
    ranks = analysis.ranks
    worlds = [rank.world_size for rank in ranks if rank.world_size]
    of = f" of {max(worlds)}" if worlds and max(worlds) != len(ranks) else ""
    return plural(len(ranks), "rank") + of


def _what(analysis: TraceAnalysis) -> str:
    """Return device, steps, and the ranks that did not end well."""
    devices = ", ".join(sorted({rank.device_name or rank.device_type for rank in analysis.ranks}))
    unfinished = [
        f"rank {rank.rank} {rank.state}"
        for rank in analysis.ranks
        if rank.state is not None and rank.state != "complete"
    ]
    more = ", ..." if len(unfinished) > _STATES_NAMED else ""
    states = f"; {', '.join(unfinished[:_STATES_NAMED])}{more}" if unfinished else ""
    return f"{devices}, {_step_numbers(analysis)}{states}"


def _step_numbers(analysis: TraceAnalysis) -> str:
    """Return the analysed steps in words: ``steps 3-5``."""
    numbers = sorted({step.step for rank in analysis.ranks for step in rank.steps})
    if not numbers:
        return "no steps"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]}-{numbers[-1]}"
    return ("step " if len(numbers) == 1 else "steps ") + ", ".join(map(str, numbers))


def _step_section(analysis: TraceAnalysis, predicted: bool) -> list[Section]:
    if not analysis.totals.windows:
        return []
    table = tables.breakdown_table(analysis, predicted)
    rows = tables.step_rows(analysis)
    chart = _chart("step_chart", step_title(analysis), "each step, ms", rows) if rows else []
    lead = (
        f"{_who(analysis)}, {_what(analysis)}. The parts are disjoint and sum to the window exactly. "
        "Communication counts only while no compute or FSDP copy runs."
    )
    return c.section("step", table.title, *chart, table, lead=lead, detail=True)


def _operator_section(analysis: TraceAnalysis, predicted: bool) -> list[Section]:
    """Show kernels by name, lines, and products and attention against the device's roofline if known."""
    if not analysis.totals.windows:
        return []
    kernels = tables.kernel_table(analysis)
    blocks: list[Block] = [kernels]
    if analysis.lines:
        blocks.append(tables.line_table(analysis))
    if analysis.operators:
        peaks = analysis.peak_flops_per_s
        if peaks and any(row.bytes for row in analysis.operators):
            of = analysis.operators, peaks, analysis.peak_memory_bytes_per_s
            blocks += _chart("roofline_chart", operators_title(analysis), "larger points: more time", *of)
        blocks.append(tables.operator_table(analysis))
    elif not predicted and analysis.kernels and _no_flops(analysis):
        blocks.append(Sentences(title="Achieved rates of products and attention", lines=[_NO_SHAPES]))
    return c.section("operators", kernels.title, *blocks, detail=True)


def _no_flops(analysis: TraceAnalysis) -> bool:
    return all(step.flops is None for rank in analysis.ranks for step in rank.steps)


def _communication_section(analysis: TraceAnalysis) -> Section:
    title = "Communication by layer"
    if not analysis.by_layer:
        nothing = Sentences(title=title, lines=[_NO_COLLECTIVE if analysis.totals.windows else _NO_STEP])
        return Section(anchor="communication", title=title, blocks=[nothing])
    note = "bar: exposed; tick: all communication of the layer"
    chart: list[Chart] = []
    if len(analysis.layers) > 1:
        chart = _chart("layer_chart", layers_title(analysis), note, analysis.layers, analysis.by_layer)
    return Section(anchor="communication", title=title, blocks=[*chart, tables.layer_table(analysis)])


def _arrival_section(analysis: TraceAnalysis) -> list[Section]:
    """Lay out the waits: of the compute stream for collectives, of the host for the device."""
    late = tables.late_table(analysis) if analysis.late_folded else None
    note = "from launch to end in ms, medians; needed at 0, so collectives that end after 0 are late"
    chart: list[Chart] = []
    if analysis.arrivals:
        chart = _chart("prefetch_chart", arrivals_title(analysis), note, analysis.arrivals)
    waits: list[Chart] = []
    if any(row.stall_ns for row in analysis.layer_waits):
        waits = _chart("wait_chart", waits_title(analysis), _WAITING, analysis.layer_waits)
    return c.section(
        "waits",
        "Waits for collectives",
        *waits,
        tables.layer_wait_table(analysis) if waits else None,
        *(chart if late else ()),
        late,
        tables.host_sync_table(analysis),
        detail=True,
    )


def _bandwidth_section(analysis: TraceAnalysis) -> list[Section]:
    if not analysis.bandwidth:
        return []
    note = "dashed: fit of latency plus bytes over a rate; open: may include waiting for absent ranks"
    chart: list[Chart] = []
    if len({row.payload_bytes for row in analysis.bandwidth}) >= _SIZES and _rated_sizes(analysis) > 1:
        of = analysis.bandwidth, analysis.bandwidth_fits
        chart = _chart("bandwidth_chart", bandwidth_title(analysis), note, *of)
    fits = tables.fit_table(analysis)
    return c.section("bandwidth", "Bandwidth", *chart, tables.bandwidth_table(analysis), fits, detail=True)


def _rated_sizes(analysis: TraceAnalysis) -> int:
    rated = (row for row in analysis.bandwidth if row.busbw_bytes_per_s)
    return len({row.payload_bytes for row in rated if row.payload_bytes})


def _rank_section(analysis: TraceAnalysis) -> list[Section]:
    across, title = analysis.cross_rank, "Ranks against each other"
    if not across.summary:
        return []
    said = Sentences(title=title, lines=across.summary)
    return c.section("ranks", title, said, tables.wait_table(analysis), tables.straggler_table(analysis))


def _chart(name: str, title: str, note: str, *of: Any) -> list[Chart]:
    """Return the chart that the function of its name draws ``of`` something."""
    return [Chart(name=name, title=title, note=note, figure=later(f"charts.trace.{name}", *of))]


# What each chart shows, in its title: the finding with its unit.


def step_title(analysis: TraceAnalysis) -> str:
    """Name the largest activities of the step, collectives of all kinds beside which nothing runs as one."""
    totals = analysis.totals
    parts = {"collectives alone": totals.exposed_frac or 0.0}
    for part, share in totals.breakdown_frac.items():
        if not part.startswith("exposed") or part == "exposed_memcpy":
            parts[BREAKDOWN_PARTS[part].label] = share
    largest = sorted((part for part in parts if parts[part]), key=lambda part: -parts[part])[:_PARTS_NAMED]
    return f"By activity, a step is {', '.join(f'{format_frac(parts[part])} {part}' for part in largest)}"


def layers_title(analysis: TraceAnalysis) -> str:
    """Name the layer that exposes most."""
    worst = max(analysis.layers, key=lambda layer: layer.exposed_ns)
    if not worst.exposed_ns:
        return "All communication is hidden"
    return f"{layer_name(worst.fqn)} exposes most: {format_ns(worst.exposed_ns)} of communication per step"


def arrivals_title(analysis: TraceAnalysis) -> str:
    """Name the longest wait."""
    late = max(analysis.arrivals, key=lambda row: row.stall_ns, default=None)
    if late is None or not late.stall_ns:
        return "Every collective finished in time"
    what = f"{layer_name(late.fqn)} {show_op(late.op)} in {late.phase}"
    return f"Longest wait: {what}, {format_ns(late.stall_ns)} per step"


def bandwidth_title(analysis: TraceAnalysis) -> str:
    """Name the best rate."""
    rated = [row for row in analysis.bandwidth if row.busbw_bytes_per_s]
    best = max(rated, key=lambda row: row.busbw_bytes_per_s or 0, default=None)
    if best is None:
        return "Bandwidth against size"
    rate = show_gb_per_s(best.busbw_bytes_per_s)
    return f"The best busbw is {rate} GB/s: {show_op(best.op)} of {format_bytes(best.payload_bytes)}"


def waits_title(analysis: TraceAnalysis) -> str:
    """Name the rank and layer of the longest waiting."""
    longest = max(analysis.layer_waits, key=lambda row: row.stall_ns, default=None)
    if longest is None:
        return "Waiting by rank and layer"
    layer = layer_name(longest.fqn)
    return f"Rank {longest.rank} waits longest for {layer}: {format_ns(longest.stall_ns)} per step"


def operators_title(analysis: TraceAnalysis) -> str:
    """Name the longest operator and its rate."""
    first = analysis.operators[0]
    rate = format_flops(first.flops_per_s)
    share = f", {format_frac(first.roof_frac)} of its roof" if first.roof_frac is not None else ""
    what = f"{first.name.removeprefix('aten::')} of {first.shapes}"
    return (
        f"Longest matrix product or attention: {what}, {format_ns(first.total_ns)} per step at {rate}{share}"
    )
