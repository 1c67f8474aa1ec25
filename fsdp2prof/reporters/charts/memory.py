"""Charts of a rank's memory: its course over time, and the peak by layer."""

from __future__ import annotations

from typing import Any

from fsdp2prof.reporters.charts.figure import Figure, bar, figure, label, labels
from fsdp2prof.reporters.formats import byte_unit
from fsdp2prof.reporters.memory_grids import layer_cells
from fsdp2prof.results import RankMemory
from fsdp2prof.vocabulary import CATEGORIES, PHASES, layer_name

__all__ = ["course_chart", "memory_layer_chart"]

_SPAN_WORTH_A_NAME = 0.08
"""Share of the time axis that a phase needs for its name to fit."""

_LAYER_LIMIT = 30
"""Layers of the memory chart; the rest is one bar."""


def course_chart(rank: RankMemory) -> Figure | None:
    """Stack allocated bytes by category over time; None where the course is unknown."""
    times = rank.timeline.get("time_ns", [])
    names = [name for name in CATEGORIES if any(rank.timeline.get(name, ()))]
    if len(times) < 2 or not names:
        return None
    largest = max(sum(values) for values in zip(*(rank.timeline[name] for name in names), strict=True))
    unit, scale = byte_unit(largest)
    timed = min(times) >= 0
    position = [(time - times[0]) / 1e6 for time in times] if timed else list(range(len(times)))
    data = []
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
                "hovertemplate": f"%{{y:.3f}} {unit}",
            }
        )
    reserved = rank.timeline.get("reserved")
    if reserved:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "reserved",
                "x": position,
                "y": [size / scale for size in reserved],
                "line": {"width": 1.5, "dash": "dot", "color": "#333333", "shape": "hv"},
                "hovertemplate": f"%{{y:.3f}} {unit}",
            }
        )
    axis = "ms since the recording began" if timed else "events (no times recorded)"
    chart = figure(data, height=420, x=axis, y=unit)
    chart["layout"]["hovermode"] = "x unified"
    if timed:
        _mark_phases(chart, rank, times[0], times[-1])
    return chart


def _mark_phases(chart: Figure, rank: RankMemory, begin: int, end: int) -> None:
    """Draw a strip of phases above the plot, and a line at the peak."""
    shapes: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    strip = {"type": "rect", "yref": "paper", "y0": 1.01, "y1": 1.06, "line": {"width": 0}}
    for span in rank.phase_spans:
        low, high = max(span.start_ns, begin), min(span.end_ns, end)
        if high <= low or span.phase not in PHASES or span.phase == "other":
            continue
        x0, x1 = (low - begin) / 1e6, (high - begin) / 1e6
        shapes.append({**strip, "x0": x0, "x1": x1, "fillcolor": PHASES[span.phase].colour})
        if high - low > _SPAN_WORTH_A_NAME * (end - begin):
            texts.append(_text_above(label(span.phase), (x0 + x1) / 2, 1.035))
    if rank.peak.time_ns is not None and begin <= rank.peak.time_ns <= end:
        x = (rank.peak.time_ns - begin) / 1e6
        line = {"width": 1, "dash": "dot", "color": "#1f2933"}
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


def memory_layer_chart(rank: RankMemory) -> Figure | None:
    """Stack what is alive at the peak by layer, largest layer on top; None where no layer is known."""
    cells = layer_cells(rank)
    if not cells:
        return None
    layers = list(cells)
    shown, rest = layers[:_LAYER_LIMIT], layers[_LAYER_LIMIT:]
    names = labels([layer_name(fqn) for fqn in shown])
    names += [f"{len(rest)} more"] if rest else []
    unit, scale = byte_unit(max(sum(row.values()) for row in cells.values()))
    data = []
    for name, word in CATEGORIES.items():
        values = [cells[fqn].get(name, 0) / scale for fqn in shown]
        values += [sum(cells[fqn].get(name, 0) for fqn in rest) / scale] if rest else []
        if any(values):
            data.append(bar(word.label, word.colour, values, names, f"%{{x:.3f}} {unit}"))
    return figure(data, height=110 + 24 * len(names), barmode="stack", x=unit, reverse=True)
