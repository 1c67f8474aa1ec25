"""The report of a run in a real browser: every chart drawn, hostile names in them, the parts there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chromium import Page
from support.large_run import large_run
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
from support.shards import sharding_table

from fsdp2prof.analyzers.ledger.replayed import with_replays
from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.mesh_map import map_mesh
from fsdp2prof.analyzers.trace.operators import OperatorSum, operator_rows
from fsdp2prof.reporters.document import Column, Document, Section, Sentences, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.comparison import MemoryComparison
from fsdp2prof.results.finding import Finding, Place
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.what_if import WhatIfChange


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
    page.open_parts()
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
    page.open_parts()
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
        "Details",
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
    page.open_parts()
    assert page.messages == []
    heights = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().height)"
    )
    assert len(heights) == charts
    assert all(height > 100 for height in heights)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def full_run() -> RunAnalysis:
    """A run with every chart that the sample lacks: operators, shards and ranks on two nodes."""
    rows = operator_rows(
        [
            [
                OperatorSum("aten::mm", f"[[{size},4096],[4096,4096]]", '["float","float"]', 4, size * 1000)
                for size in (64, 512, 8192)
            ]
        ],
        1,
        {"float32": 6e13},
        3e12,
    )
    run = run_analysis()
    assert run.trace is not None
    trace = replace(
        run.trace, operators=rows, peak_flops_per_s={"float32": 6e13}, peak_memory_bytes_per_s=3e12
    )
    mesh = map_mesh({"dp_replicate": 2, "dp_shard": 2}, gpus_per_node=2)
    return replace(run, trace=trace, sharding=lay_out_shards(sharding_table(4, even=8, uneven=5)), mesh=mesh)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1024, False), (1920, True)])
def test_each_chart_draws_what_the_result_says(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "full.html"
    file.write_text(page_of(full_run(), "runs/first"), encoding="utf-8")
    page.requests.clear()
    page.messages.clear()
    page.open(file, width=width, dark=dark)
    page.open_parts()
    assert page.messages == []
    assert page.requests == [file.resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    def drawn(chart: str, what: str) -> Any:
        return page.evaluate(f"document.querySelector('[data-figure={chart}]').data{what}")

    intensity = [2 * n * 4096**2 / (4 * (2 * n * 4096 + 4096**2)) for n in (8192, 512, 64)]
    assert drawn("roofline_chart", ".map(one => one.name)") == ["products", "roof, fp32"]
    assert drawn("roofline_chart", "[0].x") == pytest.approx(intensity)
    assert max(drawn("roofline_chart", "[1].y")) == pytest.approx(60)
    assert drawn("shards", "[0].z") == [[1, 1, 0.5, 0], [1, 1, 1, 1]]
    assert drawn("nodes", "[1].text") == ["0", "1", "2", "3"]
    texts = "document.querySelector('[data-figure=memory_layers] .ytick text')"
    assert page.evaluate(f"getComputedStyle({texts}).fill") == (
        "rgb(228, 231, 235)" if dark else "rgb(31, 41, 51)"
    )


def test_a_chart_zooms_and_tells_what_is_under_the_pointer(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "full.html"
    file.write_text(page_of(full_run(), "runs/first"), encoding="utf-8")
    page.open(file)
    page.open_parts()
    chart = "document.querySelector('[data-figure=roofline_chart]')"
    page.evaluate(f"{chart}.scrollIntoView({{behavior: 'instant', block: 'center'}})")
    x, y = page.evaluate(
        f"(() => {{ const box = {chart}.querySelector('.points path').getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    said = page.evaluate(
        "new Promise(done => { const look = () => { const text = "
        f"{chart}.querySelector('.hoverlayer')?.textContent; if (text) done(text);"
        " else requestAnimationFrame(look); }; look(); })"
    )
    assert "aten::mm" in said
    assert "TFLOP/s" in said
    before = page.evaluate(f"{chart}.layout.xaxis.range")
    page.evaluate(f"Plotly.relayout({chart}, {{'xaxis.range': [1, 2]}}).then(() => null)")
    assert page.evaluate(f"{chart}.layout.xaxis.range") == [1, 2] != before


SCREEN = 900


@pytest.mark.parametrize("ranks", [2, 64])
def test_timeline_and_remedies_are_on_two_screens_and_the_page_on_six(
    page: Page, tmp_path: Path, ranks: int
) -> None:
    file = tmp_path / "run.html"
    run = large_run(ranks)
    assert run.trace is not None
    step = run.trace.totals.step_ns or 0.0
    tried = [
        WhatIfChange(
            change=change, what=what, step_ns=0.9 * step, gained_ns=0.1 * step, gained_frac=0.1,
            memory_bytes=MIB, reason=None, least_gained_ns=0.0, most_gained_ns=step,
            assumptions=["times of kernels stay as they are"],
        )
        for change, what in (
            ("reshard=never", "never resharding after forward"),
            ("forward_prefetch=2", "explicit forward prefetch of 2"),
            ("backward_prefetch=2", "explicit backward prefetch of 2"),
        )
    ]  # fmt: skip
    on_gpus = [replace(rank, device_type="cuda") for rank in run.trace.ranks]
    run = replace(run, trace=with_replays(replace(run.trace, ranks=on_gpus), tried))
    file.write_text(page_of(run, "runs/large"), encoding="utf-8")
    page.open(file, width=1440, height=SCREEN)
    bottom = "Math.round(document.querySelector('{}').getBoundingClientRect().bottom + scrollY)"
    remedies, chart, table = (
        page.evaluate(bottom.format(place))
        for place in (".verdict ol", "#timeline .chart", "#what_if .scroll")
    )
    assert page.evaluate("document.querySelectorAll('.verdict ol li').length") == 3
    assert remedies < chart < 2 * SCREEN
    assert table < 2 * SCREEN
    assert page.evaluate("document.documentElement.scrollHeight") <= 6 * SCREEN
    nav = page.evaluate("(n => [n.scrollWidth, n.clientWidth])(document.querySelector('nav'))")
    assert nav[0] <= nav[1]
    assert page.evaluate("document.querySelectorAll('details.part[open]').length") == 0


def test_sentences_link_to_their_place_and_open_it(page: Page, report: Path) -> None:
    page.open(report)
    places = page.evaluate("[...document.querySelectorAll('a.place')].map(link => link.hash.slice(1))")
    assert places
    assert page.evaluate(f"{places}.every(id => document.getElementById(id) !== null)")
    page.evaluate("(() => { location.hash = 'step'; return null; })()")
    page.evaluate("new Promise(done => setTimeout(() => done(null), 200))")
    assert page.evaluate("document.getElementById('step').open")


def test_a_click_shows_and_marks_the_place_of_a_sentence(page: Page, tmp_path: Path) -> None:
    run = large_run(4)
    assert run.trace is not None
    assert run.trace.timeline is not None
    place = Place(fqn="layers.60", phase="forward", op="all_gather", rank=2, step=3)
    finding = Finding(id="x", severity="high", fqn=place.fqn, message="It waits.", place=place)
    document = build(replace(run, trace=replace(run.trace, findings=[finding]), findings=[finding]))
    window, row = document.places()["It waits."]
    file = tmp_path / "run.html"
    file.write_text(str(RENDERERS["html"].render(document, RenderOptions())), encoding="utf-8")
    page.open(file, width=1440, height=900)

    def click(label: str) -> None:
        page.evaluate(
            "(() => { document.documentElement.style.scrollBehavior = 'auto';"
            " [...document.querySelectorAll('.findings a.place')]"
            f".find(link => link.textContent === '{label}').click(); }})()"
        )
        page.evaluate("new Promise(done => setTimeout(() => done(null), 400))")

    click("timeline")
    assert window.window is not None
    rank, low, high = window.window
    timeline = "timelines.get('timeline')"
    page.evaluate(f"{timeline}.drawn.then(() => null)")
    view = page.evaluate(f"{timeline}.view")
    assert view[0] < low < high < view[1] < low + 3 * (high - low)
    framed = page.evaluate(
        "document.querySelector('#timeline .chart').layout.shapes.filter(one => one.type === 'rect')"
        ".map(one => [one.x0, one.x1])"
    )
    assert framed == [[low / 1e6, high / 1e6]]
    assert rank == 2
    assert page.evaluate(f"{timeline}.rows.some(row => row.rank.rank === 2)")
    seen = "(box => box.top < innerHeight && box.bottom > 0)({}.getBoundingClientRect())"
    assert page.evaluate(seen.format("document.querySelector('#timeline .chart')"))

    click("communication by layer")
    found = f"document.getElementById('{row.target}')"
    assert page.evaluate(f"{found}.closest('details') === null || {found}.closest('details').open")
    assert page.evaluate(seen.format(found))
    colour = "getComputedStyle({}.cells[0]).backgroundColor"
    assert page.evaluate(colour.format(found)) != page.evaluate(
        colour.format(f"({found}.nextElementSibling ?? {found}.previousElementSibling)")
    )
    assert "layers.60" in page.evaluate(f"{found}.textContent") or "-" in page.evaluate(
        f"{found}.cells[0].textContent"
    )


BROKEN = r"""
(place => {
  const broken = [], texts = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  const letters = [];
  while (texts.nextNode()) {
    const node = texts.currentNode;
    for (let i = 0; i < node.data.length; i += 1) letters.push([node, i]);
  }
  for (const word of letters.map(([node, i]) => node.data[i]).join("").matchAll(/\S+/g)) {
    const range = document.createRange();
    range.setStart(...letters[word.index]);
    const [last, at] = letters[word.index + word[0].length - 1];
    range.setEnd(last, at + 1);
    const tops = [...range.getClientRects()].map(box => box.top);
    if (Math.max(...tops) - Math.min(...tops) > 11) broken.push(word[0]);
  }
  return broken;
})"""
"""The words of an element that stand on several lines."""

NAME = "aten::_log_softmax_backward_data_of_the_whole_vocabulary_in_chunks.out"


def with_code_and_a_name() -> Document:
    """A page of options in a sentence, in lines to paste and in backquotes, and of a long name in a table."""
    options = " ".join(f"--option-number-{i} {i}" for i in range(40))
    names = Table(
        name="names", title="Names", rows=[[NAME, "-"]],
        columns=[Column(name="name", label="name", kind="name"), Column(name="other", label="other")],
    )  # fmt: skip
    said = Sentences(title="Said", lines=[f"Only {options} or `{options}` would do."])
    paste = Sentences(title="To paste", lines=[f"torchrun {options}"], style="code")
    return Document(title="Page", sections=[Section(anchor="all", title="All", blocks=[said, paste, names])])


@pytest.mark.parametrize("width", [390, 1440])
def test_options_break_at_spaces_and_names_only_where_nothing_else_helps(
    page: Page, tmp_path: Path, width: int
) -> None:
    file = tmp_path / "page.html"
    html = RENDERERS["html"].render(with_code_and_a_name(), RenderOptions(source="runs/first"))
    file.write_text(str(html), encoding="utf-8")
    page.open(file, width=width)
    for place in ("p.sentence", "pre.code"):
        assert page.evaluate(f"document.querySelector('{place}').getBoundingClientRect().height") > 60
        assert page.evaluate(f"{BROKEN}(document.querySelector('{place}'))") == []
    assert page.evaluate(f"{BROKEN}(document.querySelector('td.name'))") == ([NAME] if width == 390 else [])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    copied = page.evaluate("document.querySelector('pre.code').textContent")
    assert copied.startswith("torchrun --option-number-0 0 --option-number-1 1 ")
