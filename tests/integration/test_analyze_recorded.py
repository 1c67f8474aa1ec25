"""The commands on a recorded run of the example: what a person types after recording."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from support.cli import call
from support.numbers import unexplained

DIM, VOCAB, LAYERS = 128, 1024, 4
ROOT = 2 * VOCAB * DIM + 2 * DIM
"""Embedding, head and a norm's weight and bias."""
BLOCK = 2 * 2 * DIM + 3 * DIM * DIM + DIM * DIM + (DIM * 4 * DIM + 4 * DIM) + (4 * DIM * DIM + DIM)
"""Two norms, qkv, proj, up and down with biases."""


@pytest.fixture
def run(recorded: Callable[[str, int], Any]) -> Path:
    path: Path = recorded("train_tiny_fsdp2", 2).run
    return path


@pytest.fixture
def analysis(capfd: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    ended = call(capfd, "analyze", "run", run, "--format", "json")
    assert (ended.code, ended.err) == (0, "")
    document: dict[str, Any] = json.loads(ended.out)
    return document


def test_the_run_is_described(analysis: dict[str, Any]) -> None:
    run = analysis["run"]
    assert (run["state"], run["exit_code"], run["world_size"]) == ("complete", 0, 2)
    assert [rank["state"] for rank in run["ranks"]] == ["complete", "complete"]
    assert run["optimizers"][0].startswith("AdamW, ")
    groups = {group["fqn"]: group for group in run["shard_groups"]}
    assert {fqn: group["numel"] for fqn, group in groups.items()} == {
        "": ROOT,
        **{f"layers.{i}": BLOCK for i in range(LAYERS)},
    }
    assert groups[""]["sharded_bytes"] == ROOT * 4 // 2
    assert {group["mesh"] for group in groups.values()} == {"dp_shard=2"}
    assert {group["padding_bytes"] for group in groups.values()} == {0}


def test_the_trace_is_accounted_for(analysis: dict[str, Any]) -> None:
    """Per step and rank: 5 all-gathers forward, 4 backward, 5 reduce-scatters; bytes in bf16 and fp32."""
    trace = analysis["trace"]
    assert [rank["rank"] for rank in trace["ranks"]] == [0, 1]
    windows = [step for rank in trace["ranks"] for step in rank["steps"]]
    for step in windows:
        assert sum(step["breakdown_ns"].values()) == step["duration_ns"]
    assert trace["attribution"]["attributed"] == trace["attribution"]["collectives"] == 14 * len(windows)
    assert {row["device_type"] for row in trace["ranks"]} == {"cpu"}
    payload: dict[tuple[str, str], int] = {}
    for row in trace["groups"]:
        key = row["op"], row["phase"]
        payload[key] = payload.get(key, 0) + row["payload_bytes"]
    assert payload == {
        ("all_gather", "forward"): 2 * (ROOT + LAYERS * BLOCK) * len(windows),
        ("all_gather", "backward"): 2 * LAYERS * BLOCK * len(windows),
        ("reduce_scatter", "backward"): 4 * (ROOT + LAYERS * BLOCK) * len(windows),
    }


def test_memory_sums_to_the_peak(analysis: dict[str, Any]) -> None:
    assert [rank["rank"] for rank in analysis["memory"]["ranks"]] == [0, 1]
    for rank in analysis["memory"]["ranks"]:
        peak = rank["peak"]
        assert sum(peak["categories"].values()) == peak["allocated_bytes"] > 0
        assert sum(row["bytes"] for row in peak["by_layer"]) == peak["allocated_bytes"]
        assert peak["categories"]["sharded_parameter"] == (ROOT + LAYERS * BLOCK) * 4 // 2
        course = rank["timeline"]
        totals = [
            sum(values) for values in zip(*(v for k, v in course.items() if k != "time_ns"), strict=True)
        ]
        assert max(totals) == peak["allocated_bytes"]
        spans = rank["phase_spans"]
        assert {span["phase"] for span in spans} == {"forward", "backward", "optimizer"}
        for earlier, later in pairwise(spans):
            assert earlier["end_ns"] <= later["start_ns"]


def test_the_unrecorded_step_leads(
    capfd: pytest.CaptureFixture[str], run: Path, analysis: dict[str, Any]
) -> None:
    """Of 8 steps 1 is warm-up, 3 are traced and 1 records memory: steps 6 and 7 of each rank are left."""
    manifests = [json.loads(path.read_text()) for path in sorted(run.glob("rank-*/manifest.json"))]
    plain = [[s["duration_ns"] for s in m["steps"] if s["kind"] == "plain"][1:] for m in manifests]
    assert [len(steps) for steps in plain] == [2, 2]
    step = analysis["run"]["unrecorded_step"]
    assert (step["steps"], step["median_ns"]) == (4, median(plain[0] + plain[1]))
    traced = [s["duration_ns"] for m in manifests for s in m["steps"] if s["kind"] == "traced"]
    # On a busy machine the unrecorded steps may look as if they were of several kinds: then of the means.
    of_means = fmean(traced) / fmean(plain[0] + plain[1])
    assert step["slowdown"] in (pytest.approx(median(traced) / step["median_ns"]), pytest.approx(of_means))
    assert step == analysis["trace"]["unrecorded_step"]
    verdict = analysis["verdict"]
    assert "A step takes " in " ".join(verdict[:2])
    assert verdict[:2] == analysis["trace"]["verdict"][:2]
    text = call(capfd, "analyze", "trace", run).out
    assert text.splitlines()[1].startswith(verdict[0][:20])
    limit = step["median_ns"] / 1e6
    gates = ("--fail-on", f"step_time_ms>{limit + 1e6}", "--fail-on", "traced_step_time_ms<0")
    assert call(capfd, "analyze", "trace", run, "-q", *gates).code == 0
    slowest = max(median(steps) for steps in plain) / 1e6
    failed = call(capfd, "analyze", "run", run, "-q", "--fail-on", "step_time_ms>0")
    assert failed.code == 3
    assert f"step_time_ms is {slowest:.4g}" in failed.err


def test_every_number_of_the_trace_stands_in_its_json(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    document = json.loads(call(capfd, "analyze", "trace", run, "--format", "json").out)
    text = call(capfd, "analyze", "trace", run).out.split("fsdp2prof report")[0]
    shown = [line for line in text.splitlines() if "all with -v" not in line]
    raw = frozenset({"groups", "prefetch", "host_syncs"})
    assert unexplained("\n".join(shown), document, without=raw) == []


def test_text_reads_from_the_verdict_to_what_was_run(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    ended = call(capfd, "analyze", "run", run, "--full")
    assert ended.code == 0
    titles = [
        "Run",
        "A step takes ",
        "Where the step goes",
        "Communication by layer",
        "Peak memory",
        "by kind",
        "Command and environment",
        "How the model is sharded",
    ]
    places = [ended.out.index(title) for title in titles]
    assert places == sorted(places)
    assert f"layers.0-{LAYERS - 1}" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 120


def test_memory_as_csv(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    ended = call(capfd, "analyze", "memory", run, "--format", "csv")
    assert {row["rank"] for row in csv.DictReader(io.StringIO(ended.out))} == {"0", "1"}
    layers = call(capfd, "analyze", "memory", run, "--format", "csv", "--table", "layers", "--ranks", "1")
    assert {row["rank"] for row in csv.DictReader(io.StringIO(layers.out))} == {"1"}


def test_thresholds_over_trace_and_memory(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    conditions = ("--fail-on", "attributed_frac<1", "--fail-on", "peak_allocated_gib>1")
    assert call(capfd, "analyze", "run", run, *conditions).code == 0
    failed = call(capfd, "analyze", "memory", run, "-q", "--fail-on", "peak_allocated_gib>0.001")
    assert failed.code == 3
    assert "peak_allocated_gib" in failed.err


def test_the_report_holds_all_of_it(capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert call(capfd, "report", run, "-o", report).code == 0
    text = report.read_text(encoding="utf-8")
    for words in ("Where the step goes", "Communication by layer", "Memory of rank", "train_tiny_fsdp2.py"):
        assert words in text


def test_a_recording_does_not_differ_from_itself(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    ended = call(capfd, "analyze", "memory", run, "--diff", run, "--format", "json")
    document = json.loads(ended.out)
    assert document["delta_bytes"] == 0
    for part in ("by_category", "by_layer", "by_stack"):
        rows = document[part]
        assert {row["delta_bytes"] for row in rows} == {0}
        assert sum(row["after_bytes"] for row in rows) == document["after"]["allocated_bytes"]
    flat = call(capfd, "analyze", "memory", run, "--diff", run, "--format", "csv").out
    assert {row["delta_bytes"] for row in csv.DictReader(io.StringIO(flat))} == {"0"}
    text = call(capfd, "analyze", "memory", run, "--diff", run).out
    assert "The peak is the same" in text
    assert "Change by" not in text


def test_a_difference_of_memory_is_a_page_too(
    capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "diff.html"
    one, other = (sorted(run.glob(f"rank-0000{rank}/memory.npz"))[0] for rank in (0, 1))
    assert call(capfd, "analyze", "memory", one, "--diff", other, "-o", page).code == 0
    text = page.read_text(encoding="utf-8")
    for words in ("The peak is the same", str(one), str(other)):
        assert words in text
