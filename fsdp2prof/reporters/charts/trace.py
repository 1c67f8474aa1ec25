"""Charts of a trace: parts of each step, communication by layer, arrivals, waits, bandwidth, roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdp2prof.reporters.charts.figure import INK, STALL, Figure, bar, figure, label, labels, logarithmic
from fsdp2prof.results.communication import BandwidthRow, LateRow, LayerRow, LayerTotal
from fsdp2prof.results.trace import BandwidthFit, LayerWait, OperatorRow
from fsdp2prof.units import format_numbers
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, LANES, OPS, dtype_label, layer_name, op_label

if TYPE_CHECKING:
    from fsdp2prof.reporters.documents.trace_tables import StepRow

_MS = 1e6

_OP_COLOURS = {
    ("all_gather", "forward"): "#e45756",
    ("all_gather", "backward"): "#b5332f",
    ("reduce_scatter", "backward"): "#f58518",
    ("all_reduce", "backward"): "#eeca3b",
}
_OTHER_COLOURS = ("#b279a2", "#9d755d", "#ff9da6", "#54a24b", "#72b7b2", "#4c78a8")


def step_chart(rows: Sequence[StepRow]) -> Figure:
    """Stack the parts of each step window, one bar a window or rank."""
    names = [
        f"rank {row.rank}, {row.step if isinstance(row.step, str) else f'step {row.step}'}" for row in rows
    ]
    data = []
    for part, word in BREAKDOWN_PARTS.items():
        values = [row.breakdown_ns[part] / _MS for row in rows]
        if any(values):
            data.append(bar(word.label, word.colour, values, names, "%{x:.3f} ms"))
    return figure(data, height=90 + 26 * len(rows), barmode="stack", x="ms", reverse=True)


def layer_chart(layers: Sequence[LayerTotal], rows: Sequence[LayerRow]) -> Figure:
    """Show each layer's exposed communication in the order given, beside all of it."""
    names = dict(
        zip([layer.fqn for layer in layers], labels([layer_name(layer.fqn) for layer in layers]), strict=True)
    )
    kinds = sorted(
        {(row.op, row.phase) for row in rows},
        key=lambda kind: (kind not in _OP_COLOURS, kind[1] != "forward", kind),
    )
    spare = iter(_OTHER_COLOURS * (1 + len(kinds) // len(_OTHER_COLOURS)))
    data: list[dict[str, Any]] = []
    for op, phase in kinds:
        mine = [row for row in rows if (row.op, row.phase) == (op, phase)]
        data.append(
            {
                "type": "bar",
                "name": f"exposed {op_label(op)}, {label(phase)}",
                "x": [names[row.fqn] for row in mine],
                "y": [row.exposed_ns / _MS for row in mine],
                "marker": {"color": _OP_COLOURS.get((op, phase)) or next(spare)},
                "hovertemplate": "%{y:.3f} ms",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "all of its communication",
            "x": list(names.values()),
            "y": [layer.total_ns / _MS for layer in layers],
            "marker": {"color": INK, "symbol": "line-ew-open", "size": 12},
            "hovertemplate": "%{y:.3f} ms",
        }
    )
    chart = figure(data, height=380, barmode="stack", y="ms per rank and step")
    chart["layout"]["hovermode"] = "x unified"
    chart["layout"]["xaxis"] |= {"categoryorder": "array", "categoryarray": list(names.values())}
    return chart


_TERA = 1e12
_SMALLEST, _LARGEST = 8, 34
"""Diameters of the points, by the time spent."""
_ATTENTION = "#b279a2"
_ROOF_POINTS = 40


def roofline_chart(
    rows: Sequence[OperatorRow], peak_flops_per_s: Mapping[str, float], memory_bytes_per_s: float | None
) -> Figure:
    """Set the rate of each operator against its operations per byte, under the device's roof if it is known.

    Both axes are logarithmic, points the larger the more time goes there; rows without bytes are left out.
    """
    known = [row for row in rows if row.bytes]
    longest = max(row.total_ns for row in known)
    data = [
        _points("products", LANES["compute"].colour, [r for r in known if not _is_attention(r)], longest),
        _points("attention", _ATTENTION, [r for r in known if _is_attention(r)], longest),
    ]
    intensities = [row.flops / (row.bytes or 1) for row in known]
    low, high = min(intensities) / 2, max(intensities) * 2
    for dtype in dict.fromkeys(row.dtype for row in known):
        peak = None if dtype is None else peak_flops_per_s.get(dtype)
        if peak and memory_bytes_per_s:
            ridge = peak / memory_bytes_per_s
            data.append(_roof(dtype_label(dtype), low, max(high, 2 * ridge), peak, memory_bytes_per_s))
    chart = figure(
        [one for one in data if one["x"]], height=360, x="operations per byte moved at least", y="TFLOP/s"
    )
    chart["layout"]["xaxis"] |= logarithmic(x for one in data for x in one["x"])
    chart["layout"]["yaxis"] |= logarithmic(y for one in data for y in one["y"])
    return chart


def _is_attention(row: OperatorRow) -> bool:
    return "attention" in row.name


def _points(name: str, colour: str, rows: Sequence[OperatorRow], longest: float) -> dict[str, Any]:
    sizes = [_SMALLEST + (_LARGEST - _SMALLEST) * (row.total_ns / longest) ** 0.5 for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [row.flops / (row.bytes or 1) for row in rows],
        "y": [row.flops_per_s / _TERA for row in rows],
        "marker": {"color": colour, "size": sizes, "opacity": 0.7},
        "hovertext": [
            f"{label(row.name)}<br>{label(row.shapes)} {dtype_label(row.dtype)}<br>"
            f"{row.total_ns / _MS:.3f} ms per step"
            for row in rows
        ],
        "hovertemplate": "%{hovertext}<br>%{x:.1f} FLOP/byte, %{y:.4g} TFLOP/s<extra></extra>",
    }


def _roof(dtype: str, low: float, high: float, peak: float, memory: float) -> dict[str, Any]:
    """Draw what the memory allows up to the ridge, and the peak beyond it."""
    at = [low * (high / low) ** (i / (_ROOF_POINTS - 1)) for i in range(_ROOF_POINTS)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"roof, {label(dtype)}",
        "x": at,
        "y": [min(peak, memory * x) / _TERA for x in at],
        "line": {"color": INK, "width": 1.5},
        "hovertemplate": "%{x:.1f} FLOP/byte: at most %{y:.4g} TFLOP/s<extra></extra>",
    }


_GB, _MIB = 1e9, 1 << 20
_LATE_ROWS = 40
_POINTS = 60
_RANK_HEIGHT, _MOST_HEIGHT = 18, 1152
"""Of a rank's row in the map, and of all of them: beyond 64 ranks rows become thinner."""


def prefetch_chart(rows: Sequence[LateRow]) -> Figure:
    """Draw each kind of collective from launch to end, against the instant it was needed (0).

    Of many, those that were waited for longest.
    """
    longest = sorted(rows, key=lambda row: -row.stall_ns)[:_LATE_ROWS]
    shown = [row for row in rows if row in longest]
    names = labels([f"{layer_name(row.fqn)} {_short(row.op)} {row.phase}" for row in shown])
    data: list[dict[str, Any]] = []
    for late in (True, False):
        mine = [(row, name) for row, name in zip(shown, names, strict=True) if (row.stall_ns > 0) == late]
        if not mine:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": "came late" if late else "was there in time",
                "base": [-row.issued_before_ns / _MS for row, _ in mine],
                "x": [(row.issued_before_ns - row.finished_before_ns) / _MS for row, _ in mine],
                "y": [name for _, name in mine],
                "marker": {"color": STALL if late else BREAKDOWN_PARTS["compute"].colour},
                "hovertemplate": "from %{base:.3f} ms, for %{x:.3f} ms",
            }
        )
    chart = figure(data, height=80 + 20 * len(shown), x="ms", reverse=True)
    chart["layout"]["yaxis"] |= {"categoryorder": "array", "categoryarray": names}
    chart["layout"]["shapes"] = [
        {
            "type": "line",
            "yref": "paper",
            "x0": 0,
            "x1": 0,
            "y0": 0,
            "y1": 1,
            "line": {"color": INK, "width": 1},
        }
    ]
    return chart


