"""The timeline in a real browser: drawn by level of zoom, moved by buttons, said in words, escaped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.chromium import Page
from support.results import HOSTILE, run_comparison
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.step import StepTimeline
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

T = "timelines.get('timeline')"


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> StepTimeline:
    """Two ranks of which one is slow; a layer's name is markup."""
    schedule = Schedule(roots=(transformer(3),))
    run = write_run(record(schedule, schedule.scaled(1.5, "layers.1")), tmp_path_factory.mktemp("t") / "run")
    found = analyze_trace(open_job(run), workers=1).timeline
    assert found is not None
    return replace(found, layers=[HOSTILE if fqn == "layers.1" else fqn for fqn in found.layers])


def page_of(timeline: StepTimeline, folder: Path) -> Path:
    from support.results import trace_analysis

    file = folder / "page.html"
    analysis = replace(trace_analysis(), timeline=timeline)
    text = RENDERERS["html"].render(build(analysis), RenderOptions(source="run"))
    assert isinstance(text, str)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def file(timeline: StepTimeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(timeline, tmp_path_factory.mktemp("page"))


def opened(page: Page, file: Path, **options: int | bool) -> None:
    page.requests.clear()
    page.messages.clear()
    page.open(file, **options)  # type: ignore[arg-type]
    page.evaluate(f"{T}.drawn.then(() => null)")


def act(page: Page, action: str) -> None:
    """Do something that moves the timeline, and wait until the frame it is drawn in is over."""
    page.evaluate(f"(async () => {{ {action}; await {T}.drawn; }})()")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True), (1920, False)])
