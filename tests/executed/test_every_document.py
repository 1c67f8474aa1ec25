"""Every kind of result in every format: fits its width, loses no number, and its tables are data."""

from __future__ import annotations

import csv
import io
import re
from functools import cache

import pytest
from support.samples import SAMPLES, sample

from fsdp2prof.reporters.document import Document, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.notebook import to_pandas
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.vocabulary import printable


@cache
def document(name: str) -> Document:
    return build(sample(name))


def rendered(name: str, form: str, **options: object) -> str:
    text = RENDERERS[form].render(document(name), RenderOptions(**options))  # type: ignore[arg-type]
    assert isinstance(text, str)
    return text


def shown_tables(made: Document) -> list[Table]:
    return [block for section in made.sections for block in section.blocks if isinstance(block, Table)]


@pytest.mark.parametrize("width", [40, 80, 118, 200])
@pytest.mark.parametrize("name", SAMPLES)
def test_text_fits_and_no_number_is_cut(name: str, width: int) -> None:
    text = rendered(name, "text", width=width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    named = {
        label
        for said in re.findall("not shown at this width: (.*?); widen", flat)
        for label in said.split(", ")
    }
    for table in shown_tables(document(name)):
        for i, column in enumerate(table.columns):
            label = " ".join(column.label.replace("-\n", "-").split())
            for row in table.rows[: table.limit]:
                if column.kind == "number" and label not in named:
                    assert printable(column.text(row[i])) in flat


@pytest.mark.parametrize("name", SAMPLES)
def test_the_verdict_opens_the_text(name: str) -> None:
    made = document(name)
    flat = " ".join(rendered(name, "text", width=80).split())
    heading = " ".join(f"{made.title} {made.subtitle}".split())
    assert flat.startswith(printable(" ".join([heading, *made.verdict])))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_table_is_data(name: str) -> None:
    tables = document(name).tables()
    frames = to_pandas(sample(name))
    assert list(frames) == list(tables)
    for key, table in tables.items():
        written = list(csv.reader(io.StringIO(rendered(name, "csv", table=key))))
        columns, rows = table.raw()
        assert written[0] == [column.name for column in columns] == list(frames[key].columns)
        assert len(set(written[0])) == len(written[0])
        assert len(written) - 1 == len(rows) == len(frames[key])
        for i, column in enumerate(columns):
            values = [row[i] for row in rows]
            numbers = [value for value in values if isinstance(value, int)]
            if column.kind == "number" and len(numbers) + values.count(None) == len(values):
                exact = sum(numbers)
                assert sum(int(line[i]) for line in written[1:] if line[i]) == exact
                assert int(frames[key].iloc[:, i].dropna().sum()) == exact


@pytest.mark.parametrize("name", SAMPLES)
def test_every_section_and_table_is_on_the_page(name: str) -> None:
    page = rendered(name, "html")
    for section in document(name).sections:
        place = '<details class="part"' if section.detail else "<section"
        assert f'{place} id="{section.anchor}">' in page
    assert page.count("<table>") >= len(shown_tables(document(name)))
    assert page.count("data-figure=") == len(document(name).charts())


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", SAMPLES)
def test_every_result_is_one_screen_by_default(name: str, width: int) -> None:
    made, text = document(name), rendered(name, "text", width=width, brief=True)
    assert len(text.splitlines()) <= made.brief_lines <= (60 if name == "run_analysis" else 40)
    flat = " ".join(text.split())
    assert all(printable(" ".join(line.split())) in flat for line in made.verdict)
