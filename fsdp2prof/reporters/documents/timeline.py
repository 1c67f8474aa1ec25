"""Timeline of a step: an overview, the spans that a page draws by level of zoom, the longest waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import INK, PAPER, STALL, Figure, figure
from fsdp2prof.reporters.document import Chart, Section, Spark, Table
from fsdp2prof.reporters.formats import show_op
from fsdp2prof.results.timeline import RankTimeline, StepTimeline, TimelineLane, TimelineStall
from fsdp2prof.units import format_ns, plural
from fsdp2prof.vocabulary import LANES, LATE_CAUSES, PHASES, layer_name, printable

Side: TypeAlias = "tuple[str, StepTimeline]"
"""A name (empty for the only one) and its timeline."""

_MS = 1e6
_COLUMNS = 320
_OVERVIEW_RANKS = 4
_ROW_HEIGHT = 16
_WAITING = "waits for the last rank"
_OTHER_LAYER = "every other layer"
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "other_comm")


def _mixed(colour: str, white: float) -> str:
    """Return a colour with some white in it; on a dark page it is as light."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (round(channel + (255 - channel) * white) for channel in channels)
    return f"#{red:02x}{green:02x}{blue:02x}"


_CODES = {
    **{(lane, ""): word.colour for lane, word in LANES.items() if lane != "host"},
    **{(lane, _OTHER_LAYER): _mixed(word.colour, 0.18) for lane, word in LANES.items() if lane != "host"},
    **{("host", phase): word.colour for phase, word in PHASES.items()},
    **{(lane, _WAITING): _mixed(LANES[lane].colour, 0.6) for lane in _COLLECTIVES},
}
"""What a pixel of the picture shows -> its colour; a host's by its phase. Every other layer is a little
lighter, so that neighbours stay apart; waiting for a peer is pale."""

_CODE = {key: code for code, key in enumerate(_CODES)}


def timeline_figure(sides: Sequence[Side]) -> Figure:
    """Draw the lanes of a few ranks, one above the other: each pixel shows the activity with the longest
    time in it."""
    rows, texts = [], []
    for name, timeline in sides:
        for rank in timeline.ranks[:_OVERVIEW_RANKS]:
            for lane in rank.lanes:
                rows.append(_pixels(lane, timeline, max(one.duration_ns for _, one in sides)))
                texts.append(_row_name(name, rank, lane))
    width = max(timeline.duration_ns for _, timeline in sides) / _COLUMNS / _MS
    chart = figure(
        [
            {
                "type": "heatmap",
                "z": rows,
                "x0": width / 2,
                "dx": width,
                "y": list(range(len(rows))),
                "zmin": -0.5,
                "zmax": len(_CODES) - 0.5,
                "colorscale": _colour_scale(),
                "showscale": False,
                "ygap": 2,
                "hovertemplate": "%{x:.3f} ms<extra></extra>",
            }
        ],
        height=90 + _ROW_HEIGHT * len(rows),
        x="ms",
        reverse=True,
    )
    chart["layout"]["yaxis"] |= {
        "type": "linear",
        "tickvals": list(range(len(rows))),
        "ticktext": texts,
        "fixedrange": True,
        "zeroline": False,
    }
    chart["layout"]["xaxis"] |= {"showgrid": False, "zeroline": False}
    return chart


def _pixels(lane: TimelineLane, timeline: StepTimeline, duration_ns: int) -> list[int | None]:
    """Return the code of each column of the overview: the activity that covers most of it; None if it is
    empty."""
    found: list[int | None] = [None] * _COLUMNS
    covered = [0.0] * _COLUMNS
    width = max(1, duration_ns) / _COLUMNS
    for start, length, phase in zip(lane.start_ns, lane.duration_ns, lane.phase, strict=True):
        key = ("host", timeline.phases[phase]) if lane.lane == "host" else (lane.lane, "")
        code = _CODE.get(key, _CODE["host", "other"])
        first, last = max(0, int(start / width)), min(_COLUMNS - 1, int((start + length) / width))
        for column in range(first, last + 1):
            part = min(start + length, (column + 1) * width) - max(start, column * width)
            if part > covered[column]:
                covered[column], found[column] = part, code
    return found


def _row_name(side: str, rank: RankTimeline, lane: TimelineLane) -> str:
    if lane is not rank.lanes[0]:
        return LANES[lane.lane].label
    return f"{side} rank {rank.rank} · {LANES[lane.lane].label}".strip()