def _short(op: str) -> str:
    return (OPS[op].header if op in OPS else "") or op_label(op)


def wait_chart(rows: Sequence[LayerWait]) -> Figure:
    """Map how long each rank's compute stream waits for each layer."""
    ranks = sorted({row.rank for row in rows})
    layers = list(dict.fromkeys(row.fqn for row in rows))
    waited = {(row.rank, row.fqn): round(row.stall_ns / _MS, 6) for row in rows}
    data = {
        "type": "heatmap",
        "x": labels([layer_name(fqn) for fqn in layers]),
        "y": [f"rank {rank}" for rank in ranks],
        "z": [[waited.get((rank, fqn)) for fqn in layers] for rank in ranks],
        "zmin": 0,
        "colorscale": [[0, "rgba(192,57,43,0.05)"], [1, "rgba(192,57,43,1)"]],
        "colorbar": {"title": {"text": "ms"}, "thickness": 12},
        "hovertemplate": "%{y}, %{x}: %{z:.3f} ms<extra></extra>",
        "xgap": 1,
        "ygap": 1 if len(ranks) * _RANK_HEIGHT <= _MOST_HEIGHT else 0,
    }
    height = min(_RANK_HEIGHT * max(3, len(ranks)), _MOST_HEIGHT)
    chart = figure([data], height=110 + height, reverse=True)
    chart["layout"]["xaxis"] |= {"type": "category", "showgrid": False}
    return chart


