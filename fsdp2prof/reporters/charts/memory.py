"""Charts of a rank's memory: its course over time, and the peak by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2prof.reporters.charts.figure import INK, Figure, bar, figure, label, labels
from fsdp2prof.reporters.formats import byte_unit
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.results.peak import LayerMemory, Peak
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import CATEGORIES, PHASES

_MS = 1e6
_SPAN_WORTH_A_NAME = 0.08
"""Share of the time axis that a phase needs for its name to fit."""

_LIMIT_IN_SIGHT = 4
"""Times the highest total from which the device's limit would flatten the chart: shown on request."""

_LAYER_LIMIT = 30
"""Layers of the memory chart; the rest is one bar."""


def course_totals(rank: RankMemory) -> list[int]:
    """Return the allocated bytes at every point of the timeline."""
    columns = [values for name, values in rank.timeline.items() if name in CATEGORIES]
    return [sum(values) for values in zip(*columns, strict=True)]


def course_marks(rank: RankMemory) -> str:
    """Return the letter of the phase at every point of the timeline; nothing where forward is not known."""
    times = rank.timeline.get("time_ns", [])
    if min(times, default=-1) < 0 or not any(span.phase == "forward" for span in rank.phase_spans):
        return ""
    return "".join(PHASES[_phase_at(rank, time)].header for time in times)


def _phase_at(rank: RankMemory, time_ns: int) -> str:
    at = (span.phase for span in rank.phase_spans if span.start_ns <= time_ns < span.end_ns)
    phase = next(at, "other")
    return phase if phase in PHASES else "other"


def course_chart(rank: RankMemory) -> Figure | None:
    """Stack allocated bytes by category over time, under the device's limit; None where it is unknown."""
    times, totals = rank.timeline.get("time_ns", []), course_totals(rank)
    names = [name for name in CATEGORIES if any(rank.timeline.get(name, ()))]
    if len(times) < 2 or not names:
        return None
    unit, scale = byte_unit(max(totals))
    timed = min(times) >= 0
    position = [(time - times[0]) / _MS for time in times] if timed else list(range(len(times)))
    hover = f"%{{y:.3f}} {unit}"
    data: list[dict[str, Any]] = []
    for name in names:
        word = CATEGORIES[name]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": word.label,
                "x": position,
                "y": [size / scale for size in rank.timeline[name]],
                "stackgroup": "bytes",
                "line": {"width": 0, "shape": "hv"},
                "fillcolor": word.colour,
                "marker": {"color": word.colour},
                "hovertemplate": hover,
            }
        )
    reserved = rank.timeline.get("reserved")
    if reserved:
        sizes = [size / scale for size in reserved]
        data.append(_line("reserved", position, sizes, "dot", INK, hover))
    if rank.device_total_bytes is not None:
        limit = _line(
            f"device: {format_bytes(rank.device_total_bytes)}",
            [position[0], position[-1]],
            [rank.device_total_bytes / scale] * 2,
            "dash",
            "#b5332f",
            hover,
        )
        if rank.device_total_bytes > _LIMIT_IN_SIGHT * max(*totals, *(reserved or ())):
            limit["visible"] = "legendonly"
        data.append(limit)
    axis = "ms since the recording began" if timed else "events (no times recorded)"
    chart = figure(data, height=420, x=axis, y=unit)
    chart["layout"]["hovermode"] = "x unified"
    if timed:
        _mark_phases(chart, rank, times[0], times[-1])
    return chart


def _line(
    name: str, x: Sequence[float], y: Sequence[float], dash: str, colour: str, hover: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"width": 1.5, "dash": dash, "color": colour, "shape": "hv"},
        "hovertemplate": hover,
    }


def _mark_phases(chart: Figure, rank: RankMemory, begin: int, end: int) -> None:
    """Draw a strip of phases above the plot, and a line at the peak."""
    shapes: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    strip = {"type": "rect", "yref": "paper", "y0": 1.01, "y1": 1.06, "line": {"width": 0}}
    for span in rank.phase_spans:
        low, high = max(span.start_ns, begin), min(span.end_ns, end)
        if high <= low or span.phase not in PHASES or span.phase == "other":
            continue
        x0, x1 = (low - begin) / _MS, (high - begin) / _MS
        shapes.append({**strip, "x0": x0, "x1": x1, "fillcolor": PHASES[span.phase].colour})
        if high - low > _SPAN_WORTH_A_NAME * (end - begin):
            texts.append(_text_above(label(span.phase), (x0 + x1) / 2, 1.035))
    if rank.peak.time_ns is not None and begin <= rank.peak.time_ns <= end:
        x = (rank.peak.time_ns - begin) / _MS
        line = {"width": 1, "dash": "dot", "color": INK}
        shapes.append({"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line})
        texts.append({**_text_above("peak", x, 0.97), "xanchor": "left", "xshift": 4})
    chart["layout"] |= {"shapes": shapes, "annotations": texts}
    chart["layout"]["margin"]["t"] = 48


def _text_above(text: str, x: float, y: float) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "y": y,
        "yref": "paper",
        "yanchor": "middle",
        "showarrow": False,
        "font": {"size": 12},
    }


def memory_layer_chart(layers: Sequence[LayerMemory]) -> Figure | None:
    """Stack what each row of layers holds, the largest on top; None where no layer is known."""
    if not layers:
        return None
    shown, rest = layers[:_LAYER_LIMIT], layers[_LAYER_LIMIT:]
    names = labels([row.name for row in shown])
    names += [f"{len(rest)} more"] if rest else []
    unit, scale = byte_unit(layers[0].bytes)
    data = []
    for name, word in CATEGORIES.items():
        values = [row.categories.get(name, 0) / scale for row in shown]
        values += [sum(row.categories.get(name, 0) for row in rest) / scale] if rest else []
        if any(values):
            data.append(bar(word.label, word.colour, values, names, f"%{{x:.3f}} {unit}"))
    chart = figure(data, height=110 + 24 * len(names), barmode="stack", x=unit, reverse=True)
    chart["layout"]["yaxis"]["dtick"] = 1  # or plotly names every other bar
    return chart


def peaks_chart(peaks: Mapping[str, Peak]) -> Figure | None:
    """Stack what fills each of some named peaks; None where all are empty."""
    unit, scale = byte_unit(max(peak.allocated_bytes for peak in peaks.values()))
    data = []
    for name, word in CATEGORIES.items():
        values = [peak.categories.get(name, 0) / scale for peak in peaks.values()]
        if any(values):
            data.append(bar(word.label, word.colour, values, labels(list(peaks)), f"%{{x:.3f}} {unit}"))
    height = 110 + 40 * len(peaks)
    return figure(data, height=height, barmode="stack", x=unit, reverse=True) if data else None
