"""A recorded run from Python, and that it says what the command says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import call

import fsdp2prof
from fsdp2prof.errors import InputError


@pytest.fixture(scope="module")
def run(recorded: Callable[..., Any]) -> Path:
    made = recorded("train_tiny_fsdp2", 2)
    path = made.run
    assert isinstance(path, Path)
    return path


def test_a_run_is_opened_at_once_and_read_when_asked(run: Path) -> None:
    opened = fsdp2prof.load(run)
    assert repr(opened) == f"fsdp2prof.load({str(run)!r})"
    assert not {"run", "trace", "memory"} & set(vars(opened))
    assert opened.run is not None
    assert opened.run.world_size == 2
    assert {"run", "trace", "memory"} & set(vars(opened)) == {"run"}
    assert opened.trace is not None
    assert [rank.rank for rank in opened.trace.result.ranks] == [0, 1]
    assert opened.trace is opened.trace
    assert opened.memory is not None
    assert opened.memory.result.ranks[0].peak.allocated_bytes > 0


def test_tables_of_an_opened_run_are_data_frames(run: Path) -> None:
    opened = fsdp2prof.load(run)
    assert opened.trace is not None
    assert opened.memory is not None
    layers = opened.trace.by_layer.sort_values("exposed_ns", ascending=False)
    rows = opened.trace.result.by_layer
    assert layers["exposed_ns"].iloc[0] == max(row.exposed_ns for row in rows)
    assert len(layers) == len(rows)
    assert {"by_layer", "verdict", "figure", "result"} <= set(dir(opened.trace))
    assert opened.trace.verdict == opened.trace.result.verdict
    assert opened.trace.figure("timeline").data
    assert opened.trace.verdict[0][:12] in opened.trace._repr_html_()
    peak = opened.memory.result.ranks[0].peak
    assert set(opened.memory.by_category.columns) >= {"category"}
    assert repr(opened.memory).startswith("<MemoryAnalysis: ")
    assert peak.allocated_bytes in set(opened.memory.ranks["allocated_bytes"])
    with pytest.raises(AttributeError, match="by_layers"):
        _ = opened.trace.by_layers


def test_a_choice_of_ranks_and_a_single_file(run: Path) -> None:
    assert [rank.rank for rank in fsdp2prof.analyze_memory(run, ranks=[1]).ranks] == [1]
    trace = next(run.rglob("trace.json.gz"))
    opened = fsdp2prof.load(trace)
    assert opened.run is None
    assert opened.trace is not None
    with pytest.raises(InputError, match="no such file"):
        fsdp2prof.load(run / "nowhere")


def test_python_and_the_command_say_the_same(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = json.loads(call(capfd, "analyze", "run", run, "--format", "json").out)
    assert json.loads(msgspec.json.encode(fsdp2prof.analyze_run(run))) == said


def test_nothing_changed_from_a_run_to_itself(run: Path) -> None:
    compared = fsdp2prof.compare(run, run)
    assert compared.communication_equal
    assert compared.step is not None
    assert compared.step.delta_ns == 0


def test_tables_hold_what_the_result_says(run: Path) -> None:
    result = fsdp2prof.analyze_trace(run)
    groups = result.to_pandas()["groups"]
    assert len(groups) == len(result.groups)
    assert int(groups["exposed_ns"].sum()) == sum(row.exposed_ns for row in result.groups)
    assert all(figure.data for figure in result.figures().values())
    assert result.verdict[0][:12] in result._repr_html_()


def test_the_documentation_runs_as_it_stands(run: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    analyse, estimate, notebook = (block.replace(".show()", "") for block in blocks[:3])
    for name in ("first", "second"):
        analyse = analyse.replace(f'"runs/{name}"', repr(str(run)))
    names: dict[str, object] = {}
    for block in (analyse, estimate.replace("llama3-8b", "gpt2").replace("8192", "64"), notebook):
        exec(block, names)
    assert isinstance(names["trace"], fsdp2prof.TraceAnalysis)
    assert isinstance(names["memory"], fsdp2prof.MemoryEstimate)
