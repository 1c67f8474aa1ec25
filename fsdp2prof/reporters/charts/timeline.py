"""Pictures of a step's timeline: an overview, and the spans that a page draws by level of zoom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fsdp2prof.reporters.charts.figure import INK, PAPER, STALL, Figure, figure
from fsdp2prof.results.step import RankTimeline, StepTimeline, TimelineLane, TimelineStall
from fsdp2prof.vocabulary import LANES, LATE_CAUSES, PHASES, printable

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
