"""Charts of memory: what they draw is what the result says."""

from __future__ import annotations

from dataclasses import replace

from support.results import MIB, memory_analysis

from fsdp2prof.reporters.charts.memory import course_chart


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
