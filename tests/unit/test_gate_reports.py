"""What a gate leaves behind: Markdown and JUnit that say what passed, what failed and by how much."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.cli import call
from support.results import trace_analysis
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.analyzers.fail_on import check, judge, parse
from fsdp2prof.reporters.open_metrics import junit, markdown

CONDITIONS = [parse(text) for text in ("exposed_frac>0", "exposed_frac>1", "step_time_ms<0")]


def test_conditions_that_do_not_hold_are_judged_too() -> None:
    outcomes = judge(CONDITIONS, trace_analysis())
    assert [outcome.ranks > 0 for outcome in outcomes] == [True, False, False]
    assert outcomes[0].value == outcomes[1].value, "the worst of all ranks, held or not"
    assert check(CONDITIONS, trace_analysis()) == outcomes[:1]


def test_markdown_has_a_row_a_condition_and_no_html_of_a_name() -> None:
    outcomes = judge(CONDITIONS, trace_analysis())
    text = markdown(outcomes, ["The worst is `<img src=x>` [here](http://example.invalid)."])
    assert text.startswith("### fsdp2prof: 1 of 3 conditions failed\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == ["❌", "✅", "✅"]
    assert "`exposed_frac>1`" in rows[2]
    assert "<img" not in text
    assert "[here]" not in text.replace("\\[", "")
    assert markdown(outcomes[1:]).startswith("### fsdp2prof: all 2 conditions are met\n")


def test_junit_counts_what_failed_and_says_the_value() -> None:
    outcomes = judge(CONDITIONS, trace_analysis())
    suite = ElementTree.fromstring(junit(outcomes))[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert [case.get("name") for case in suite] == ["exposed_frac>0", "exposed_frac>1", "step_time_ms<0"]
    (failure,) = suite.iter("failure")
    assert failure.get("message") == str(outcomes[0])


@pytest.mark.parametrize(
    ("condition", "code", "failures"), [("exposed_frac>0", 3, "1"), ("exposed_frac>1", 0, "0")]
)
def test_the_command_writes_both_whether_it_passes_or_not(
    condition: str, code: int, failures: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(record(Schedule(roots=(transformer(1),), steps=1)), tmp_path / "run")
    summary, report = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.write_text("before\n")
    given: list[str | Path] = ["--fail-on", condition, "--gate-markdown", summary, "--gate-junit", report]
    assert call(capfd, "analyze", "trace", run, *given).code == code
    assert summary.read_text().startswith("before\n### fsdp2prof")
    assert ElementTree.parse(report).getroot()[0].get("failures") == failures


def test_without_a_condition_there_is_nothing_to_tell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = call(capfd, "analyze", "trace", tmp_path, "--gate-junit", tmp_path / "x.xml")
    ended.refused("--gate-junit", "--fail-on", code=2)
