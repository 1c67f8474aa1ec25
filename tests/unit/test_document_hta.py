"""The views' documents: what a person sees stands in the result, under the names that data has."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.traces import two_kernel_trace

from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics, trace_diff
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

VIEWS: dict[str, Callable[[], Any]] = {
    "critical_path": lambda: critical_path(two_kernel_trace()),
    "launch_statistics": lambda: launch_statistics(two_kernel_trace()),
    "idle_causes": lambda: idle_causes(two_kernel_trace()),
    "trace_diff": lambda: trace_diff(two_kernel_trace(), two_kernel_trace()),
}


@cache
def found(name: str) -> Any:
    return VIEWS[name]()


def rendered(name: str, form: str, **options: Any) -> str:
    text = RENDERERS[form].render(build(found(name)), RenderOptions(**options))
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", VIEWS)
def test_the_verdict_comes_before_the_tables(name: str) -> None:
    text = " ".join(rendered(name, "text").split())
    places = [text.index(sentence) for sentence in found(name).verdict]
    assert places == sorted(places)
    assert max(places) < text.index("───")


def test_the_gap_between_two_kernels_by_hand() -> None:
    """20.5 us between the kernels, launched in time: no wait, the cost of launching."""
    assert found("idle_causes").verdict == [
        "Stream 7, the busiest, has work for 500.0 us and is idle for 20.5 us (3.9%).",
        "100.0% of its idle time: the gap between two kernels.",
    ]
    assert "20.5 us" in rendered("idle_causes", "text")


def test_a_bar_does_not_repeat_its_number_in_data() -> None:
    rows = list(csv.reader(io.StringIO(rendered("idle_causes", "csv"))))
    assert rows[0] == ["stream", "cause", "idle_ns", "idle_frac"]
    assert ["7", "kernel_wait", "20500", "1.0"] in rows
    assert list(found("idle_causes").to_pandas()["streams"]) == ["stream", "busy_ns", "idle_ns", "idle_frac"]


def test_a_diff_of_a_trace_with_itself_says_so() -> None:
    diff = found("trace_diff")
    assert {row.diff_ns for row in diff.rows} == {0}
    assert diff.verdict == ["The step takes 1.00 ms, like before."]
