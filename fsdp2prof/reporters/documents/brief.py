"""The first screen of a run, a trace or a memory analysis: its short form in text and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Findings, Section, Sentences, Value
from fsdp2prof.reporters.formats import show_ns
from fsdp2prof.results.finding import Finding
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, GAIN_BASES

if TYPE_CHECKING:
    from fsdp2prof.results.ledger import LedgerEntry
    from fsdp2prof.results.memory import MemoryAnalysis
    from fsdp2prof.results.peak import LayerMemory, Peak
    from fsdp2prof.results.run import RunAnalysis, RunRank
    from fsdp2prof.results.step import RankMeans
    from fsdp2prof.results.trace import TraceAnalysis

__all__ = ["in_order", "memory_brief", "run_brief", "trace_brief"]

_CAUSES, _FINDINGS, _LAYERS, _KINDS, _RANKS = 6, 4, 10, 6, 4

_WORTH_A_ROW = 0.01
"""Fraction of a step from which lost time, or waiting for a rank, has a row."""

_ALIKE = 1.05
"""Peaks of ranks that differ by less are alike."""

_ORDER = ("out_of_memory", "timeline", "findings", "tried", "what_if", "communication", "memory", "ranks")


def in_order(sections: Sequence[Section]) -> list[Section]:
    """Return the sections in the order in which a reader wants them, details last."""
    place = {anchor: at for at, anchor in enumerate(_ORDER)}
    return sorted(sections, key=lambda one: (one.detail, place.get(one.anchor, len(place))))


def run_brief(analysis: RunAnalysis) -> list[Section]:
    """Return the short form of a run."""
    trace, memory = analysis.trace, analysis.memory
    return [
        *_tried(analysis),
        *(trace_brief(trace, analysis.findings) if trace else _findings(analysis.findings)),
        *(memory_brief(memory, ()) if memory else ()),
        *_ranks(analysis),
    ]


def _tried(analysis: RunAnalysis) -> list[Section]:
    if analysis.trial is None:
        return []
    from fsdp2prof.reporters.documents.trial import trial_section

    return trial_section(analysis.trial, brief=True)


def trace_brief(analysis: TraceAnalysis, findings: Sequence[Finding]) -> list[Section]:
    """Return the short form of a trace analysis with the findings of the whole."""
    return [*_lost(analysis), *_findings(findings), *_layers(analysis), *_step(analysis)]


def memory_brief(analysis: MemoryAnalysis, findings: Sequence[Finding]) -> list[Section]:
    """Return the short form of a memory analysis with the findings of the whole."""
    return [*_findings(findings), *_peak(analysis)]


def _findings(findings: Sequence[Finding]) -> list[Section]:
    first = [finding for finding in findings if finding.severity != "info"][:_FINDINGS] or findings[:1]
    more = len(findings) - len(first)
    block = Findings(title="Findings", findings=[_short(finding) for finding in first], more=more)
    return c.section("findings", "Findings", block) if first else []


def _short(finding: Finding) -> Finding:
    """Return the finding with its first sentence and the change."""
    said, dot, _ = finding.message.partition(". ")
    change = "" if finding.change in said else f" {finding.change}"
    return replace(finding, message=f"{said}{dot.strip()}{change}")


def _lost(analysis: TraceAnalysis) -> list[Section]:
    """Return the lost time by cause, with what gives it back."""
    ledger = analysis.ledger
    if ledger is None:
        return []
    columns = [
        c.name("title", "lost time"),
        c.ms("ns", "ms"),
        c.frac("frac", "of the\nstep"),
        c.ms("gain_ns", "gain", of=lambda one: one.remedy and one.remedy.gain_ns),
        c.word("basis", "by", GAIN_BASES, of=lambda one: one.remedy and one.remedy.basis),
        c.text("confidence"),
    ]
    entries = [entry for entry in ledger.entries if _lost_time(entry)]
    table = c.table(
        "lost",
        "Lost time by cause",
        columns,
        entries,
        known=True,
        note="ms of a mean traced step",
        limit=_CAUSES,
        noun="cause",
    )
    return c.section("lost", table.title, table)


def _lost_time(entry: LedgerEntry) -> bool:
    return entry.cause != "compute" and entry.frac >= _WORTH_A_ROW


def _step(analysis: TraceAnalysis) -> list[Section]:
    """Return the parts of the mean step and of the slowest rank's."""
    totals = analysis.totals
    if totals.step_ns is None:
        return []
    parts = [part for part in BREAKDOWN_PARTS if totals.breakdown_ns[part]]
    longer = (1 + _WORTH_A_ROW) * totals.step_ns
    slowest = [
        rank for rank in analysis.by_rank if rank.rank == totals.slowest_rank and rank.step_ns > longer
    ]
    columns = [
        c.text("of", "", of=0),
        c.ms("step_ns", "step", of="1.step_ns"),
        *(c.ms(f"{part}_ns", BREAKDOWN_PARTS[part].header, of=_part(part)) for part in parts),
    ]
    shares: dict[str, Value] = {f"{part}_ns": f"{100 * totals.breakdown_frac[part]:.1f}" for part in parts}
    rows: list[tuple[str, object]] = [("mean", totals)]
    rows += [(f"rank {rank.rank}, slowest", rank) for rank in slowest]
    table = c.table(
        "breakdown",
        "Where the step goes",
        columns,
        rows,
        note="ms; communication and memcpy: only the part that no compute hides",
        totals=[{"of": "% of the mean", "step_ns": "100.0", **shares}],
    )
    return c.section("step", table.title, table)


