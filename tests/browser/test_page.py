"""A page in a real browser: silent, as wide as the screen, sortable, dark when asked, escaped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chromium import Page
from support.documents import document
from support.results import HOSTILE

from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

PHONE, LAPTOP, DESK = 390, 1280, 1920

TABLE = "document.querySelector('table')"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "page.html"
    text = RENDERERS["html"].render(document(), RenderOptions(source=HOSTILE))
    assert isinstance(text, str)
    written.write_text(text, encoding="utf-8")
    return written


def column(page: Page, index: int, table: str = TABLE) -> list[str]:
    cells = f"[...{table}.tBodies[0].rows].map(row => row.cells[{index}].textContent.trim())"
    found: list[str] = page.evaluate(cells)
    return found


def sort_by(page: Page, index: int, table: str = TABLE) -> str:
    header = f"{table}.tHead.rows[0].cells[{index}]"
    before = page.evaluate(f"{header}.getAttribute('aria-sort')")
    page.evaluate(f"{header}.click()")
    return sorted_as(page, header, before)


def sorted_as(page: Page, header: str, before: str | None = None) -> str:
    """Wait until a header says another order than before, and return it."""
    order: str = page.evaluate(
        f"new Promise(done => {{ const look = () => {{ const order = {header}.getAttribute('aria-sort');"
        f" if (order !== {json.dumps(before)}) done(order); else requestAnimationFrame(look); }}; look(); }})"
    )
    return order


def unfold(page: Page) -> str:
    """Open the first fold; return its table, which comes alive then."""
    page.evaluate("document.querySelector('details').open = true")
    page.evaluate("new Promise(done => setTimeout(done))")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return "document.querySelector('details table')"


@pytest.mark.parametrize("width", [PHONE, LAPTOP, DESK])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_is_silent_drawn_and_no_wider_than_the_screen(
    page: Page, file: Path, width: int, dark: bool
) -> None:
    page.requests.clear()
    page.messages.clear()
    page.open(file, width=width, dark=dark)
    assert page.requests == [file.resolve().as_uri()]
    assert page.messages == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelectorAll('.chart .point').length") == 2


def test_a_large_screen_is_used(page: Page, file: Path) -> None:
    page.open(file, width=DESK)
    assert page.evaluate("document.querySelector('main').clientWidth") > 0.9 * DESK
    lefts = page.evaluate("[...document.querySelectorAll('.block')].map(b => b.getBoundingClientRect().left)")
    assert max(lefts) > DESK / 3  # two blocks side by side


def test_a_click_sorts_numbers_by_value_and_names_as_people_count(page: Page, file: Path) -> None:
    page.open(file)
    table = unfold(page)
    shown = column(page, 3, table)
    assert len(shown) == 12
    assert sort_by(page, 3, table) == "descending"
    assert column(page, 3, table) == shown[::-1]
    assert column(page, 3, table)[0] == "14.81"  # as text, 9.88 would come first
    assert sort_by(page, 3, table) == "ascending"
    assert column(page, 3, table) == shown
    assert sort_by(page, 0, table) == "ascending"
    layers = [name for name in column(page, 0, table) if name.startswith("layers.")]
    assert layers == [f"layers.{i}" for i in range(8)]
    marked = f"[...{table}.tHead.querySelectorAll('[aria-sort]')].length"
    assert page.evaluate(marked) == 1
    assert page.evaluate(f"{table}.tFoot.rows[0].cells[0].textContent.trim()") == "all"


def test_the_keyboard_sorts_too(page: Page, file: Path) -> None:
    page.open(file)
    table = unfold(page)
    focusable = f"{table}.tHead.rows[0].cells[0].querySelector('[tabindex=\"0\"]')"
    page.evaluate(f"{focusable}.focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    assert sorted_as(page, f"{table}.tHead.rows[0].cells[0]") == "ascending"


def test_a_filter_leaves_the_rows_that_match(page: Page, file: Path) -> None:
    page.open(file)
    table = unfold(page)
    field = "document.querySelector('details input[type=search]')"
    page.evaluate(f"{field}.value = 'layers.3'; {field}.dispatchEvent(new Event('input'))")
    assert column(page, 0, table) == ["layers.3"]
    page.evaluate(f"{field}.value = ''; {field}.dispatchEvent(new Event('input'))")
    assert len(column(page, 0, table)) == 12


def test_a_table_copies_as_it_is_sorted(page: Page, file: Path) -> None:
    page.open(file)
    unfold(page)
    page.evaluate(
        "window.copied = null;"
        "Object.defineProperty(navigator, 'clipboard',"
        " {value: {writeText: async text => { window.copied = text; }}})"
    )
    page.evaluate("document.querySelector('details .table-tools button').click()")
    header, *rows = page.evaluate("window.copied").split("\n")
    assert header.split("\t")[0] == "layer"
    assert len(rows) == 12 + 1, "every row, and the totals"


def test_the_contents_stay_in_sight(page: Page, file: Path) -> None:
    page.open(file, height=400)
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert page.evaluate("document.querySelector('nav').getBoundingClientRect().top") == 0


def test_the_dark_page_and_its_charts_are_light_on_dark(page: Page, file: Path) -> None:
    def brightness(expression: str) -> float:
        colour: str = page.evaluate(expression)
        parts = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        return sum(parts) / 3

    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.body).color"
    tick = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    page.open(file, dark=True)
    assert brightness(paper) < 64
    assert min(brightness(ink), brightness(tick)) > 160
    page.open(file, dark=False)
    assert brightness(paper) > 192
    assert max(brightness(ink), brightness(tick)) < 96


def test_print_keeps_the_severity_and_its_colour(page: Page, file: Path) -> None:
    page.open(file)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    badge = "getComputedStyle(document.querySelector('.severity.high'))"
    assert page.evaluate(f"{badge}.printColorAdjust") == "exact"
    assert page.evaluate(f"{badge}.borderTopWidth") == "1px"
    page.call("Emulation.setEmulatedMedia", media="")


def test_paper_is_light_and_its_charts_fit(page: Page, file: Path) -> None:
    """Printed from a wide, dark screen; after that the screen is as it was."""
    page.open(file, width=DESK, dark=True)
    chart = "document.querySelector('.chart .main-svg')"
    drawn = (
        f"{chart}.getBoundingClientRect().width",
        "document.querySelector('.chart .xtick text').style.fill",
    )
    before = [page.evaluate(one) for one in drawn]
    assert before[0] > 700
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(drawn[0]) == 700
    assert page.evaluate(drawn[1]) != before[1]
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.evaluate("Promise.all(work).then(() => null)")
    assert [page.evaluate(one) for one in drawn] == before
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.call("Emulation.setEmulatedMedia", media="")


def test_what_is_wider_than_the_screen_scrolls_by_keyboard(page: Page, file: Path) -> None:
    places = "[...document.querySelectorAll('.scroll')].filter(place => place.checkVisibility())"
    stops = f"{places}.filter(place => place.tabIndex === 0).length"
    wide = f"{places}.filter(place => place.scrollWidth > place.clientWidth).length"
    for width in (PHONE, DESK):
        page.open(file, width=width)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate(stops) == page.evaluate(wide)
    page.open(file, width=PHONE)
    assert page.evaluate(wide) >= 1
    named = "[...document.querySelectorAll('.scroll, .chart')].every(one => one.getAttribute('aria-label'))"
    assert page.evaluate(named)


def test_a_hostile_name_is_text_everywhere(page: Page, file: Path) -> None:
    page.open(file)
    assert page.evaluate("document.querySelectorAll('img, body b b, a[href^=javascript]').length") == 0
    assert page.evaluate("document.title").startswith("</script><img src=x")
    assert HOSTILE.replace("\x1b", "\\x1b") in column(page, 0)


def test_the_policy_stops_what_escaping_might_miss(page: Page, file: Path, tmp_path: Path) -> None:
    """Injected markup neither runs a script nor asks for an address."""
    broken = tmp_path / "broken.html"
    injected = "<script>window.hacked = 1</script><img src='https://example.invalid/x.png'>"
    broken.write_text(file.read_text(encoding="utf-8").replace("<main>", f"<main>{injected}"), "utf-8")
    page.open(broken)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelector('main img').naturalWidth") == 0
    assert any("Content Security Policy" in message for message in page.messages)


def test_tables_read_without_scripts(page: Page, file: Path) -> None:
    page.open(file, scripts=False)
    nodes = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    section = page.call("DOM.querySelector", nodeId=nodes, selector="#communication")["nodeId"]
    text = page.call("DOM.getOuterHTML", nodeId=section)["outerHTML"]
    assert "main-svg" not in text
    assert "all-gather" in text
