"""The short form: one screen, whatever the size of the run; the rest by ``--full`` and ``--section``."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.large_run import large_run
from support.results import memory_analysis, run_analysis, trace_analysis

from fsdp2prof.errors import UsageError
from fsdp2prof.reporters.document import Column, Document, Section, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.ledger import LedgerRest


def rendered(result: object, form: str = "text", **options: object) -> str:
    text = RENDERERS[form].render(build(result), RenderOptions(width=100, **options))  # type: ignore[arg-type]
    assert isinstance(text, str)
    return text


def layer_rows(text: str) -> list[str]:
    """Return the rows of the communication's table."""
    _, _, table = text.partition("Communication by layer")
    return [
        line for line in table.partition("\n\n")[0].splitlines() if re.search(r"all-gather|reduce-", line)
    ]


def test_ten_layers_are_on_a_crowded_screen() -> None:
    run = large_run(2)
    assert run.trace is not None
    rows = [
        replace(run.trace.by_layer_folded[0], fqn=f"tower_{i}.body", exposed_ns=1e7 - i) for i in range(30)
    ]
    finding = Finding(id="a", severity="low", fqn=None, message="A long finding. " * 9, change="Do this.")
    crowded = replace(
        run, trace=replace(run.trace, by_layer_folded=rows), findings=[finding] * 9, verdict=["A line."] * 6
    )
    text = rendered(crowded, brief=True, source="runs/large")
    assert len(text.splitlines()) <= 60
    assert len(layer_rows(text)) == 10


@pytest.mark.parametrize("ranks", [2, 64, 256])
def test_a_run_of_any_size_is_one_screen(ranks: int) -> None:
    run = large_run(ranks)
    text = rendered(run, brief=True, source="runs/large")
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 100
    for heading in ("Where the step goes", "Communication by layer", "Memory at the peak", "Next"):
        assert heading in text
    assert run.trace is not None
    assert len(layer_rows(text)) == min(10, len(run.trace.by_layer_folded)) >= 3
    assert run.memory is not None
    assert len(rendered(run.trace, brief=True).splitlines()) <= 40
    assert len(rendered(run.memory, brief=True).splitlines()) <= 40


def test_a_long_result_gives_rows_up_before_its_sections() -> None:
    rows = [[f"layers.{i}.attention_norm.weight"] for i in range(50)]
    column = Column(name="fqn", label="layer", kind="name")
    table = Table(name="first", title="First", columns=[column], rows=rows)
    blocks = [table, replace(table, name="second", title="Second")]
    sections = [Section(anchor=block.name, title=block.title, blocks=[block]) for block in blocks]
    hidden = replace(sections[0], anchor="hidden", title="Hidden", detail=True)
    made = Document(title="Some", sections=[*sections, hidden], result=None)
    text = str(RENDERERS["text"].render(made, RenderOptions(width=100, brief=True)))
    assert 38 <= len(text.splitlines()) <= 40
    assert "First" in text
    assert "Second" in text
    assert "one part: hidden" in text


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("layers.0.attention_norm.weight", ["layers.0.attention_norm.weight"]),
        ("layers.0.attention.parametrizations.weight", ["layers.0.attention.parametrizations.", "weight"]),
    ],
)
def test_a_name_breaks_after_a_dot_and_only_if_no_line_can_hold_it(name: str, lines: list[str]) -> None:
    """40 characters: the columns on the right are left out first."""
    columns = [
        Column(name="fqn", label="layer", kind="name"),
        *(Column(name=n * 9, label=n * 9) for n in "ab"),
    ]
    table = Table(name="one", title="One", columns=columns, rows=[[name, "1", "2"]])
    section = Section(anchor="one", title="One", blocks=[table])
    made = Document(title="Some", sections=[section], result=None)
    text = str(RENDERERS["text"].render(made, RenderOptions(width=40)))
    assert [line.split()[0] for line in text.splitlines() if "layers.0" in line or "weight" in line] == lines


def test_the_rows_of_a_step_are_never_left_out_and_sum_to_it() -> None:
    """At 40 lines nothing but rows could be spared."""
    trace = large_run(64).trace
    assert trace is not None
    assert trace.ledger is not None
    names = [f"cause {i}" for i in range(12)]
    entry = trace.ledger.entries[0]
    entries = [replace(entry, title=name, told=i < 8, ns=1e6) for i, name in enumerate(names)]
    rest = LedgerRest(entries=4, ns=4e6, frac=0.04)
    ledger = replace(trace.ledger, entries=entries, rest=rest)
    text = rendered(replace(trace, ledger=ledger, verdict=["A long verdict."] * 12), brief=True)
    assert len(text.splitlines()) <= 40
    assert [name for name in names if name in text] == names[:8]
    assert "4 other causes" in text


def test_the_short_form_names_what_the_long_one_has() -> None:
    run = run_analysis()
    brief, full = rendered(run, brief=True, source="runs/a"), rendered(run, source="runs/a")
    assert len(brief.splitlines()) < len(full.splitlines())
    assert "fsdp2prof report runs/a" in brief
    names = [section.anchor for section in build(run).sections]
    for name in names:
        alone = rendered(run, section=name)
        assert len(alone.splitlines()) < len(full.splitlines())
    with pytest.raises(UsageError, match=r"--section nothing: the sections here are .*communication"):
        rendered(run, section="nothing")


@pytest.mark.parametrize("told", [True, False])
def test_a_late_rank_is_named_where_the_ledger_names_it(told: bool) -> None:
    run = run_analysis()
    assert run.trace is not None
    assert run.trace.ledger is not None
    entry = replace(run.trace.ledger.entries[0], cause="late_rank", rank=1, told=told, ns=2e6)
    trace = replace(run.trace, ledger=replace(run.trace.ledger, entries=[entry]))
    text = rendered(replace(run, trace=trace), brief=True)
    assert ("rank 1 is late: 2.00 ms of a mean step" in text) == told


def test_markdown_is_tables_without_html() -> None:
    for result in (run_analysis(hostile="<img src=x>|a"), trace_analysis(), memory_analysis()):
        text = rendered(result, "md", brief=True)
        assert text.startswith("## ")
        assert "\n| --" in text
        assert "<img" not in text
        widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| --")}
        assert all(width > 2 for width in widths)


def test_what_is_left_out_is_counted() -> None:
    run = run_analysis()
    assert run.trace is not None
    found = [
        Finding(id=f"x{i}", severity="medium", message=f"Loss {i}.", fqn=None, evidence={}) for i in range(6)
    ]
    run = replace(run, trace=replace(run.trace, findings=found), findings=found)
    assert "and 2 more findings; all with --full" in rendered(run, "md", brief=True)
    assert "all with --full" not in rendered(run, "md")
    text = rendered(run, brief=True)
    assert "more findings; all with -v" in text
    assert "--full" not in text, "one way to see more"