def test_lanes_are_drawn_from_the_data(
    page: Page, file: Path, timeline: StepTimeline, width: int, dark: bool
) -> None:
    opened(page, file, width=width, dark=dark)
    assert page.messages == []
    assert page.requests == [file.resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rows = page.evaluate(f"{T}.rows.map(row => row.label)")
    ranks = timeline.ranks if width > 640 else timeline.ranks[:1]
    assert len(rows) == sum(len(rank.lanes) for rank in ranks)
    act(page, f"{T}.look({T}.first, {T}.total)")  # the hosts, too, which run ahead
    drawn = page.evaluate(f"{T}.place.data[0].z.map(row => row.some(code => code !== null))")
    assert drawn == [True] * len(rows)
    assert page.evaluate("document.querySelectorAll('.timeline .heatmaplayer image').length") == 1


def test_a_pixel_shows_what_runs_there(page: Page, file: Path) -> None:
    """Zoomed in to the middle of a collective, its lane is that collective from edge to edge."""
    opened(page, file)
    row = f"{T}.rows.find(row => row.key === 'reduce_scatter')"
    page.evaluate(f"(() => {{ const [span] = {row}.lanes[0].spans; {T}.look(span.start, span.end); }})()")
    codes = page.evaluate(f"{T}.pixels({row}, ...{T}.view, 50)")
    assert len(set(codes)) <= 2, "the collective, and the part of it that waits for a peer"
    assert None not in codes
    empty = page.evaluate(f"{T}.pixels({row}, {T}.first, {T}.first + 1000, 50)")
    assert set(empty) == {None}


def test_it_opens_at_the_longest_wait_and_says_it(page: Page, file: Path, timeline: StepTimeline) -> None:
    """Or at the place of the verdict's first sentence that has one, with some of the step around it."""
    opened(page, file)
    longest = max((stall for rank in timeline.ranks for stall in rank.stalls), key=lambda one: one.stall_ns)
    low, high = page.evaluate(f"{T}.view")
    assert low <= longest.needed_ns
    assert longest.needed_ns + longest.stall_ns <= high
    assert timeline.duration_ns / 5 < high - low < timeline.duration_ns / 2
    assert page.evaluate("document.querySelector('.timeline [role=status]').textContent").startswith(
        "The longest wait: rank"
    )
    framed = page.evaluate(f"{T}.place.layout.shapes.filter(one => one.type === 'rect').length")
    assert framed == 1


def test_a_label_is_a_whole_name_or_none(page: Page, file: Path, timeline: StepTimeline) -> None:
    """Or the end of a module's path; never a part of an operator's name."""
    opened(page, file)
    names = ["aten::_log_softmax_backward_data", "softmax"]
    page.evaluate(
        f"for (const rank of {T}.ranks) {{"
        f" rank.side.names = rank.side.names.map((_, i) => {names}[i % 2]);"
        " for (const lane of rank.lanes.filter(one => one.key === 'compute'))"
        " for (const span of lane.spans) span.layer = -1; }"
    )
    shown = set()
    for part in range(1, 40):
        act(page, f"{T}.look({T}.first, {T}.first + {T}.total / {part})")
        shown |= set(page.evaluate(f"{T}.place.data.find(one => one.name === 'layers').text"))
    modules = {f"layers.{i}" for i in range(3)} | {"(root)"}
    assert "softmax" in shown
    known = {*names, *modules, "", *(str(fqn) for fqn in timeline.layers)}
    assert {text for text in shown if not text.startswith("&lt;")} <= known


def test_show_the_worst_goes_to_the_longest_stall_and_says_it(
    page: Page, file: Path, timeline: StepTimeline
) -> None:
    opened(page, file)
    act(page, "document.querySelector('.timeline .worst').click()")
    longest = max((stall for rank in timeline.ranks for stall in rank.stalls), key=lambda one: one.stall_ns)
    low, high = page.evaluate(f"{T}.view")
    assert low <= longest.needed_ns
    assert longest.needed_ns + longest.stall_ns <= high
    assert high - low < timeline.duration_ns / 2
    said = page.evaluate("document.querySelector('.timeline [role=status]').textContent")
    assert said.startswith("1 of ")
    assert "waited" in said
    assert page.evaluate(f"{T}.place.layout.annotations.length") >= 1, "an arrow from the collective"
    assert page.evaluate("document.querySelectorAll('.timeline .barlayer .point').length") >= 1


def test_buttons_move_and_zoom(page: Page, file: Path) -> None:
    opened(page, file)

    def press(name: str) -> tuple[float, float]:
        act(page, f"document.querySelector('.toolbar [aria-label=\"{name}\"]').click()")
        low, high = page.evaluate(f"{T}.view")
        return low, high

    whole = press("All: the whole step")
    half = press("Zoom in")
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    later = press("Later")
    assert later[0] > half[0]
    assert later[1] - later[0] == pytest.approx(half[1] - half[0])
    assert press("Earlier")[0] < later[0]
    assert press("All: the whole step") == whole
    drawn = page.evaluate(f"{T}.place.layout.xaxis.range")
    assert drawn == pytest.approx([whole[0] / 1e6, whole[1] / 1e6])


def test_moves_within_a_frame_are_drawn_once(page: Page, file: Path) -> None:
    opened(page, file)
    page.evaluate(
        f"(() => {{ const paint = {T}.paint.bind({T}); {T}.paints = 0;"
        f" {T}.paint = () => {{ {T}.paints += 1; return paint(); }}; }})()"
    )
    act(page, f"for (let i = 0; i < 10; i += 1) {T}.zoom(0.9)")
    assert page.evaluate(f"{T}.paints") == 1
    low, high = page.evaluate(f"{T}.view")
    assert page.evaluate(f"{T}.place.layout.xaxis.range") == pytest.approx([low / 1e6, high / 1e6])


def test_all_ranks_take_a_line_each(page: Page, file: Path) -> None:
    opened(page, file)
    page.evaluate(f"{T}.choose('all')")
    assert page.evaluate(f"{T}.rows.map(row => row.label)") == ["rank 0", "rank 1"]
    page.evaluate(f"{T}.choose('1')")
    assert "rank 1" in page.evaluate(f"{T}.rows[0].label")
    assert len(set(page.evaluate(f"{T}.rows.map(row => row.rank.rank)"))) == 1


def test_the_pointer_names_layer_and_operation_as_text(page: Page, file: Path) -> None:
    opened(page, file)
    page.evaluate(
        f"(() => {{ const i = {T}.rows.findIndex(row => row.key === 'compute'); const row = {T}.rows[i];"
        f" const span = row.lanes[0].spans.find(one => {T}.layer(row.rank.side, one.layer).includes('<img'));"
        f" {T}.place.emit('plotly_hover', {{ points: [{{ x: (span.start + 10) / 1e6, y: i }}],"
        " event: { clientX: 200, clientY: 200 } }); })()"
    )
    tip = page.evaluate("document.querySelector('.tip').textContent")
    assert "compute" in tip
    assert "<img src=x" in tip
    assert page.evaluate("document.querySelectorAll('.timeline img').length") == 0
    assert page.messages == []


def test_many_layers_and_ranks_draw_no_more_than_there_are_pixels(
    page: Page, timeline: StepTimeline, tmp_path: Path
) -> None:
    many = replace(timeline, ranks=[replace(timeline.ranks[i % 2], rank=i) for i in range(64)])
    opened(page, page_of(many, tmp_path))
    assert len(set(page.evaluate(f"{T}.rows.map(row => row.rank.rank)"))) == 3
    act(page, f"{T}.choose('all')")
    cells = page.evaluate(f"{T}.place.data[0].z.reduce((sum, row) => sum + row.length, 0)")
    assert page.evaluate(f"{T}.rows.length") == 64
    assert cells <= 64 * 2 * 1280
    assert page.messages == []


def test_two_steps_stand_above_each_other(page: Page, timeline: StepTimeline, tmp_path: Path) -> None:
    """A comparison has both sides on one scale; the worst is found on either."""
    slower = replace(timeline, duration_ns=2 * timeline.duration_ns)
    comparison = replace(run_comparison(), before_timeline=timeline, after_timeline=slower)
    text = RENDERERS["html"].render(build(comparison), RenderOptions(source=""))
    file = tmp_path / "compare.html"
    file.write_text(str(text), encoding="utf-8")
    opened(page, file)
    assert page.messages == []
    named = [label for label in page.evaluate(f"{T}.rows.map(row => row.label)") if "rank" in label]
    sides = [(word, rank) for word in ("before", "after") for rank in (0, 1)]
    assert len(named) == len(sides)
    assert all(f"{word} rank {rank}" in label for label, (word, rank) in zip(named, sides, strict=True))
    assert page.evaluate(f"{T}.total") == slower.duration_ns
    title = page.evaluate("document.querySelector('#timeline h3').textContent")
    assert title.strip().startswith("The longest wait is for")
