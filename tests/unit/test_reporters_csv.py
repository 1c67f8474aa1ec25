"""CSV: flat, raw units, empty where unknown, inert in a spreadsheet."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from support.results import MIB, memory_analysis, trace_analysis

from fsdp2prof.reporters.csvreport import render_memory, render_trace


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_groups_in_raw_units() -> None:
    found = rows(render_trace(trace_analysis()))
    assert len(found) == 20
    assert found[0]["fqn"] == "layers.0"
    assert (found[0]["payload_bytes"], found[0]["exposed_ns"]) == (str(8 * MIB), "4000000")


def test_steps_sum_to_their_window() -> None:
    found = rows(render_trace(trace_analysis(), "steps"))
    assert [row["step"] for row in found] == ["3", "4", "3", "4"]
    for row in found:
        parts = [int(v) for k, v in row.items() if k.endswith("_ns") and k not in ("start_ns", "duration_ns")]
        assert len(parts) == 8
        assert sum(parts) == int(row["duration_ns"])


def test_memory_tables() -> None:
    peak = rows(render_memory(memory_analysis()))
    assert sum(int(row["bytes"]) for row in peak if row["rank"] == "0") == 100 * MIB
    assert [row["phase"] for row in rows(render_memory(memory_analysis(), "layers"))] == [
        "forward",
        "backward",
    ] * 2


def test_unknown_is_empty_and_formulas_are_text() -> None:
    first = trace_analysis().groups[0]
    analysis = replace(trace_analysis(), groups=[replace(first, fqn="=HYPERLINK(1)", payload_bytes=None)])
    row = rows(render_trace(analysis))[0]
    assert row["fqn"] == "'=HYPERLINK(1)"
    assert row["payload_bytes"] == ""
