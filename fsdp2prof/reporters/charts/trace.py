"""Charts of a trace: where each step goes, and each layer's communication."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsdp2prof.analyzers.layers import natural_key
from fsdp2prof.reporters.charts.figure import Figure, bar, figure, label, labels
from fsdp2prof.reporters.layers import layer_rows
from fsdp2prof.reporters.trace_grids import PARTS, step_rows
from fsdp2prof.results import TraceAnalysis
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, layer_name, op_label

__all__ = ["layer_chart", "step_chart"]

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
    names = [f"rank {row.rank}, " + (f"step {row.step}" if row.step.isdigit() else row.step) for row in rows]
    data = []
    for i, part in enumerate(PARTS):
        values = [row.parts_ns[i] / 1e6 for row in rows]
        if any(values):
            word = BREAKDOWN_PARTS[part]
            data.append(bar(word.label, word.colour, values, names, "%{x:.3f} ms"))
    return figure(data, height=90 + 26 * len(rows), barmode="stack", x="ms", reverse=True)


def layer_chart(analysis: TraceAnalysis) -> Figure | None:
    """Show each layer's exposed communication in model order, beside all of it; None without collectives."""
    rows = layer_rows(analysis)
    if not rows:
        return None
    layers = sorted({layer_name(row.fqn) for row in rows}, key=natural_key)
    names = labels(layers)
    exposed: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        exposed[row.op, row.phase][layer_name(row.fqn)] += row.exposed_ns / 1e6
        total[layer_name(row.fqn)] += row.total_ns / 1e6
    spare = iter(_OTHER_COLOURS * (1 + len(exposed) // len(_OTHER_COLOURS)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": f"exposed {op_label(kind[0])}, {label(kind[1])}",
            "x": names,
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
            "x": names,
            "y": [total[layer] for layer in layers],
            "marker": {"color": "#333333", "symbol": "line-ew-open", "size": 12},
            "hovertemplate": "%{y:.3f} ms",
        }
    )
    chart = figure(data, height=380, barmode="stack", y="ms per rank and step")
    chart["layout"]["hovermode"] = "x unified"
    return chart
