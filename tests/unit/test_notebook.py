"""What results offer at a prompt: exact data frames, figures, and HTML that is safe among other HTML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pandas as pd
import pytest
from support.documents import KERNEL, Said, document
from support.results import run_analysis, trial_sample
from synthetic import Schedule, record, transformer, write_run

import fsdp2prof
from fsdp2prof.errors import UsageError
from fsdp2prof.reporters import documents
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results import Shown


class Result(Said, Shown):
    """A result whose document is the one with every kind of block."""


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(documents.BUILDERS, Result, lambda _: document())


def test_data_frames_are_raw_and_exact() -> None:
    frames = Result().to_pandas()
    assert list(frames) == ["groups", "by_layer"]
    layers = frames["by_layer"]
    assert len(layers) == 12
    assert layers["kernel"][0] == KERNEL
    assert layers["exposed_ns"].dtype == "Int64"
    assert layers["fqn"].isna().sum() == 1
    assert layers["fqn"][0] == ""
    assert frames["groups"]["bytes"].tolist() == [pd.NA, 5]


def test_figures_are_plotly_figures_with_their_title() -> None:
    figures = Result().figures()
    assert list(figures) == ["course"]
    assert figures["course"].layout.title.text == "Memory over time"
    assert list(figures["course"].data[0].x) == [1, 2]


def test_one_table_and_one_figure_by_name() -> None:
    result = Result()
    assert result.frame("by_layer").equals(result.to_pandas()["by_layer"])
    assert result.figure("course").layout.title.text == "Memory over time"
    with pytest.raises(UsageError, match="no table 'layers' here: there are groups, by_layer"):
        result.frame("layers")
    with pytest.raises(UsageError, match="no figure 'by_layer' here: there are course"):
        result.figure("by_layer")


def test_html_of_a_notebook_has_no_script_and_escapes() -> None:
    html = Result()._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert "data-figure" not in html
    assert "vectorized_elementwise_kernel" in html
    assert html.count(">Communication by layer<") == 1


def test_a_recording_shows_its_first_screen(tmp_path: Path) -> None:
    """What is said first, and the timeline in a frame of its own, whose scripts reach nothing else."""
    schedule = Schedule(roots=(transformer(2),), shard=2)
    run = write_run(record(schedule, schedule), tmp_path / "run")
    html = fsdp2prof.load(run)._repr_html_()
    (frame,) = re.findall(r'<iframe [^>]*sandbox="allow-scripts allow-downloads" srcdoc="([^"]*)"', html)
    around = html.replace(frame, "")
    for line in fsdp2prof.analyze_trace(run).verdict:
        assert escape(line) in around or line in around
    assert "<script" not in around
    assert "Communication by layer" not in around, "no table of the terminal's"
    page = unescape(frame)
    assert "data-timeline" in page
    assert page.count("<section") == 1


def test_a_trial_shows_what_each_setting_gained() -> None:
    alone, in_a_run = trial_sample(), replace(run_analysis(), trial=trial_sample())
    for result in (alone, in_a_run):
        html = result._repr_html_()
        assert "Measured in the running job" in html
        assert "reshard=never" in html
    frame = in_a_run.to_pandas()["tried"]
    assert frame["gained_ns"].tolist() == [5e6]


def test_an_agent_gets_the_trial_of_a_run() -> None:
    pytest.importorskip("anyio", reason="mcp is not installed")
    from fsdp2prof.agents.calls import reduced, summary_keys

    document = json.loads(
        str(RENDERERS["json"].render(build(replace(run_analysis(), trial=trial_sample())), RenderOptions()))
    )
    (tried,) = reduced(document, summary_keys(document), rows=20)["trial"]["tried"]
    assert (tried["change"], tried["outcome"]) == ("reshard=never", "faster")