def _part(part: str) -> Callable[[tuple[str, RankMeans]], float]:
    def taken(row: tuple[str, RankMeans]) -> float:
        return row[1].breakdown_ns.get(part, 0.0)

    return taken


def _layers(analysis: TraceAnalysis) -> list[Section]:
    columns = [
        c.layer(),
        c.text("phase"),
        c.op(),
        c.ms("exposed_ns", "exposed\nms"),
        c.ms("total_ns", "total\nms"),
        c.ms("stall_ns", "stall\nms"),
        c.mean(),
        c.sized("payload_bytes", "payload"),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s"),
    ]
    table = c.table(
        "by_layer",
        "Communication by layer",
        columns,
        analysis.by_layer_folded,
        note="worst exposed first; mean per rank and step",
        limit=_LAYERS,
    )
    return c.section("communication", table.title, table)


def _peak(analysis: MemoryAnalysis) -> list[Section]:
    """Return the fullest rank's peak by kind, each with the layer that holds most of it."""
    if not analysis.ranks:
        return []
    rank = analysis.ranks[0]
    peak = rank.peak
    columns = [
        c.category(),
        c.size("bytes"),
        c.percent("frac"),
        c.name("layer", "most of it in", of=lambda row: _fullest(peak, row.category)),
        c.size("layer_bytes", "bytes", of=lambda row: _bytes_of_fullest(peak, row.category)),
    ]
    where = f"in {peak.phase}" if peak.fqn is None else f"in {peak.phase} of {peak.fqn or 'the root'}"
    table = c.table(
        "by_category",
        f"Memory at the peak of rank {rank.rank}",
        columns,
        peak.by_category,
        note=where,
        limit=_KINDS,
        noun="kind",
        totals=[{"category": "allocated", "bytes": peak.allocated_bytes, "frac": "100.0"}],
    )
    return c.section("memory", table.title, table)


def _fullest_layer(peak: Peak, category: str) -> LayerMemory | None:
    known = [layer for layer in peak.layers_folded if layer.categories.get(category) and layer.fqns != [None]]
    return max(known, key=lambda layer: layer.categories[category], default=None)


def _fullest(peak: Peak, category: str) -> str | None:
    layer = _fullest_layer(peak, category)
    return None if layer is None else layer.name


def _bytes_of_fullest(peak: Peak, category: str) -> int | None:
    layer = _fullest_layer(peak, category)
    return None if layer is None else layer.categories[category]


def _ranks(analysis: RunAnalysis) -> list[Section]:
    """Return the ranks that differ from the others: ended otherwise, late, fuller."""
    lines = [_ended(rank) for rank in analysis.run.ranks if rank.state != "complete"]
    lines += [] if analysis.trace is None else _late(analysis.trace)
    peaks = [] if analysis.memory is None else analysis.memory.ranks
    if peaks and peaks[0].peak.allocated_bytes > _ALIKE * peaks[-1].peak.allocated_bytes:
        most, least = peaks[0], peaks[-1]
        lines.append(
            f"rank {most.rank} holds {format_bytes(most.peak.allocated_bytes)} at its peak, "
            f"rank {least.rank} {format_bytes(least.peak.allocated_bytes)}"
        )
    more = [f"and {len(lines) - _RANKS} more; --section run lists them"] if len(lines) > _RANKS else []
    block = Sentences(title="Ranks that differ", lines=[*lines[:_RANKS], *more], style="list")
    return c.section("ranks", block.title, block) if lines else []


def _late(trace: TraceAnalysis) -> list[str]:
    """Name the late ranks that the others wait for by a part of a step that matters."""
    late = trace.cross_rank.late
    outside = 0 if late is None else (late.compared - len(late.ranks)) * late.steps
    if late is None or not outside:
        return []
    waits = {one.rank: one.wait_caused_ns / outside for one in late.ranks}
    least = _WORTH_A_ROW * (trace.totals.step_ns or 0.0)
    return [
        f"rank {rank} is late: the others wait {show_ns(wait)} a step for it"
        for rank, wait in waits.items()
        if wait > least
    ]


def _ended(rank: RunRank) -> str:
    error = f": {rank.error}" if rank.error else ""
    return f"rank {rank.rank} is {rank.state}{error}"