def bandwidth_chart(rows: Sequence[BandwidthRow], fits: Sequence[BandwidthFit]) -> Figure:
    """Set bus bandwidth against payload, both logarithmic, with the fitted curves."""
    rated = [row for row in rows if row.busbw_bytes_per_s and row.payload_bytes]
    data: list[dict[str, Any]] = []
    for op, group in dict.fromkeys((row.op, row.mesh_dim or row.process_group) for row in rated):
        mine = [row for row in rated if (row.op, row.mesh_dim or row.process_group) == (op, group)]
        colour = OPS[op if op in OPS else "other"].colour
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{op_label(op)}, {label(group or 'no group')}",
                "x": [row.payload_bytes / _MIB for row in mine],
                "y": [(row.busbw_bytes_per_s or 0) / _GB for row in mine],
                "marker": {
                    "color": colour,
                    "size": 9,
                    "symbol": ["circle" if row.waits_known else "circle-open" for row in mine],
                },
                "text": [f"ranks {format_numbers(row.ranks)}" if row.ranks else "" for row in mine],
                "hovertemplate": "%{x:.3f} MiB: %{y:.3f} GB/s<br>%{text}",
            }
        )
        data += [
            _curve(fit, mine, colour)
            for fit in fits
            if (fit.op, fit.mesh_dim or fit.process_group) == (op, group)
        ]
    chart = figure(data, height=340, x="payload, MiB", y="busbw, GB/s")
    chart["layout"]["xaxis"] |= logarithmic(x for one in data for x in one["x"])
    chart["layout"]["yaxis"] |= logarithmic(y for one in data for y in one["y"])
    return chart


def _curve(fit: BandwidthFit, rows: Sequence[BandwidthRow], colour: str) -> dict[str, Any]:
    """Draw a fit over the sizes that ran: half its rate is reached at its knee."""
    low, high = min(row.payload_bytes for row in rows), max(row.payload_bytes for row in rows)
    sizes = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"fit of {op_label(fit.op)}",
        "x": [size / _MIB for size in sizes],
        "y": [fit.bytes_per_s * size / (size + fit.knee_bytes) / _GB for size in sizes],
        "line": {"color": colour, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }
