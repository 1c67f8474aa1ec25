"""The report of a run in a real browser: every chart drawn, hostile names in them, the parts there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.chromium import Page
from support.results import (
    HOSTILE,
    MIB,
    fragmentation,
    memory_analysis,
    memory_comparison,
    out_of_memory,
    run_analysis,
    trace_analysis,
)

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results import MemoryAnalysis, MemoryComparison, RunAnalysis, TraceAnalysis


def page_of(result: RunAnalysis | TraceAnalysis | MemoryAnalysis | MemoryComparison, source: str) -> str:
    text = RENDERERS["html"].render(build(result), RenderOptions(source=source))
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first layer has a hostile name."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page_of(run_analysis(hostile=HOSTILE), HOSTILE), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_every_chart_is_drawn_and_nothing_is_said_or_loaded(page: Page, report: Path, width: int) -> None:
    page.requests.clear()
    page.messages.clear()
    page.open(report, width=width)
    assert page.requests == [report.resolve().as_uri()]
    assert page.messages == []
    charts = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().height)"
    )
    assert len(charts) == len(build(run_analysis()).charts()) >= 4
    assert all(height > 100 for height in charts)
    bars = page.evaluate("document.querySelectorAll('.chart .point').length")
    assert bars >= 20
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_name_is_text_in_tables_and_charts(page: Page, report: Path) -> None:
    page.open(report)
    assert page.evaluate("document.querySelectorAll('img, body b b, a[href^=javascript]').length") == 0
    cells = page.evaluate("[...document.querySelectorAll('td.name')].map(cell => cell.textContent.trim())")
    assert HOSTILE.replace("\x1b", "\\x1b") in cells
    ticks = page.evaluate("[...document.querySelectorAll('.chart .xtick text')].map(t => t.textContent)")
    assert "</script><im…red]\\x1b[31m" in ticks


def test_a_trace_alone_has_its_own_sections(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "trace.html"
    file.write_text(page_of(trace_analysis(), "traces"), encoding="utf-8")
    page.messages.clear()
    page.open(file)
    assert page.messages == []
    titles = page.evaluate("[...document.querySelectorAll('h2')].map(title => title.textContent)")
    assert titles == [
        "Warnings",
        "Findings",
        "Where the step goes",
        "Communication by layer",
        "Ranks against each other",
    ]


@pytest.mark.parametrize(("result", "charts"), [("failed", 2), ("compared", 1)])
@pytest.mark.parametrize("width", [390, 1280])
def test_memory_has_pages_of_its_own(
    page: Page, tmp_path: Path, result: str, charts: int, width: int
) -> None:
    analysis = memory_analysis(hostile=HOSTILE)
    rank = replace(
        analysis.ranks[0], oom=out_of_memory(), fragmentation=fragmentation(), device_total_bytes=200 * MIB
    )
    results: dict[str, MemoryAnalysis | MemoryComparison] = {
        "failed": replace(analysis, ranks=[rank]),
        "compared": memory_comparison(),
    }
    file = tmp_path / "memory.html"
    file.write_text(page_of(results[result], HOSTILE), encoding="utf-8")
    page.messages.clear()
    page.open(file, width=width)
    assert page.messages == []
    heights = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().height)"
    )
    assert len(heights) == charts
    assert all(height > 100 for height in heights)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
