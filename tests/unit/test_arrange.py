"""Tables sorted by a column and cut: numbers largest first, names as people count, unknown last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli import call
from support.results import trace_analysis
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.errors import UsageError
from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.arrange import arranged
from fsdp2prof.reporters.document import Document, Section, Table
from fsdp2prof.reporters.documents import build


def table(*rows: tuple[str | None, int | None, str], limit: int | None = None) -> Document:
    columns = [c.layer(), c.number("size_bytes", "size\nMiB"), c.text("word")]
    made = Table(name="one", title="One", columns=columns, rows=rows, limit=limit)
    return Document(title="x", sections=[Section(anchor="a", title="a", blocks=[made])], result=None)


ROWS = (("layers.10", 5, "b"), (None, None, "a10"), ("layers.9", 70, "a9"), ("", 5, "c"))


def shown(sort: str | None, top: int | None = None) -> list[object]:
    made = arranged(table(*ROWS, limit=2), sort, top).tables()["one"]
    return [row[0] for row in made.rows]


def test_numbers_come_largest_first_and_the_unknown_last_either_way() -> None:
    assert shown("size_bytes") == ["layers.9", "layers.10", "", None]
    assert shown("size_bytes:asc") == ["layers.10", "", "layers.9", None]
    assert shown("size MiB") == shown("size_bytes"), "the header names it, too"


def test_layers_and_words_come_as_people_count() -> None:
    assert shown("layer") == [None, "", "layers.9", "layers.10"]
    assert shown("word") == ["layers.9", None, "layers.10", ""]
    assert shown("word:desc") == ["", "layers.10", None, "layers.9"]


def test_top_leaves_rows_out_and_says_so() -> None:
    made = arranged(table(*ROWS, limit=2), "size_bytes", 3).tables()["one"]
    assert len(made.rows) == 3
    assert made.limit is None, "what was asked for is all shown"
    assert made.remarks[0] == "1 more row left out."
    assert arranged(table(*ROWS), None, 9).tables()["one"].remarks == []


def test_both_forms_of_a_folded_table_are_sorted() -> None:
    made = arranged(build(trace_analysis()), "total_ns:asc", None)
    blocks = [block for section in made.sections for block in section.blocks if isinstance(block, Table)]
    (by_layer,) = (block for block in blocks if block.name == "by_layer")
    assert by_layer.unabridged is not None
    for one in (by_layer, by_layer.unabridged):
        at = [column.name for column in one.columns].index("total_ns")
        values = [float(str(row[at])) for row in one.rows]
        assert values == sorted(values)


def test_a_column_that_no_table_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--sort nix: no table has such a column; there is fqn, size_bytes"):
        arranged(table(*ROWS), "nix", None)


def test_the_command_line_takes_them(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = Schedule(roots=(transformer(3),), shard=2)
    run = write_run(record(schedule, schedule), tmp_path / "run")
    trace = ("analyze", "trace", run)
    options = ("--layer", "layers.1", "--rank", "1", "--step", "4", "--format", "json")
    found = json.loads(call(capfd, *trace, *options).out)
    assert {row["fqn"] for row in found["by_layer"]} == {"layers.1"}
    assert {(row["rank"], row["step"]) for row in found["groups"]} == {(1, 4)}
    assert found["focus"] == {"layers": ["layers.1"], "ranks": [1], "steps": [4]}
    text = call(capfd, *trace, "--layer", "layers.1", "--top", "1").out
    assert "only layers layers.1" in text
    assert "more rows left out" in text
    short = call(capfd, *trace, "--sort", "total_ns", "--top", "4").out
    assert len(short.splitlines()) <= 40, "options of a table leave the short form"
    shown = [line for line in short.splitlines() if " forward " in line or " backward " in line]
    assert len(shown) == 4, "the table that has the column, as long as asked for"
    assert short.count("─" * 20 + "\n") == 1
    assert len(call(capfd, *trace, "--sort", "total_ns", "--full").out.splitlines()) > 60
    groups = ("--format", "csv", "--table", "groups")
    rows = call(capfd, *trace, *groups, "--sort", "layer:desc", "--top", "2").out
    assert [line.split(",")[2] for line in rows.splitlines()[1:]] == ["layers.2", "layers.2"]
    call(capfd, *trace, "--top", "3", "--format", "json").refused("--top", "json", code=2)
    call(capfd, *trace, "--critical-path", "--layer", "x").refused("--layer", code=2)
    call(capfd, *trace, "--layer", "nix").refused("no layer has such a name", code=2)
    part = tmp_path / "part.json"
    assert call(capfd, *trace, "--layer", "layers.1", "-o", part).code == 0
    call(capfd, "compare", part, run).refused("holds only layers layers.1", "--layer")
