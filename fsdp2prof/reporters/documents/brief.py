"""The first screen of a run, a trace or a memory analysis: its short form in text and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Findings, Section, Sentences, Value
from fsdp2prof.reporters.documents.trace_tables import counted, step_meant, steps_of_a_kind
from fsdp2prof.reporters.formats import show_ns
from fsdp2prof.results.finding import Finding
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import CONFIDENCES, GAIN_BASES, quoted_error

if TYPE_CHECKING:
    from fsdp2prof.results.memory import MemoryAnalysis
    from fsdp2prof.results.peak import LayerMemory, Peak
    from fsdp2prof.results.run import RunAnalysis, RunRank
    from fsdp2prof.results.trace import TraceAnalysis

_FINDINGS, _LAYERS, _KINDS, _RANKS = 4, 10, 6, 4

_ALIKE = 1.05
"""Peaks and steps of ranks that differ by less are alike."""

_ORDER = (
    "out_of_memory",
    "timeline",
    "tried",
    "what_if",
    "findings",
    "lost",
    "communication",
    "memory",
    "ranks",
)


def in_order(sections: Sequence[Section]) -> list[Section]:
    """Return the sections in the order in which a reader wants them, details last."""
    place = {anchor: at for at, anchor in enumerate(_ORDER)}
    return sorted(sections, key=lambda one: (one.detail, place.get(one.anchor, len(place))))


def run_brief(analysis: RunAnalysis) -> list[Section]:
    """Return the short form of a run."""
    trace, memory, found, verdict = analysis.trace, analysis.memory, analysis.findings, analysis.verdict
    return [
        *_tried(analysis),
        *(trace_brief(trace, found, verdict) if trace else _findings(found, verdict)),
        *(memory_brief(memory, ()) if memory else ()),
        *_ranks(analysis),
    ]


def _tried(analysis: RunAnalysis) -> list[Section]:
    if analysis.trial is None:
        return []
    from fsdp2prof.reporters.documents.trial import trial_section

    return trial_section(analysis.trial, brief=True)


def trace_brief(
    analysis: TraceAnalysis, findings: Sequence[Finding], verdict: Sequence[str]
) -> list[Section]:
    """Return the short form of a trace analysis, with the findings that the verdict leaves out."""
    return [*causes_section(analysis), *_findings(findings, verdict), *_layers(analysis)]


def memory_brief(analysis: MemoryAnalysis, findings: Sequence[Finding]) -> list[Section]:
    """Return the short form of a memory analysis with the findings of the whole."""
    return [*_findings(findings, analysis.verdict), *_peak(analysis)]


def _findings(findings: Sequence[Finding], verdict: Sequence[str]) -> list[Section]:
    """Return the first findings that the verdict does not hold already."""
    rest = [one for one in findings if not any(_problem(one) in line for line in verdict)]
    first = [finding for finding in rest if finding.severity != "info"][:_FINDINGS] or rest[:1]
    more = len(rest) - len(first)
    block = Findings(title="Findings", findings=[_short(finding) for finding in first], more=more)
    return c.section("findings", "Findings", block) if first else []


def _problem(finding: Finding) -> str:
    return finding.message.removesuffix(finding.change).strip()


def _short(finding: Finding) -> Finding:
    """Return the finding with its first sentence and the change."""
    said, dot, _ = finding.message.partition(". ")
    change = "" if finding.change in said else f" {finding.change}"
    return replace(finding, message=f"{said}{dot.strip()}{change}")


def causes_section(analysis: TraceAnalysis, step: str = "traced step") -> list[Section]:
    """Return the parts of the mean step by cause, and the gain of a change where one is known."""
    ledger = analysis.ledger
    if ledger is None:
        return []
    rest = ledger.rest
    columns = [
        c.name("title", "cause"),
        c.ms("ns", "ms"),
        c.frac("frac", "of step"),
        c.ms("gain_ns", "gain ms", of=lambda one: one.remedy and one.remedy.gain_ns),
        c.word("basis", "basis", GAIN_BASES, of=lambda one: one.remedy and one.remedy.basis),
        c.word("confidence", "confidence", CONFIDENCES),
        c.bar("frac"),
    ]
    entries = [
        entry if entry.told else replace(entry, remedy=None)  # a gain is promised where a change is proposed
        for entry in ledger.entries[: len(ledger.entries) - (0 if rest is None else rest.entries)]
    ]
    small: list[Mapping[str, Value]] = []
    if rest is not None:
        small.append({"title": f"{rest.entries} other causes", "ns": rest.ns, "frac": rest.frac})
    table = c.table(
        "causes",
        "Where the step goes",
        columns,
        entries,
        every=ledger.entries,
        known=True,
        note=f"mean {step}; the causes are disjoint and sum to it",
        noun="cause",
        totals=[*small, {"title": step, "ns": ledger.step_ns, "frac": 1.0}],
        whole=True,
    )
    if table.unabridged is not None:  # which lists what the short table sums up
        table = replace(table, unabridged=replace(table.unabridged, totals=table.totals[len(small) :]))
    return c.section("lost", table.title, table)


def _layers(analysis: TraceAnalysis) -> list[Section]:
    columns = [
        *steps_of_a_kind(analysis),
        c.layer(),
        c.text("phase"),
        c.op(),
        c.ms("exposed_ns", "exposed\nms"),
        c.ms("total_ns", "total\nms"),
        c.mean(),
        c.sized("payload_bytes", "payload"),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s"),
        c.dtype(),
    ]
    table = c.table(
        "by_layer",
        "Communication by layer",
        columns,
        analysis.by_layer_and_kind or analysis.by_layer_folded,
        note=f"mean per rank and {step_meant(analysis)}; exposed includes waiting for other ranks",
        limit=_LAYERS,
        least=_LAYERS,
        remarks=counted(analysis),
    )
    return c.section("communication", table.title, table)


def _peak(analysis: MemoryAnalysis) -> list[Section]:
    """Return the fullest rank's peak by kind, each with the layer, or the line, that holds most of it."""
    if not analysis.ranks:
        return []
    rank = analysis.ranks[0]
    peak = rank.peak
    if any(layer.fqns != [None] for layer in peak.layers):
        holder = [
            c.name("layer", "largest holder", of=lambda row: _fullest(peak, row.category)),
            c.size("layer_bytes", "bytes", of=lambda row: _bytes_of_fullest(peak, row.category)),
        ]
    else:
        holder = [
            c.name("line", "most allocated at", of=lambda row: _line(peak, row.category)[0]),
            c.size("line_bytes", "bytes", of=lambda row: _line(peak, row.category)[1]),
        ]
    columns = [c.category(), c.size("bytes"), c.percent("frac"), *(holder if analysis.focus is None else [])]
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


