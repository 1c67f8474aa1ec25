"""Exports: the merged trace obeys its format and says what the analysis says; tables and metrics whole."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.cli import call
from support.results import HOSTILE, run_analysis, trace_analysis
from support.trace_events import broken_rules, nanoseconds, slices
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.open_metrics import open_metrics, tracker_scalars
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.exports.chakra import export_tables
from fsdp2prof.workflows.exports.perfetto import export_perfetto
from fsdp2prof.workflows.job.job_files import open_job

SKEWS = (0, 52_000, -9_000)
RANKS = range(3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = Schedule(roots=(transformer(3),))
    slow = schedule.scaled(1.5, "layers.1")
    return write_run(record(schedule, slow, schedule, skews=SKEWS), tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def analysis(run: Path) -> TraceAnalysis:
    return analyze_trace(open_job(run), workers=1)


@pytest.fixture(scope="module")
def events(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    target = tmp_path_factory.mktemp("merged") / "merged.json.gz"
    made = export_perfetto(open_job(run), target, workers=1)
    document = json.loads(gzip.decompress(target.read_bytes()))
    assert made.events == len(document["traceEvents"])
    assert made.ranks == 3
    written: list[dict[str, Any]] = document["traceEvents"]
    return written


def test_the_merged_trace_obeys_the_format(events: list[dict[str, Any]]) -> None:
    assert broken_rules(events) == []


def test_the_rules_are_rules(events: list[dict[str, Any]]) -> None:
    """What they are to find is found: overlap, a dangling arrow, a row without a name, no duration."""
    first = next(event for event in events if event["ph"] == "X" and event["dur"] > 1)
    overlapping = first | {"ts": first["ts"] + first["dur"] / 2}
    arrow = next(event for event in events if event["ph"] == "f")
    instant = next(event for event in events if event["ph"] == "i")
    assert len(broken_rules([*events, overlapping])) >= 1
    assert len(broken_rules([event for event in events if event is not arrow])) == 1
    assert len(broken_rules([*events, first | {"tid": 1 << 30}])) == 1
    assert len(broken_rules([*events, first | {"dur": -1}])) >= 1
    assert len(broken_rules([*events, instant | {"s": "x"}])) == 1


def test_every_recorded_event_is_there_once(run: Path, events: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        text = gzip.decompress((run / f"rank{rank}_trace.json.gz").read_bytes())
        recorded = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
        added = {"step", "exposed", "stall", "fsdp", "collective"}
        kept = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] not in added]
        assert len(kept) == len(recorded)
        assert sorted(e["name"] for e in kept) == sorted(e["name"] for e in recorded)
        durations = sorted(round(float(e["dur"]) * 1000) for e in recorded)
        assert sorted(nanoseconds(e["dur"]) for e in kept) == durations


def test_added_tracks_say_what_the_analysis_says(
    events: list[dict[str, Any]], analysis: TraceAnalysis
) -> None:
    for rank in RANKS:
        told = analysis.ranks[rank]
        exposed = sum(nanoseconds(one["dur"]) for one in slices(events, "exposed", rank))
        assert exposed == told.communication.exposed_ns
        steps = slices(events, "step", rank)
        assert [one["name"] for one in steps] == [f"step {step.step}" for step in told.steps]
        assert [nanoseconds(one["dur"]) for one in steps] == [step.duration_ns for step in told.steps]
        stalls = sum(nanoseconds(one["dur"]) for one in slices(events, "stall", rank))
        assert stalls == sum(row.stall_ns for row in analysis.prefetch if row.rank == rank)
        gathers = slices(events, "all-gather", rank)
        assert len(gathers) == sum(
            row.count for row in analysis.groups if row.rank == rank and row.op == "all_gather"
        )
        assert {one["args"]["layer"] for one in gathers} == {"(root)", "layers.0", "layers.1", "layers.2"}


def test_collectives_end_at_one_instant_on_all_ranks(events: list[dict[str, Any]]) -> None:
    ends = [
        [nanoseconds(one["ts"] + one["dur"]) for one in slices(events, "reduce-scatter", rank)]
        for rank in RANKS
    ]
    assert ends[0]
    assert ends[0] == ends[1] == ends[2]


def test_an_arrow_joins_the_ranks_of_every_matched_collective(
    events: list[dict[str, Any]], analysis: TraceAnalysis
) -> None:
    points = [event for event in events if event["ph"] in "stf" and event["cat"] == "collective"]
    arrows = {event["id"] for event in points}
    assert len(arrows) == analysis.cross_rank.matched
    assert all({e["pid"] for e in points if e["id"] == arrow} == {0, 1, 2} for arrow in arrows)
    behind = "reduce-scatter layers.1"
    last = {event["pid"] for event in points if event["ph"] == "f" and event["name"] == behind}
    assert last == {1}, "it follows the slow rank's slow layer"


def test_findings_are_instants_on_the_rank_they_are_about(
    events: list[dict[str, Any]], analysis: TraceAnalysis
) -> None:
    instants = [event for event in events if event["ph"] == "i"]
    assert sorted(event["args"]["message"] for event in instants) == sorted(
        finding.message for finding in analysis.findings
    )


def test_one_rank_alone_and_plain_json(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.json"
    made = export_perfetto(open_job(run, ranks={2}), target, workers=1)
    events = json.loads(target.read_text())["traceEvents"]
    assert broken_rules(events) == []
    assert made.arrows == 0
    assert {event["pid"] for event in events} == {2}


def test_a_real_gpu_trace_obeys_the_format(real_data: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged.json"
    made = export_perfetto(open_job(real_data / "traces" / "ddp4-mi300", ranks={0, 1}), target)
    assert broken_rules_fast(json.loads(target.read_text())["traceEvents"]) == []
    assert made.arrows > 0


def broken_rules_fast(events: list[dict[str, Any]]) -> list[str]:
    """All rules, arrows of launches left out: there are tens of thousands."""
    return broken_rules([event for event in events if event.get("cat") != "launch"])


# Tables and metrics.


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_every_table_becomes_a_file_with_all_its_rows(kind: Any, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    analysis = run_analysis(hostile=HOSTILE)
    tables = build(analysis).tables()
    made = export_tables(analysis, tmp_path / "tables", kind)
    assert made == {name: len(table.rows) for name, table in tables.items()}
    for name, table in tables.items():
        names = [column.name for column in table.raw()[0]]
        file = tmp_path / "tables" / f"{name}.{kind}"
        if kind == "csv":
            header, *rows = csv.reader(file.read_text().splitlines())
            assert header == names
            assert len(rows) == len(table.rows)
        else:
            frame = pd.read_parquet(file)
            assert list(frame.columns) == names
            assert len(frame) == len(table.rows)


def test_metrics_are_open_metrics_and_hold_the_totals() -> None:
    analysis = run_analysis(hostile=HOSTILE)
    assert analysis.trace is not None
    text = open_metrics(analysis)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    step = {sample.labels["kind"]: sample.value for sample in families["fsdp2prof_step_seconds"].samples}
    assert analysis.trace.totals.step_ns is not None
    assert step["traced"] == analysis.trace.totals.step_ns / 1e9
    parts = sum(sample.value for sample in families["fsdp2prof_step_part_seconds"].samples)
    assert parts == pytest.approx(step["traced"])
    assert families["fsdp2prof_step_part_seconds"].unit == "seconds"
    layers = {sample.labels["layer"] for sample in families["fsdp2prof_layer_exposed_seconds"].samples}
    assert HOSTILE.replace("\x1b", "\\x1b") in layers
    assert families["fsdp2prof_peak_allocated_bytes"].samples
    assert text.endswith("# EOF\n")


def test_unknown_numbers_are_no_metrics() -> None:
    analysis = trace_analysis()
    unknown = replace(analysis, totals=replace(analysis.totals, mfu=None, overlap_frac=None))
    scalars = tracker_scalars(unknown)
    assert not any("mfu" in name or "overlap" in name for name in scalars)
    assert scalars["fsdp2prof/exposed_ratio"] == analysis.totals.exposed_frac


# Commands.


def test_the_commands_write_and_refuse(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, folder = tmp_path / "merged.json.gz", tmp_path / "tables"
    assert call(capfd, "export", "perfetto", run, "-o", target, "-q").code == 0
    call(capfd, "export", "perfetto", run, "-o", target).refused("exists already")
    call(capfd, "export", "perfetto", run, "-o", tmp_path / "merged.txt").refused(".json.gz", code=2)
    assert call(capfd, "export", "csv", run, "-o", folder).code == 0
    assert (folder / "by_layer.csv").is_file()
    call(capfd, "export", "csv", run, "-o", folder).refused("add -f")
    metrics = call(capfd, "export", "metrics", run)
    assert metrics.code == 0
    assert metrics.out.endswith("# EOF\n")
