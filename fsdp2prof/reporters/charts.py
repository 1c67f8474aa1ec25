"""The report's charts: plotly figures as plain JSON (``data``, ``layout``), drawn by plotly.js in the page.

Names come from untrusted files and plotly reads a small HTML in text: :func:`_label` escapes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any, TypeAlias

from fsdp2prof.analyzers.layers import natural_key
from fsdp2prof.reporters.grid import byte_unit
from fsdp2prof.reporters.layers import layer_rows
from fsdp2prof.reporters.memory_grids import layer_cells
from fsdp2prof.reporters.trace_grids import PARTS, step_rows
from fsdp2prof.results import RankMemory, TraceAnalysis
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, CATEGORIES, PHASES, layer_name, op_label, printable

__all__ = ["Figure", "course_chart", "layer_chart", "memory_layer_chart", "step_chart"]

Figure: TypeAlias = dict[str, Any]
"""``{"data": [...], "layout": {...}}``, as plotly.js takes it."""

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LABEL_LENGTH = 24
"""Characters of a layer's name beside an axis: more leave no room for the chart on a phone."""

_SPAN_WORTH_A_NAME = 0.08
"""Share of the time axis that a phase needs for its name to fit."""

_LAYER_LIMIT = 30
"""Layers of the memory chart; the rest is one bar."""

_OP_COLOURS = {
    ("all_gather", "forward"): "#e45756",
    ("all_gather", "backward"): "#b5332f",
    ("reduce_scatter", "backward"): "#f58518",
    ("all_reduce", "backward"): "#eeca3b",
}
_OTHER_COLOURS = ("#b279a2", "#9d755d", "#ff9da6", "#54a24b", "#72b7b2", "#4c78a8")


def step_chart(analysis: TraceAnalysis) -> Figure | None:
    """Stack the parts of each step window, one bar a window or rank; None without steps."""
    rows = step_rows(analysis)
    if not rows:
        return None
    labels = [f"rank {row.rank}, " + (f"step {row.step}" if row.step.isdigit() else row.step) for row in rows]
    data = []
    for i, part in enumerate(PARTS):
        values = [row.parts_ns[i] / 1e6 for row in rows]
        if any(values):
            word = BREAKDOWN_PARTS[part]
            data.append(_bar(word.label, word.colour, values, labels, "%{x:.3f} ms"))
    return _figure(data, height=90 + 26 * len(rows), barmode="stack", x="ms", reverse=True)


def layer_chart(analysis: TraceAnalysis) -> Figure | None:
    """Show each layer's exposed communication in model order, beside all of it; None without collectives."""
    rows = layer_rows(analysis)
    if not rows:
        return None
    layers = sorted({layer_name(row.fqn) for row in rows}, key=natural_key)
    labels = _labels(layers)
    exposed: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        exposed[row.op, row.phase][layer_name(row.fqn)] += row.exposed_ns / 1e6
        total[layer_name(row.fqn)] += row.total_ns / 1e6
    spare = iter(_OTHER_COLOURS * (1 + len(exposed) // len(_OTHER_COLOURS)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": f"exposed {op_label(kind[0])}, {_label(kind[1])}",
            "x": labels,
            "y": [exposed[kind][layer] for layer in layers],
            "marker": {"color": _OP_COLOURS.get(kind) or next(spare)},
            "hovertemplate": "%{y:.3f} ms",
        }
        for kind in sorted(exposed, key=lambda kind: (kind not in _OP_COLOURS, kind[1] != "forward", kind))
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "all of its communication",
            "x": labels,
            "y": [total[layer] for layer in layers],
            "marker": {"color": "#333333", "symbol": "line-ew-open", "size": 12},
            "hovertemplate": "%{y:.3f} ms",
        }
    )
    figure = _figure(data, height=380, barmode="stack", y="ms per rank and step")
    figure["layout"]["hovermode"] = "x unified"
    return figure


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
        label, colour = CATEGORIES[name].label, CATEGORIES[name].colour
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "x": position,
                "y": [size / scale for size in rank.timeline[name]],
                "stackgroup": "bytes",
                "line": {"width": 0, "shape": "hv"},
                "fillcolor": colour,
                "marker": {"color": colour},
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
    figure = _figure(data, height=420, x=axis, y=unit)
    figure["layout"]["hovermode"] = "x unified"
    if timed:
        _mark_phases(figure, rank, times[0], times[-1])
    return figure


def _mark_phases(figure: Figure, rank: RankMemory, begin: int, end: int) -> None:
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
            texts.append(_text_above(_label(span.phase), (x0 + x1) / 2, 1.035))
    if rank.peak.time_ns is not None and begin <= rank.peak.time_ns <= end:
        x = (rank.peak.time_ns - begin) / 1e6
        line = {"width": 1, "dash": "dot", "color": "#1f2933"}
        shapes.append({"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line})
        texts.append({**_text_above("peak", x, 0.97), "xanchor": "left", "xshift": 4})
    figure["layout"] |= {"shapes": shapes, "annotations": texts}
    figure["layout"]["margin"]["t"] = 48


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
    labels = _labels([layer_name(fqn) for fqn in shown])
    labels += [f"{len(rest)} more"] if rest else []
    unit, scale = byte_unit(max(sum(row.values()) for row in cells.values()))
    data = []
    for name, word in CATEGORIES.items():
        values = [cells[fqn].get(name, 0) / scale for fqn in shown]
        values += [sum(cells[fqn].get(name, 0) for fqn in rest) / scale] if rest else []
        if any(values):
            data.append(_bar(word.label, word.colour, values, labels, f"%{{x:.3f}} {unit}"))
    return _figure(data, height=110 + 24 * len(labels), barmode="stack", x=unit, reverse=True)


def _bar(
    name: str, colour: str, values: Sequence[float], labels: Sequence[str], hover: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": list(values),
        "y": list(labels),
        "marker": {"color": colour},
        "hovertemplate": hover,
    }


def _figure(
    data: list[dict[str, Any]],
    *,
    height: int,
    x: str | None = None,
    y: str | None = None,
    barmode: str | None = None,
    reverse: bool = False,
) -> Figure:
    layout: dict[str, Any] = {
        "height": height + 60,
        "font": {"family": _FONT, "size": 13, "color": "#1f2933"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 28, "b": 8},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "modebar": {"bgcolor": "rgba(255,255,255,0.8)", "color": "#9aa5b1", "activecolor": "#1f2933"},
        "xaxis": _axis(x),
        "yaxis": _axis(y),
    }
    if barmode:
        layout["barmode"] = barmode
        layout["bargap"] = 0.25
    if reverse:
        layout["yaxis"].update({"autorange": "reversed", "showgrid": False, "type": "category"})
    return {"data": data, "layout": layout}


def _axis(title: str | None) -> dict[str, Any]:
    axis: dict[str, Any] = {"gridcolor": "#e4e7eb", "zerolinecolor": "#9aa5b1", "automargin": True}
    if title:
        axis["title"] = {"text": title, "standoff": 8}
    return axis


def _labels(names: Sequence[str]) -> list[str]:
    """Shorten and escape names; names that would fall together after that get a number."""
    labels: list[str] = []
    seen: dict[str, int] = defaultdict(int)
    for name in names:
        label = _label(name)
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def _label(text: str) -> str:
    text = printable(text)
    if len(text) > _LABEL_LENGTH:
        text = f"{text[: _LABEL_LENGTH // 2]}…{text[-_LABEL_LENGTH // 2 :]}"
    return escape(text, quote=False)
