"""Document of a memory analysis: the height of the peaks, the content of the highest, changes that lower
it."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import Figure
from fsdp2prof.reporters.charts.memory import (
    course_chart,
    course_marks,
    course_totals,
    memory_layer_chart,
)
from fsdp2prof.reporters.document import Block, Chart, Document, Facts, KeyFigure, Section, Spark, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents import memory_tables as tables
from fsdp2prof.reporters.documents.brief import findings_section, in_order, memory_brief
from fsdp2prof.reporters.documents.links import memory_links
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import OutOfMemory
from fsdp2prof.units import format_bytes, format_frac, plural
from fsdp2prof.vocabulary import PHASES, layer_name


@builds(MemoryAnalysis)
def memory_document(analysis: MemoryAnalysis) -> Document:
    """Lay out a memory analysis."""
    findings = _findings(analysis)
    sections = in_order([*findings_section(findings, analysis.advice), *memory_sections(analysis)])
    return Document(
        title=f"Memory of {plural(len({rank.rank for rank in analysis.ranks}), 'rank')}",
        subtitle=", ".join(sorted({rank.device for rank in analysis.ranks}))
        + (f"; only {analysis.focus}" if analysis.focus else ""),
        numbers=memory_numbers(analysis),
        sections=sections,
        data=memory_data(analysis),
        places=lambda: memory_links(analysis, sections),
        brief=memory_brief(analysis, findings),
    )


def _findings(analysis: MemoryAnalysis) -> list[Finding]:
    """A failed request has its own verdict and section."""
    return [finding for finding in analysis.findings if finding.id != "out_of_memory"]


def memory_numbers(analysis: MemoryAnalysis) -> list[KeyFigure]:
    """Return the numbers of the fullest rank that a reader needs first."""
    found = analysis.key_figures
    if found is None:
        return []
    sizes = {f"peak memory, rank {found.rank}": found.allocated_bytes}
    if found.reserved_bytes is not None:
        sizes["reserved"] = found.reserved_bytes
    *others, last = sizes
    full = last if found.device_frac is None else f"{last}, {format_frac(found.device_frac)} of the device"
    labels = dict(zip(sizes, [*others, full], strict=True))
    return [KeyFigure(value=format_bytes(size), label=labels[name]) for name, size in sizes.items()]


def memory_sections(analysis: MemoryAnalysis) -> list[Section]:
    """Lay out the request that failed, if one did, then the peaks and the fullest rank in detail."""
    if not analysis.ranks:
        return []
    fullest = analysis.ranks[0]
    failed = [_failure_section(rank, rank.oom) for rank in analysis.ranks if rank.oom is not None][:1]
    return [*failed, *_peak_sections(analysis), *_course_section(fullest), *_allocator_section(fullest)]


def memory_data(analysis: MemoryAnalysis) -> list[Table]:
    """Return the tables that only data formats hold."""
    return [tables.peak_rows_table(analysis), tables.layer_rows_table(analysis)]


def _failure_section(rank: RankMemory, oom: OutOfMemory) -> Section:
    """Lay out a failed request of the fullest rank that has one."""
    title = f"Out of memory on rank {rank.rank}"
    by = "" if oom.op is None or oom.op.endswith(oom.place or "-") else f" by {oom.op}"
    request = f"{format_bytes(oom.requested_bytes)}{by}" + (f" at {oom.place}" if oom.place else "")
    where = (
        {"phase": oom.phase} if oom.fqn is None else {"phase, layer": f"{oom.phase}, {layer_name(oom.fqn)}"}
    )
    facts = {
        "request": request,
        **where,
        "allocated": format_bytes(oom.allocated_bytes),
        "reserved after emptying the cache": _bytes(oom.reserved_bytes),
        "free on the device": _bytes(oom.device_free_bytes),
        "missing": _bytes(oom.missing_bytes),
        "largest free block": _bytes(oom.largest_free_block_bytes),
    }
    blocks: list[Block] = [Facts(title=title, pairs=facts)]
    if oom.remedies:
        blocks.append(tables.remedy_table("Changes that would let it fit", oom.remedies, oom))
    return Section(anchor="out_of_memory", title=title, blocks=blocks)


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _peak_sections(analysis: MemoryAnalysis) -> list[Section]:
    rank = analysis.ranks[0]
    peak = rank.peak
    known = any(row.fqns != [None] for row in peak.layers)
    layers = _chart(
        "memory_layers", tables.largest_layer(peak.layers_folded), memory_layer_chart(peak.layers_folded)
    )
    remedies = tables.remedy_table("Changes that lower the peak", rank.remedies)
    return [
        *c.section(
            "memory",
            "Memory at the peak",
            tables.peak_table(analysis),
            tables.category_table(rank),
            *(layers if known else ()),
            remedies if rank.oom is None else None,
            lead="The peak is the instant of the most allocated bytes; kinds and layers sum to it exactly.",
        ),
        *c.section(
            "memory_by_layer",
            "Memory by layer and block",
            tables.layer_memory_table(peak) if known else None,
            tables.block_table(rank),
            tables.line_table(rank),
            detail=True,
        ),
    ]


def _course_section(rank: RankMemory) -> list[Section]:
    title = f"Memory of rank {rank.rank} over time"
    totals, marks = course_totals(rank), course_marks(rank)
    legend = ", ".join(f"{word.header} {word.label}" for word in PHASES.values() if word.header in marks)
    spark = Spark(values=totals, full=format_bytes(max(totals, default=0)), marks=marks, legend=legend)
    figure = course_chart(rank)
    blocks: list[Block] = []
    if figure is not None:
        blocks.append(
            Chart(
                name="memory_course",
                title=f"Memory peaks at {format_bytes(rank.peak.allocated_bytes)} in {rank.peak.phase}",
                note="allocated bytes over time",
                figure=figure,
                spark=spark,
            )
        )
    if any(row.fqn is not None for row in rank.layers):
        blocks.append(tables.layer_peak_table(rank))
    return c.section("memory_over_time", title, *blocks, detail=True)


def _allocator_section(rank: RankMemory) -> list[Section]:
    if rank.fragmentation is None:
        return []
    table = tables.fragmentation_table(rank.fragmentation, rank.rank)
    return c.section("allocator", table.title, table, detail=True)


def _chart(name: str, title: str, figure: Figure | None) -> list[Chart]:
    return [] if figure is None else [Chart(name=name, title=title, figure=figure)]