def _colour_scale() -> list[list[Any]]:
    """Return steps: code *i* is colour *i*."""
    colours, count = list(_CODES.values()), len(_CODES)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / count, (i + 1) / count)]


def timeline_detail(sides: Sequence[Side], first: Sequence[int] = ()) -> Mapping[str, Any]:
    """Return every span, stall and name, as compact as JSON allows; times in nanoseconds.

    ``first`` are ranks that a page shows before those that wait longest.

    A lane is ``[lane, start, duration, busy, count, layer, phase, name, payload, wait]``, each after the
    first a list with an entry a span: ``start`` counts from the end of the span before, ``busy`` is what the
    duration has too much, ``wait`` is -1 where unknown. A list in which every entry is the first one holds
    it alone.
    """
    return {
        "lanes": [
            {
                "key": key,
                "label": word.label,
                "colour": word.colour,
                "codes": [_CODE.get((key, shade), -1) for shade in ("", _OTHER_LAYER)],
            }
            for key, word in LANES.items()
        ],
        "host_codes": {phase: _CODE["host", phase] for phase in PHASES},
        "waiting_codes": {key: _CODE[key, _WAITING] for key in _COLLECTIVES},
        "causes": {cause: word.label for cause, word in LATE_CAUSES.items()},
        "ink": INK,
        "paper": PAPER,
        "stall": STALL,
        "first": list(first),
        "sides": [_side(name, timeline) for name, timeline in sides],
    }


def _side(name: str, timeline: StepTimeline) -> dict[str, Any]:
    return {
        "name": printable(name),
        "step": timeline.step,
        "duration": timeline.duration_ns,
        "layers": [None if fqn is None else printable(fqn) for fqn in timeline.layers],
        "phases": [printable(phase) for phase in timeline.phases],
        "names": [printable(text) for text in timeline.names],
        "ranks": [
            {
                "rank": rank.rank,
                "start": rank.start_ns,
                "duration": rank.duration_ns,
                "lanes": [_packed(lane) for lane in rank.lanes],
                "stalls": [_stall(stall, timeline) for stall in rank.stalls],
            }
            for rank in timeline.ranks
        ],
    }


def _packed(lane: TimelineLane) -> list[Any]:
    ends = [0, *(start + length for start, length in zip(lane.start_ns, lane.duration_ns, strict=True))]
    columns: list[Sequence[int]] = [
        [start - end for start, end in zip(lane.start_ns, ends, strict=False)],
        lane.duration_ns,
        [length - busy for length, busy in zip(lane.duration_ns, lane.busy_ns, strict=True)],
        lane.count,
        lane.layer,
        lane.phase,
        lane.name,
        [-1 if value is None else value for value in lane.payload_bytes],
        [-1 if value is None else value for value in lane.peer_wait_ns],
    ]
    return [lane.lane, *(list(column[:1]) if len(set(column)) == 1 else list(column) for column in columns)]


def _stall(stall: TimelineStall, timeline: StepTimeline) -> list[Any]:
    layer = timeline.layers.index(stall.fqn) if stall.fqn in timeline.layers else -1
    phase = timeline.phases.index(stall.phase) if stall.phase in timeline.phases else -1
    return [
        stall.lane, layer, phase, stall.start_ns, stall.end_ns, stall.needed_ns, stall.stall_ns, stall.cause,
    ]  # fmt: skip


_STALL_ROWS = 5


def timeline_section(timeline: StepTimeline | None, first: Sequence[int] = ()) -> list[Section]:
    """Show one step of one run; empty without a step. A page opens with the ranks of ``first``."""
    return [] if timeline is None else [_section([("", timeline)], first)]


def timelines_section(sides: Mapping[str, StepTimeline | None]) -> list[Section]:
    """Lay out a step of each side, by name, above the other, on one scale."""
    known = [(name, side) for name, side in sides.items() if side is not None]
    return [_section(known)] if known else []


def _section(sides: Sequence[Side], first: Sequence[int] = ()) -> Section:
    title = "Timeline of one step" if len(sides) == 1 else "Timelines of one step each"
    chart = Chart(
        name="timeline",
        title=_worst(sides) or title,
        note="; ".join(_what(*side) for side in sides),
        figure=timeline_figure(sides),
        detail=timeline_detail(sides, first),
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
