"""The report in a real browser: offline, silent, drawn, and deaf to hostile names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chromium import Page, find_chromium
from support.results import HOSTILE, run_analysis, trace_analysis

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results import RunAnalysis, TraceAnalysis

CHROMIUM = find_chromium()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

WIDE, NARROW = 1280, 390


def page_of(result: RunAnalysis | TraceAnalysis, source: str) -> str:
    text = RENDERERS["html"].render(build(result), RenderOptions(source=source))
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with Page(CHROMIUM) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first layer has a hostile name."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page_of(run_analysis(hostile=HOSTILE), HOSTILE), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_loads_nothing_says_nothing_and_draws_every_chart(page: Page, report: Path, width: int) -> None:
    page.requests.clear()
    page.messages.clear()
    page.open(report, width=width)
    assert page.requests == [report.resolve().as_uri()]
    assert page.messages == []
    charts = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().height)"
    )
    assert len(charts) == 4
    assert all(height > 100 for height in charts)
    bars = page.evaluate("document.querySelectorAll('.chart .point').length")
    assert bars >= 20
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_name_is_text_everywhere(page: Page, report: Path) -> None:
    page.open(report)
    assert page.evaluate("document.querySelectorAll('img, body b b, a[href^=javascript]').length") == 0
    assert page.evaluate("document.title").startswith("</script><img src=x")
    shown = HOSTILE.replace("\x1b", "\\x1b")
    cells = page.evaluate("[...document.querySelectorAll('td.name')].map(cell => cell.textContent)")
    assert shown in cells
    ticks = page.evaluate("[...document.querySelectorAll('.chart .xtick text')].map(t => t.textContent)")
    assert "</script><im…red]\\x1b[31m" in ticks


def test_the_policy_stops_what_escaping_might_miss(page: Page, report: Path, tmp_path: Path) -> None:
    """Injected markup neither runs a script nor asks for an address."""
    broken = tmp_path / "broken.html"
    injected = "<script>window.hacked = 1</script><img src='https://example.invalid/x.png'>"
    broken.write_text(report.read_text(encoding="utf-8").replace("<main>", f"<main>{injected}"), "utf-8")
    page.open(broken)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelector('main img').naturalWidth") == 0
    assert any("Content Security Policy" in message for message in page.messages)


def test_tables_read_without_scripts(page: Page, report: Path) -> None:
    page.open(report, scripts=False)
    nodes = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    section = page.call("DOM.querySelector", nodeId=nodes, selector="#communication")["nodeId"]
    text = page.call("DOM.getOuterHTML", nodeId=section)["outerHTML"]
    assert "main-svg" not in text
    assert "reduce-scatter" in text
    assert "50.0%" in text


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
