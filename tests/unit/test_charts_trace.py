"""Charts of a trace: what they draw is what the result says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.results import HOSTILE, MS, trace_analysis

from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.reporters.charts.figure import Figure, logarithmic
from fsdp2prof.reporters.charts.trace import layer_chart, step_chart
from fsdp2prof.reporters.documents.trace_tables import every_step, step_rows
from fsdp2prof.results.trace import TraceAnalysis


def layers_of(analysis: TraceAnalysis) -> Figure:
    return layer_chart(analysis.layers, analysis.by_layer)


def test_a_bar_stacks_to_its_window() -> None:
    figure = step_chart(step_rows(trace_analysis()))
    assert [sum(values) for values in zip(*(bar["x"] for bar in figure["data"]), strict=True)] == [50.0] * 4
    assert figure["data"][0]["y"] == [f"rank {rank}, step {step}" for rank in (0, 1) for step in (3, 4)]


def test_bars_of_a_layer_are_its_exposed_time_and_the_tick_all_of_it() -> None:
    analysis = trace_analysis(blocks=11)
    *bars, ticks = layers_of(analysis)["data"]
    drawn = sum(value for bar in bars for value in bar["y"])
    assert drawn == pytest.approx(sum(layer.exposed_ns for layer in analysis.layers) / MS)
    assert ticks["y"] == [4.0] * 12


def test_layers_are_in_the_order_of_their_names_and_long_ones_stay_apart() -> None:
    figure = layers_of(trace_analysis(blocks=11))
    names = ["(root)", *(f"layers.{i}" for i in range(11))]
    assert figure["layout"]["xaxis"]["categoryarray"] == figure["data"][-1]["x"] == names
    analysis = trace_analysis()
    long = [
        "a_module_with_a_name.layer.0.feed_forward_network",
        "a_module_with_a_name.layer.1.feed_forward_network",
    ]
    groups = [replace(row, fqn=name) for row, name in zip(analysis.groups, long, strict=False)]
    assert len(set(layers_of(of_part(replace(analysis, groups=groups)))["data"][-1]["x"])) == 2


@pytest.mark.parametrize(
    ("values", "in_bytes", "ticks"),
    [
        ((536.0, 990.0), False, None),
        (
            (700.0, 2_900.0, 8_000.0),
            False,
            ["100", "200", "500", "1,000", "2,000", "5,000", "10,000", "20,000", "50,000"],
        ),
        ((1e-4, 1e6), False, ["0.0001", "0.01", "1", "100", "10,000", "1e+06"]),
        ((4096, 1 << 20), True, ["4.00 KiB", "16.0 KiB", "64.0 KiB", "256.0 KiB", "1.00 MiB"]),
        ((), False, None),
    ],
)  # fmt: skip
def test_logarithmic_axes_have_few_whole_ticks(
    values: tuple[float, ...], in_bytes: bool, ticks: list[str] | None
) -> None:
    axis = logarithmic(values, in_bytes=in_bytes)
    assert (axis["type"], axis.get("ticktext")) == ("log", ticks)


def test_names_are_escaped() -> None:
    assert "<img" not in str(layers_of(trace_analysis(hostile=HOSTILE)))


def test_many_windows_become_means_and_many_ranks_three_rows() -> None:
    analysis = trace_analysis()
    first = analysis.ranks[0]
    eight = of_part(replace(analysis, ranks=[replace(first, rank=rank) for rank in range(8)]))
    assert [(row.rank, row.step) for row in step_rows(eight)] == [(rank, "mean") for rank in range(8)]
    slow = replace(first.steps[0], duration_ns=1000 * MS)
    ranks = [replace(first, rank=rank) for rank in range(64)]
    ranks[17] = replace(ranks[17], steps=[slow])
    many = of_part(replace(analysis, ranks=ranks))
    assert [row.step for row in step_rows(many)] == ["fastest", "median", "slowest"]
    assert (step_rows(many)[-1].rank, step_rows(many)[-1].window_ns) == (17, 1000 * MS)
    assert len(every_step(many)) == 127
