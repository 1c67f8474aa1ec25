"""The report's HTML: complete, escaped, and with charts that plotly accepts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from support.results import HOSTILE, memory_analysis, run_analysis, trace_analysis

from fsdp2prof.analyzers.trace.summary import summarise
from fsdp2prof.reporters import html
from fsdp2prof.results import Finding, MemoryAnalysis, RunAnalysis, TraceAnalysis


class Outline(HTMLParser):
    """Elements that could load or run something, and whether every table row has the header's cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def outline(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Outline()
    parser.feed(page)
    return parser.tags


def figures(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found
    charts_of_page: list[dict[str, Any]] = json.loads(found[1])
    return charts_of_page


@pytest.mark.parametrize("analysis", [run_analysis(), trace_analysis(), memory_analysis()])
def test_every_chart_has_its_place(analysis: RunAnalysis | TraceAnalysis | MemoryAnalysis) -> None:
    page = html.render("name", analysis)
    places = [int(a["data-figure"] or -1) for _, a in outline(page) if "data-figure" in a]
    assert places == list(range(len(figures(page))))


def test_nothing_refers_outside() -> None:
    for tag, attributes in outline(html.render("name", run_analysis(hostile=HOSTILE))):
        assert tag not in ("img", "iframe", "link", "object", "embed", "form", "base")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_hostile_names_end_no_script() -> None:
    """Each script element closes once: plotly, ours, and the figures."""
    page = html.render(HOSTILE, run_analysis(hostile=HOSTILE))
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert own.count("</script>") == 1
    assert "onerror=alert(1)>" not in own
    assert "&lt;/script&gt;&lt;img src=x" in own


def test_plotly_accepts_the_figures() -> None:
    from plotly.graph_objects import Figure

    for figure in figures(html.render("name", run_analysis(hostile=HOSTILE))):
        assert Figure(figure).to_dict()["data"]


def test_empty_analyses_render() -> None:
    nothing = summarise(replace(trace_analysis(), ranks=[], groups=[], findings=[], warnings=[]))
    page = html.render("name", nothing)
    assert "<script" not in page
    assert "No collective ran" in page
    assert html.render("name", replace(memory_analysis(), ranks=[]))


def test_thousands_of_rows_are_cut_and_said() -> None:
    analysis = trace_analysis()
    ranks = [replace(analysis.ranks[0], rank=rank) for rank in range(1100)]
    page = html.render("name", replace(analysis, ranks=ranks))
    assert "2000 of all 2200 rows" in page
    assert page.count("<tr>") < 2200


def test_findings_of_time_and_memory_stand_together_the_most_severe_first() -> None:
    run = run_analysis()
    assert run.trace is not None
    assert run.memory is not None
    minor, major = (
        Finding(id=severity, severity=severity, fqn=None, message=f"something {severity}")
        for severity in ("info", "high")
    )
    trace, memory = replace(run.trace, findings=[minor]), replace(run.memory, findings=[major])
    page = html.render("name", replace(run, trace=trace, memory=memory))
    assert 0 < page.index("something high") < page.index("something info")
