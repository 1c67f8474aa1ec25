"""Text at every width: numbers whole or their column named, the first column always, no code unasked."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import document, layer_table

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Column, Document, Facts, Findings, Section, Sentences, Table
from fsdp2prof.reporters.formats import show_amount
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.reporters.renderers.terminal import Need, fit
from fsdp2prof.results.finding import Finding

WIDTHS = [40, 80, 118, 200]


def text(width: int = 118, **options: Any) -> str:
    rendered = RENDERERS["text"].render(document(), RenderOptions(width=width, **options))
    assert isinstance(rendered, str)
    return rendered


def header(column: Column) -> str:
    return column.label.replace("\n", " ")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verbose", [False, True])
def test_every_number_is_whole_or_its_column_is_named(width: int, verbose: bool) -> None:
    shown = text(width, verbose=verbose)
    assert max(map(len, shown.splitlines())) <= width
    words = shown.split()
    flat = " ".join(words)
    dropped = flat.partition("not shown at this width: ")[2].partition("; widen")[0].split(", ")
    table = document().tables()["by_layer"]
    rows = table.rows if verbose else table.rows[:5]
    numbers = [i for i, column in enumerate(table.columns) if column.kind == "number"]
    for i in numbers:
        column = table.columns[i]
        for row in rows:
            assert column.show(row[i]) in words or header(column) in dropped, (header(column), row[i])
    assert {header(table.columns[i]) for i in numbers} <= set(dropped) or width > 40


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_column_never_goes(width: int) -> None:
    shown = text(width)
    assert "(root)" in shown
    assert "(no layer)" in shown
    assert "layers.0" in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_facts_and_sentences_are_never_cut(width: int) -> None:
    word = "a_word_that_is_longer_than_the_narrowest_terminal_is_wide"
    blocks: list[Block] = [
        Facts(title="facts", pairs={"name": word}),
        Findings(title="findings", findings=[Finding(id="a", severity="low", fqn=word, message=word)]),
        Sentences(title="list", lines=[word], style="list"),
        Sentences(title="plain", lines=[word]),
    ]
    section = Section(anchor="a", title="s", blocks=blocks)
    made = Document(title=word, verdict=[word], sections=[section], warnings=[word], result=None)
    shown = RENDERERS["text"].render(made, RenderOptions(width=width))
    assert isinstance(shown, str)
    assert "".join(shown.split()).count(word) == 8


def test_a_wide_screen_has_room_for_all() -> None:
    assert "not shown at this width" not in text(200)
    assert "vectorized_elementwise_kernel" in text(200)
    assert "at::native" not in text(200)


def test_rows_left_out_are_counted_and_shown_with_v() -> None:
    assert "and 7 more rows; all with -v" in text()
    assert "layers.7" not in text()
    assert "layers.7" in text(verbose=True)


def test_the_verdict_comes_first_and_the_warnings_last() -> None:
    lines = text().splitlines()
    assert lines[1] == "Communication bounds the step."
    order = [
        text().index(part) for part in ("Try prefetching", "mean step", "high", "by layer", "Why", "Warnings")
    ]
    assert order == sorted(order)


def test_no_escape_code_without_colour_and_none_from_names_ever() -> None:
    assert "\x1b" not in text()
    coloured = text(colour=True)
    assert "\x1b[" in coloured
    assert "\x1b[31m:" not in coloured
    assert "\\x1b[31m" in coloured


def test_a_title_that_repeats_its_section_stands_once() -> None:
    assert text().count("Communication by layer") == 1


def test_long_names_are_folded_and_then_shortened_in_the_middle() -> None:
    long = "Q" * 100 + "Z" * 100
    table = layer_table([long])
    made = Document(title="t", sections=[Section(anchor="a", title="s", blocks=[table])], result=None)
    short = RENDERERS["text"].render(made, RenderOptions(width=80))
    whole = RENDERERS["text"].render(made, RenderOptions(width=80, verbose=True))
    assert isinstance(short, str)
    assert isinstance(whole, str)
    assert "QQQ…ZZZ" in short.replace("\n", "")
    assert (whole.count("Q"), whole.count("Z")) == (100, 100)
    assert short.count("Q") < 100


def test_room_goes_to_small_wishes_first_and_to_bars_last() -> None:
    bar = Need(natural=30, least=6, patient=True)
    assert fit([Need(60, 16), Need(10, 10), bar], 60) == {0: 40, 1: 10, 2: 6}
    assert fit([Need(60, 16), Need(24, 16), bar], 60) == {0: 26, 1: 24, 2: 6}
    assert fit([Need(20, 16), Need(10, 10), bar], 80) == {0: 20, 1: 10, 2: 30}
    assert fit([Need(20, 16), Need(10, 10), bar], 28) == {0: 16, 1: 10}
    assert fit([Need(90, 50), Need(10, 10)], 40) == {0: 40}


def test_columns_without_a_value_go_before_those_with_one() -> None:
    empty = Need(10, 10, empty=True)
    assert list(fit([Need(20, 20), empty, Need(20, 20), empty, Need(20, 20)], 65)) == [0, 2, 4]
    assert list(fit([Need(20, 20), empty, Need(20, 20), empty, Need(20, 20)], 80)) == [0, 1, 2, 4]
    assert list(fit([Need(20, 20), empty, Need(20, 20), empty, Need(20, 20)], 45)) == [0, 2]
    assert list(fit([Need(20, 20), empty], 40)) == [0, 1]  # what fits stays


def test_words_wrap_and_are_never_cut() -> None:
    words = " ".join(f"word{i:02d}" for i in range(60))
    columns = [c.text("id"), c.prose("why")]
    table = Table(name="t", title="T", columns=columns, rows=[["a", words]])
    section = Section(anchor="a", title="s", blocks=[table])
    made = Document(title="t", verdict=[], sections=[section], warnings=[], result=None)
    for width in (30, 80, 200):
        text = RENDERERS["text"].render(made, RenderOptions(width=width))
        assert isinstance(text, str)
        assert re.findall(r"word\d\d", text) == words.split()


KINDS = st.sampled_from(["text", "name", "number", "bar"])
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=90)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    kinds: list[Any] = draw(st.lists(KINDS, min_size=1, max_size=14))
    values = {
        "text": st.text("abcxyz", min_size=1, max_size=20),
        "name": NAMES,
        "number": st.integers(-(10**12), 10**12),
        "bar": st.floats(0, 1),
    }
    columns = [Column(name=f"c{i}", label=f"label{i}", kind=kind, show=str) for i, kind in enumerate(kinds)]
    rows = draw(st.lists(st.tuples(*(values[kind] for kind in kinds)), min_size=1, max_size=4))
    return Table(name="t", title="t", columns=columns, rows=rows)


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(40, 200))
def test_of_any_table_numbers_are_whole_or_their_column_is_named(table: Table, width: int) -> None:
    made = Document(title="t", sections=[Section(anchor="t", title="t", blocks=[table])], result=None)
    shown = RENDERERS["text"].render(made, RenderOptions(width=width))
    assert isinstance(shown, str)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    dropped = " ".join(" ".join(lines).split()).partition("not shown at this width: ")[2]
    named = dropped.partition("; widen")[0].split(", ")
    assert table.columns[0].label not in named
    for i, column in enumerate(table.columns):
        assert column.label in named or column.label in shown
        if column.kind == "number":
            assert column.label in named or all(str(row[i]) in shown.split() for row in table.rows)


def test_three_figures_at_every_size() -> None:
    values = [0.5881, 0.87, 0.99951, 9.996, 42.13, 99.96, 125.0, 1250.4, None]
    expected = ["0.588", "0.870", "1.00", "10.0", "42.1", "100", "125", "1,250", "-"]
    assert [show_amount(value) for value in values] == expected
