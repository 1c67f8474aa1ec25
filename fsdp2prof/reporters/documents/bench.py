"""Document and charts of a bench: measurements, fits, and bandwidth by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import Figure, figure, label, logarithmic
from fsdp2prof.reporters.document import Block, Chart, Document, Table, Value
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_bytes, show_count, show_gb_per_s, show_op
from fsdp2prof.results.bench import BenchCollective, BenchRate, BenchResult
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import BENCH_KINDS, op_label

_COLOURS = {"all_gather": "#e45756", "reduce_scatter": "#f58518", "all_reduce": "#eeca3b"}
_DASHES = ("solid", "dash", "dot", "dashdot")


def bandwidth_chart(rows: Sequence[BenchCollective]) -> Figure | None:
    """Draw bus bandwidth over payload, a line an operation and mesh dimension; None without collectives."""
    if not rows:
        return None
    dims = list(dict.fromkeys(row.mesh_dim for row in rows))
    data: list[dict[str, Any]] = []
    for op, dim in dict.fromkeys((row.op, row.mesh_dim) for row in rows):
        mine = [row for row in rows if (row.op, row.mesh_dim) == (op, dim)]
        name = op_label(op) if len(dims) == 1 else f"{op_label(op)}, {label(dim)}"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [row.payload_bytes for row in mine],
                "y": [row.busbw_bytes_per_s / 1e9 for row in mine],
                "line": {"color": _COLOURS.get(op), "dash": _DASHES[dims.index(dim) % len(_DASHES)]},
                "hovertemplate": "%{y:.3f} GB/s",
            }
        )
    chart = figure(data, height=320, x="payload", y="bus bandwidth, GB/s")
    chart["layout"]["xaxis"] |= logarithmic((row.payload_bytes for row in rows), in_bytes=True)
    chart["layout"]["yaxis"]["rangemode"] = "tozero"
    return chart


@builds(BenchResult)
def bench_document(result: BenchResult) -> Document:
    """Lay out a bench."""
    return Document(
        title=f"Bench of {result.device}",
        subtitle=f"{plural(result.world_size, 'rank')}, {result.backend}, torch {result.torch}",
        sections=[
            *c.section("collectives", "Collectives", *_collectives(result)),
            *c.section("device", "One device and its host", _rates(result)),
        ],
        warnings=result.notes,
    )


def _collectives(result: BenchResult) -> list[Block]:
    chart = bandwidth_chart(result.collectives)
    figure = [] if chart is None else [Chart(name="bandwidth", title=_best(result), figure=chart)]
    return [*figure, _fits(result), _sizes(result)]


def _best(result: BenchResult) -> str:
    best = max(result.collectives, key=lambda one: one.busbw_bytes_per_s)
    return (
        f"The fastest is {show_op(best.op)}: {show_gb_per_s(best.busbw_bytes_per_s)} GB/s "
        f"at {show_bytes(best.payload_bytes)}"
    )


def _fits(result: BenchResult) -> Table:
    columns = [
        c.op(),
        c.text("mesh_dim", "over"),
        c.number("ranks"),
        c.time("latency_ns", "latency"),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s"),
        c.size("half_payload_bytes", "half"),
        c.frac("residual_frac", "residual"),
        c.frac("worst_residual_frac", "worst"),
    ]
    note = "half: payload below which latency is most of the time; residuals over the sizes"
    return c.table("fits", "Fitted: latency + wire bytes / bandwidth", columns, result.fits, note=note)


def _sizes(result: BenchResult) -> Table:
    columns = [
        c.op(),
        c.text("mesh_dim", "over"),
        c.size("payload_bytes", "payload"),
        c.ms("median_ns", "median"),
        c.ms("lower_quartile_ns", "lower"),
        c.ms("upper_quartile_ns", "upper"),
        c.ms("fitted_ns", "fitted"),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s"),
        c.number("count", "n"),
    ]
    note = "ms of the slowest rank: median and quartiles"
    return c.table("collectives", "By size", columns, result.collectives, note=note)


def _rates(result: BenchResult) -> Table:
    columns = [
        c.text("kind", "what", lambda kind: BENCH_KINDS[kind].label),
        c.dtype(),
        c.text("size"),
        c.ms("median_ns", "median"),
        c.ms("lower_quartile_ns", "lower"),
        c.ms("upper_quartile_ns", "upper"),
        c.flops("flops_per_s", "achieved", of=lambda row: _counting(row, "operations")),
        c.gb_per_s("bytes_per_s", "GB/s", of=lambda row: _counting(row, "bytes")),
        c.number("per_s", "a second", _calls, of=lambda row: _counting(row, "calls")),
    ]
    note = "ms, median and quartiles; operators or kernels a second"
    return c.table("rates", "One device and its host", columns, result.rates, note=note)


def _counting(row: BenchRate, amount: str) -> Value:
    return row.per_s if BENCH_KINDS[row.kind].amount == amount else None


def _calls(per_s: float | None) -> str:
    return show_count(None if per_s is None else round(per_s))
