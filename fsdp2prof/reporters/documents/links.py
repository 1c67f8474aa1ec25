"""Links from a sentence to its place: a window of the timeline and a row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp2prof.reporters.document import Link, Section, Table, Value
from fsdp2prof.results.finding import Finding, Place
from fsdp2prof.results.ledger import NOTHING, LedgerEntry
from fsdp2prof.results.step import RankTimeline, StepTimeline
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import OPS, in_family, layer_name

if TYPE_CHECKING:
    from fsdp2prof.results.memory import MemoryAnalysis

Links = dict[str, list[Link]]
Wanted = Mapping[str, Value]
"""Key of a column -> the value that a row has there."""

_OF_TRACE = ("what_if", "communication", "ranks", "waits", "step")
_IDLE = frozenset(
    {"host", "host_pause", "data_loader", "sync", "queued", "starved", "tracing", "compilation"}
)
"""Causes of the ledger whose time is a gap of the device."""
_OF_MEMORY = ("memory", "memory_by_layer", "out_of_memory")


def section_links(sections: Sequence[Section], verdict: Sequence[str], anchors: Sequence[str]) -> Links:
    """Return the section of each sentence, in their order, if it exists."""
    find = Finder(sections)
    return {line: find.section(anchor) for line, anchor in zip(verdict, anchors, strict=False)}


def trace_links(
    analysis: TraceAnalysis,
    sections: Sequence[Section],
    verdict: Sequence[str],
    changes: Sequence[str],
    findings: Sequence[Finding],
) -> Links:
    """Return the places of the verdict's sentences, of the changes worth most and of the findings."""
    entries = [] if analysis.ledger is None else analysis.ledger.entries
    find = Finder(sections, analysis.timeline, entries)
    links = {
        one.message: find.of_finding(one) if one in analysis.findings else find.of_setup(one)
        for one in findings
    }
    gains = {change: find.row(_OF_TRACE, {"change": change}) for change in _named(analysis)}
    for line in changes:
        links[line] = next((rows for change, rows in gains.items() if f"`{change}`" in line), [])
    for line in verdict:
        entry = next((one for one in entries if _is_about(line, one)), None)
        tried = [rows for change, rows in gains.items() if f" {change} " in line and rows]
        if line in links:
            continue
        if line.startswith(NOTHING):
            links[line] = find.section("what_if")
        else:
            links[line] = tried[0] if tried else find.of_entry(entry) if entry else find.causes_in(line)
    return links


def memory_links(analysis: MemoryAnalysis, sections: Sequence[Section]) -> Links:
    """Return the places of the sentences and findings of a memory analysis."""
    find = Finder(sections)
    links = {
        one.message: find.row(
            _OF_MEMORY, {"fqn": one.fqn, "layer": one.fqn}, {"rank": _number(one.evidence.get("rank"))}
        )
        or find.section("memory")
        for one in analysis.findings
    }
    if not analysis.ranks:
        return links
    peak, figures = analysis.ranks[0].peak, analysis.key_figures
    rank = None if figures is None else figures.rank
    largest = peak.by_category[0].category if peak.by_category else None
    places = (
        find.row(("out_of_memory", "memory"), {"rank": rank}),
        find.row(("memory_by_layer", "memory"), {"layer": peak.fqn}, {"category": largest}),
        find.row(("out_of_memory", "memory"), {"action": _first_action(analysis)}),
    )
    for line, place in zip(analysis.verdict, places, strict=False):
        links[line] = place or find.section("out_of_memory") or find.section("memory")
    return links


def _first_action(analysis: MemoryAnalysis) -> str | None:
    rank = analysis.ranks[0]
    remedies = rank.remedies if rank.oom is None else rank.oom.remedies
    return remedies[0].action if remedies else None


def _named(analysis: TraceAnalysis) -> list[str]:
    return [row.change for row in analysis.what_if if row.step_ns is not None]


