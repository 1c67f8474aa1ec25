"""Charts of memory: what they draw is what the result says."""

from __future__ import annotations

from dataclasses import replace

from support.results import MIB, memory_analysis

from fsdp2prof.analyzers.memory.peak import layer_rows
from fsdp2prof.reporters.charts.memory import course_chart, memory_layer_chart, peaks_chart
from fsdp2prof.results.peak import LayerBytes


def test_course_stacks_to_the_peak() -> None:
    figure = course_chart(memory_analysis().ranks[0])
    assert figure is not None
    totals = [sum(values) for values in zip(*(area["y"] for area in figure["data"]), strict=True)]
    assert totals == [70.0, 90.0, 100.0, 70.0]
    assert figure["data"][0]["x"] == [0.0, 1.0, 2.0, 3.0]


def test_a_recording_without_times_is_drawn_by_position() -> None:
    rank = memory_analysis().ranks[0]
    course = {**rank.timeline, "time_ns": [-1] * 4, "reserved": [128 * MIB] * 4}
    figure = course_chart(replace(rank, timeline=course))
    assert figure is not None
    assert figure["data"][-1]["name"] == "reserved"
    assert figure["data"][0]["x"] == [0, 1, 2, 3]
    assert "no times" in figure["layout"]["xaxis"]["title"]["text"]


def test_two_peaks_stack_to_their_totals() -> None:
    peak = memory_analysis().ranks[0].peak
    emptier = replace(peak, categories={**peak.categories, "activation": 5 * MIB})
    figure = peaks_chart({"before": emptier, "after": peak})
    assert figure is not None
    assert {tuple(bar["y"]) for bar in figure["data"]} == {("before", "after")}
    totals = [sum(values) for values in zip(*(bar["x"] for bar in figure["data"]), strict=True)]
    assert totals == [85.0, 100.0]


def test_a_bar_a_layer_and_one_for_the_rest() -> None:
    layers = layer_rows(
        [LayerBytes(fqn=f"layers.{i}", category="activation", bytes=(40 - i) * MIB) for i in range(35)]
    )
    figure = memory_layer_chart(layers)
    assert figure is not None
    (bar,) = figure["data"]
    assert (bar["y"][0], bar["y"][29], bar["y"][30]) == ("layers.0", "layers.29", "5 more")
    assert bar["x"][30] == 10 + 9 + 8 + 7 + 6
