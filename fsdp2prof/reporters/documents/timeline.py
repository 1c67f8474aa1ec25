"""Section of a step's timeline: its picture, the longest waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Chart, Section, Spark, Table, later
from fsdp2prof.reporters.formats import show_op
from fsdp2prof.results.ledger import LedgerEntry
from fsdp2prof.results.step import StepTimeline, TimelineStall
from fsdp2prof.units import format_frac, format_ns, plural
from fsdp2prof.vocabulary import LATE_CAUSES, PHASES, layer_name

Side: TypeAlias = "tuple[str, StepTimeline]"
"""A name (empty for the only one) and its timeline."""

_STALL_ROWS = 5
_SEEN_AS_WAITS = frozenset({"communication", "other_communication", "late_rank", "uneven_ranks"})
"""Causes of the ledger that a timeline shows as waits for collectives."""


def timeline_section(
    timeline: StepTimeline | None, first: Sequence[int] = (), loss: LedgerEntry | None = None
) -> list[Section]:
    """Show one step of one run; empty without a step. A page opens with the ranks of ``first``.

    The picture's title is the ``loss`` that the verdict begins with, or the longest wait if that loss is
    waiting for collectives.
    """
    return [] if timeline is None else [_section([("", timeline)], first, loss)]


def timelines_section(sides: Mapping[str, StepTimeline | None]) -> list[Section]:
    """Lay out a step of each side, by name, above the other, on one scale."""
    known = [(name, side) for name, side in sides.items() if side is not None]
    return [_section(known)] if known else []


def _section(sides: Sequence[Side], first: Sequence[int] = (), loss: LedgerEntry | None = None) -> Section:
    title = "Timeline of one step" if len(sides) == 1 else "Timelines of one step each"
    worst, facts = _worst(sides), [_what(*side) for side in sides]
    if loss is not None and loss.title and loss.cause not in _SEEN_AS_WAITS:
        facts += [f"{worst[0].lower()}{worst[1:]}"] if worst else []
        worst = f"{loss.title[0].upper()}{loss.title[1:]}: {format_ns(loss.ns)} ({format_frac(loss.frac)})"
    chart = Chart(
        name="timeline",
        title=worst or title,
        note="; ".join(facts),
        figure=later("charts.timeline.timeline_figure", sides),
        detail=later("charts.timeline.timeline_detail", sides, first),
        spark=_spark(*sides[0]) if len(sides) == 1 else None,
    )
    lead = (
        "Hatched: the compute stream is idle; an arrow comes from the collective that it waits for. "
        "Pale: a collective waits for its last rank. Drag to move; Ctrl and the wheel zoom."
    )
    return Section(anchor="timeline", title=title, lead=lead, blocks=[chart, *_stall_table(sides)])


def _worst(sides: Sequence[Side]) -> str:
    """Say the longest wait; nothing without one."""
    waits = [
        (stall.stall_ns, name, rank.rank, stall)
        for name, timeline in sides
        for rank in timeline.ranks
        for stall in rank.stalls
    ]
    if not waits:
        return ""
    longest, name, rank, stall = max(waits, key=lambda wait: wait[0])
    where = f"on rank {rank} {name}".strip()
    what = f"{layer_name(stall.fqn)} {show_op(stall.lane)} in {stall.phase}"
    return f"The longest wait is for {what} {where}: {format_ns(longest)}"


def _what(name: str, timeline: StepTimeline) -> str:
    ranks = plural(len(timeline.ranks), "rank")
    if timeline.ranks_left_out:
        ranks += f" of {len(timeline.ranks) + timeline.ranks_left_out}"
    facts = [f"{format_ns(timeline.duration_ns)} of step {timeline.step} on {ranks}"]
    if not timeline.aligned:
        facts.append("clocks not aligned: each rank starts at its own zero")
    if timeline.resolution_ns:
        facts.append(f"gaps under {format_ns(timeline.resolution_ns)} are not drawn")
    return f"{name} {', '.join(facts)}".strip()


def _spark(name: str, timeline: StepTimeline) -> Spark | None:
    """Draw how much of the step the ranks compute, in one line."""
    if not timeline.compute_frac:
        return None
    letters = [PHASES[phase if phase in PHASES else "other"].header for phase in timeline.slice_phases]
    seen = [word for word in PHASES.values() if word.header in letters]
    return Spark(
        values=timeline.compute_frac,
        title=f"Share of ranks that compute in step {timeline.step}",
        full="every rank",
        marks="".join(letters),
        legend=", ".join(f"{word.header} {word.label}" for word in seen),
    )


def _stall_table(sides: Sequence[Side]) -> list[Table]:
    rows = [
        (name, rank.rank, stall)
        for name, timeline in sides
        for rank in timeline.ranks
        for stall in rank.stalls
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: -row[2].stall_ns)
    longest: dict[tuple[str, str | None, str, str], tuple[str, int, TimelineStall]] = {}
    for row in rows:
        longest.setdefault((row[0], row[2].fqn, row[2].phase, row[2].lane), row)
    several = len(sides) > 1
    columns = [
        *([c.text("side", of=0)] if several else []),
        c.layer(of="2.fqn"),
        c.ms("stall_ns", "waited", of="2.stall_ns"),
        c.text("phase", of="2.phase"),
        c.op("op", of="2.lane"),
        c.number("rank", of=1),
        c.word("cause", "mainly because", LATE_CAUSES, of="2.cause"),
        c.ms("needed_ns", "needed\nat", of="2.needed_ns"),
        c.ms("end_ns", "ended\nat", of="2.end_ns"),
    ]
    left_out = sum(timeline.stalls_left_out for _, timeline in sides)
    return [
        c.table(
            "stalls",
            "The longest waits of these steps" if several else "The longest waits of this step",
            columns,
            longest.values(),
            every=rows,
            note="ms, on the rank that waits longest",
            limit=_STALL_ROWS,
            noun="wait",
            remarks=[f"{left_out:,} shorter waits are left out."] if left_out else [],
        )
    ]
