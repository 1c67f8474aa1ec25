"""A baseline holds sums that say what the run says, and little else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write_run

import fsdp2prof
from fsdp2prof.workflows.compare import write_baseline

SCHEDULE = Schedule(roots=(transformer(3),))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(record(SCHEDULE, SCHEDULE), tmp_path_factory.mktemp("baseline") / "run")


def test_a_run_equals_its_own_baseline_and_differs_as_it_does_from_the_run(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "baseline.json"
    write_baseline(kept, run)
    same = fsdp2prof.compare(kept, run)
    assert same.step is not None
    assert same.step.delta_ns == 0
    assert same.communication_equal
    slow = write_run(record(SCHEDULE.scaled(1.5, "layers.1"), SCHEDULE), tmp_path / "slow")
    by_layer, by_sums = fsdp2prof.compare(run, slow), fsdp2prof.compare(kept, slow)
    assert by_sums.step == by_layer.step
    assert by_sums.step is not None
    assert by_sums.step.delta_ns > 0
    assert by_sums.breakdown == by_layer.breakdown
    assert by_sums.before.spread == by_layer.before.spread
    for op in ("all_gather", "reduce_scatter"):
        sent = [
            sum(row.after.wire_bytes or 0 for row in one.communication if row.op == op and row.after)
            for one in (by_layer, by_sums)
        ]
        assert sent[0] == sent[1] > 0


def test_its_size_depends_on_no_layer_and_no_rank(tmp_path: Path) -> None:
    sizes = []
    for layers, ranks in ((2, 1), (8, 3)):
        schedule = Schedule(roots=(transformer(layers),))
        big = write_run(record(*[schedule] * ranks), tmp_path / f"run{layers}")
        write_baseline(tmp_path / f"{layers}.json", big)
        sizes.append((tmp_path / f"{layers}.json").stat().st_size)
    assert max(sizes) < 8_000
    assert abs(sizes[1] - sizes[0]) < 200, "the digits of its numbers"


def test_the_command_writes_it_and_never_over_something_else(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "baseline.json"
    gates = ("--fail-on", "step_time_frac>0", "--fail-on", "wire_bytes_frac>0")
    call(capfd, "compare", kept, run, *gates).refused("no such file", "baseline.json")
    call(capfd, "compare", kept, run, "--write-baseline", *gates).refused("--fail-on", code=2)
    for _ in range(2):
        assert call(capfd, "compare", kept, run, "--write-baseline").code == 0
    passed = call(capfd, "compare", kept, run, *gates)
    assert passed.code == 0
    assert passed.err.splitlines() == [
        "passed: 2 conditions tested, none holds",
        "  step_time_frac>0: step_time_frac is 0",
        "  wire_bytes_frac>0: wire_bytes_frac is 0",
    ]
    assert call(capfd, "compare", kept, run, *gates, "-q").err == ""
    other = tmp_path / "other.json"
    other.write_text("{}")
    call(capfd, "compare", other, run, "--write-baseline").refused("is not a baseline")
    call(capfd, "compare", run, run, "--write-baseline").refused("is not a baseline")
    assert other.read_text() == "{}"


def test_a_damaged_one_is_refused(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "baseline.json"
    write_baseline(kept, run)
    document = json.loads(kept.read_text())
    changes: list[dict[str, object]] = [
        {"windows": 0},
        {"step_ns": "long"},
        {"peak": 3},
        {"traced_ranks": 10**15},
        {"traced_ranks": -1},
    ]
    for change in changes:
        kept.write_text(json.dumps({**document, **change}))
        call(capfd, "compare", kept, run).refused("not a baseline", "--write-baseline")