def _line(peak: Peak, category: str) -> tuple[str | None, int | None]:
    """Return the line that holds most of a category, and its bytes; null if none is among the ten."""
    found = ((one.place, one.bytes) for one in peak.by_line if one.category == category)
    return next(found, (None, None))


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
    said = ("complete", "missing", "crashed")  # the warnings have the exceptions
    lines = [_ended(rank) for rank in analysis.run.ranks if rank.state not in said]
    lines += [] if analysis.trace is None else [*_late(analysis.trace), *_slowest(analysis.trace)]
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
    """Name the late ranks that the ledger reports."""
    entries = () if trace.ledger is None else trace.ledger.entries
    return [
        f"rank {one.rank} is late: {show_ns(one.ns)} of a mean step of all ranks"
        for one in entries
        if one.told and one.rank is not None and one.cause in ("late_rank", "data_loader")
    ]


def _slowest(trace: TraceAnalysis) -> list[str]:
    mean, rank = trace.totals.step_ns or 0.0, trace.totals.slowest_rank
    slow = [one for one in trace.by_rank if one.rank == rank and one.step_ns > _ALIKE * mean]
    return [
        f"a traced step of rank {rank} takes {show_ns(one.step_ns)}, the mean {show_ns(mean)}" for one in slow
    ]


def _ended(rank: RunRank) -> str:
    error = f": {quoted_error(rank.error)}" if rank.error else ""
    return f"rank {rank.rank} is {rank.state}{error}"


_WORTH_MOST = 3


def findings_section(
    findings: Sequence[Finding], notes: Sequence[str] = (), verdict: Sequence[str] = ()
) -> list[Section]:
    """Lay out the findings, and the notes that the verdict does not hold already."""
    notes = [line for line in notes if line not in verdict]
    blocks: list[Block] = [Findings(title="Findings", findings=findings)] if findings else []
    blocks += [Sentences(title="Notes", lines=notes, style="list")] if notes else []
    return [Section(anchor="findings", title=blocks[0].title, blocks=blocks)] if blocks else []


def changes_worth_most(analysis: TraceAnalysis) -> list[str]:
    """Report the three proposed changes that gain most, with gain and cost; none if the verdict names it all.

    The gain of a change that is a cause's remedy is the remedy's.
    """
    entries = [] if analysis.ledger is None else analysis.ledger.entries
    remedies = {one.remedy.what_if: one.remedy for one in entries if one.told and one.remedy is not None}
    proposed = []
    for row in (row for row in analysis.what_if if row.told):
        remedy = remedies.get(row.change)
        as_charged = remedy and replace(row, gained_ns=remedy.gain_ns, gained_frac=remedy.gain_frac)
        proposed.append(as_charged or row)
    proposed.sort(key=lambda row: row.gained_ns or 0.0, reverse=True)
    if [row.change for row in proposed] == list(remedies)[:1]:  # the verdict names the first remedy
        return []
    return [
        f"{row.sentence(f'{row.what[:1].upper()}{row.what[1:]} (`{row.change}`)')}."
        for row in proposed[:_WORTH_MOST]
    ]