def _is_about(line: str, entry: LedgerEntry) -> bool:
    """Whether a sentence quotes the entry's text or its remedy."""
    return (entry.said != "" and entry.said in line) or (
        entry.remedy is not None and entry.remedy.change[1:] in line
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


class Finder:
    """Finds rows in the sections of one document, and windows in its timeline."""

    def __init__(
        self,
        sections: Sequence[Section],
        timeline: StepTimeline | None = None,
        entries: Sequence[LedgerEntry] = (),
    ) -> None:
        self.entries = {one.id: one for one in entries}
        """Losses by their id."""
        self.sections = {section.anchor: section for section in sections}
        self.timeline = timeline if "timeline" in self.sections else None

    def of_entry(self, entry: LedgerEntry) -> list[Link]:
        """Return the places of a ledger entry; the rank that caused it has its own row."""
        return self.of(entry.place or Place(fqn=entry.fqn), entry.rank, entry)

    def of_finding(self, finding: Finding) -> list[Link]:
        """Return the places of a finding."""
        place = finding.place or Place(fqn=finding.fqn)
        return self.of(place, _number(finding.evidence.get("rank")), self.entries.get(finding.id))

    def of_setup(self, finding: Finding) -> list[Link]:
        """Return the place of a finding about how the run was set up."""
        fqn = {"fqn": finding.fqn}
        return self.row(("run", "communication"), fqn) or self.section("layout") or self.section("run")

    def of(self, place: Place, cause: int | None, entry: LedgerEntry | None) -> list[Link]:
        """Return the timeline's window and the row of a place, otherwise the row of its cause; empty
        without one."""
        where: dict[str, Value] = {"fqn": place.fqn, "phase": place.phase}
        rows = (
            (cause is not None and self.row(("ranks",), {"rank": cause}))
            or (place.op in OPS and self.row(("communication",), where | {"op": place.op}))
            or (place.fqn is not None and self.row(("waits", "communication"), where, {"fqn": place.fqn}))
            or (entry is not None and self.row(("lost",), {"title": entry.title}))
            or self.row(("run",), {"fqn": place.fqn})
        )
        return [*self.window(place, entry is not None and entry.cause in _IDLE), *(rows or ())]

    def causes_in(self, line: str) -> list[Link]:
        """Return the row of the first cause that a sentence names."""
        named = [(line.find(one.title.removeprefix("waiting ")), one) for one in self.entries.values()]
        first = min(((at, one.title) for at, one in named if one.title and at >= 0), default=None)
        return [] if first is None else self.row(("lost",), {"title": first[1]})

    def section(self, anchor: str) -> list[Link]:
        """Return the link to a section; empty if the section does not exist."""
        return [self._to(anchor, anchor)] if anchor in self.sections else []

    def _to(self, anchor: str, target: str) -> Link:
        title = self.sections[anchor].title
        return Link(label=title[:1].lower() + title[1:], target=target)

    def row(self, anchors: Iterable[str], *wanted: Wanted) -> list[Link]:
        """Return the link to the first row of these sections with the values, tried in their order.

        A value of None matches anything.
        """
        for values in wanted:
            known = {key: value for key, value in values.items() if value is not None}
            for anchor in anchors:
                for table in self._tables(anchor):
                    found = _row(table, known) if known else None
                    if found is not None:
                        return [self._to(anchor, f"{anchor}-{table.name}-{found}")]
        return []

    def _tables(self, anchor: str) -> list[Table]:
        section = self.sections.get(anchor)
        return [] if section is None else [one for one in section.blocks if isinstance(one, Table)]

    def window(self, place: Place, idle: bool) -> list[Link]:
        """Return the link to the place's longest interval in the timeline, on its rank if that is drawn.

        For a loss of ``idle`` time that is the longest gap of its phase.
        """
        if self.timeline is None or (place.fqn is None and place.op is None and not idle):
            return []
        ranks = [one for one in self.timeline.ranks if one.rank == place.rank] or self.timeline.ranks
        found = [
            (high - low, rank.rank, low, high)
            for rank in ranks
            for low, high in (_gaps if idle else _stretches)(rank, place, self.timeline)
        ]
        if not found:
            return []
        _, rank, low, high = max(found)
        return [Link(label="timeline", target="timeline", window=(rank, low, high))]


def _row(table: Table, wanted: Wanted) -> str | None:
    """Return the end of a row's anchor: its number, behind ``all-`` in the table behind the fold."""
    whole = table.unabridged or table
    for prefix, one, last in (("", table, table.limit), ("all-", whole, None)):
        at = {column.name: i for i, column in enumerate(one.columns)}
        if "fqn" in wanted and "fqn" not in at and "layer" in at:
            at["fqn"] = at["layer"]
        if not set(wanted) <= set(at):
            continue
        for i, row in enumerate(one.rows[:last]):
            if all(_same(row[at[key]], value) for key, value in wanted.items()):
                return f"{prefix}{i}"
    return None


def _same(cell: Value, wanted: Value) -> bool:
    if cell == wanted or (isinstance(wanted, str) and cell == layer_name(wanted)):
        return True
    return isinstance(cell, str) and isinstance(wanted, str) and in_family(wanted, cell)


def _stretches(rank: RankTimeline, place: Place, timeline: StepTimeline) -> list[tuple[int, int]]:
    """Return the waits for a collective of the place, and its spans: start and end."""
    waits = [
        (min(one.start_ns, one.needed_ns), max(one.end_ns, one.needed_ns + one.stall_ns))
        for one in rank.stalls
        if (one.fqn, one.lane) == (place.fqn, place.op) and place.phase in (None, one.phase)
    ]
    lanes = [one for one in rank.lanes if one.lane == place.op] or [
        one for one in rank.lanes if one.lane in ("compute", "fsdp_copy", "host")
    ]
    return waits + [
        (start, start + length)
        for lane in lanes
        for start, length, layer, phase in zip(
            lane.start_ns, lane.duration_ns, lane.layer, lane.phase, strict=True
        )
        if layer >= 0
        and timeline.layers[layer] == place.fqn
        and place.phase in (None, timeline.phases[phase])
    ]


def _gaps(rank: RankTimeline, place: Place, timeline: StepTimeline) -> list[tuple[int, int]]:
    """Return the gaps in which nothing runs on the device, of the phase where its host shows it."""
    busy = sorted(
        (start, start + length)
        for lane in rank.lanes
        if lane.lane != "host"
        for start, length in zip(lane.start_ns, lane.duration_ns, strict=True)
    )
    gaps, end = [], rank.start_ns
    for start, until in [*busy, (rank.start_ns + rank.duration_ns,) * 2]:
        if start > end:
            gaps.append((end, start))
        end = max(end, until)
    in_phase = [
        (start, start + length)
        for lane in rank.lanes
        if lane.lane == "host"
        for start, length, phase in zip(lane.start_ns, lane.duration_ns, lane.phase, strict=True)
        if timeline.phases[phase] == place.phase
    ]
    return [gap for gap in gaps if any(low < gap[1] and gap[0] < high for low, high in in_phase)] or gaps
