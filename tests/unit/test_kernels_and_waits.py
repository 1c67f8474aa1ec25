"""Kernels by name, waiting by rank and layer, arrivals, and the fit of bandwidth against size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.analyzers.trace.operators import KernelSum, kernel_rows
from fsdp2prof.analyzers.trace.summary import bandwidth_fits
from fsdp2prof.reporters.charts.trace import bandwidth_chart, prefetch_chart, wait_chart
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.communication import BandwidthRow
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> TraceAnalysis:
    schedule = Schedule(roots=(transformer(3),))
    recordings = record(schedule, schedule.scaled(1.5, "layers.1"))
    run = write_run(recordings, tmp_path_factory.mktemp("kernels") / "run")
    return analyze_trace(open_job(run), workers=1)


def test_kernels_sum_to_the_step_s_own_account(analysis: TraceAnalysis) -> None:
    """One stream computes, so that its kernels are the breakdown's compute."""
    spent = sum(row.total_ns for row in analysis.kernels if row.kind == "compute")
    assert spent == pytest.approx(analysis.totals.breakdown_ns["compute"])
    totals = [row.total_ns for row in analysis.kernels if row.name is not None]
    assert totals == sorted(totals, reverse=True)
    assert {row.kind for row in analysis.kernels} >= {"compute", "fsdp_copy"}
    assert all(row.mean_ns * row.count == pytest.approx(row.total_ns) for row in analysis.kernels)


def test_names_beyond_the_longest_are_one_row_a_kind() -> None:
    sums = [KernelSum(f"kernel_{i}", "compute", 2, 100 + i) for i in range(50)]
    rows = kernel_rows([sums, [KernelSum("kernel_49", "compute", 2, 51)]], windows=2, step_ns=1000)
    assert len(rows) == 41
    assert (rows[0].name, rows[0].total_ns, rows[0].count, rows[0].mean_ns) == ("kernel_49", 100, 2, 50)
    rest = rows[-1]
    assert (rest.name, rest.count) == (None, 10)
    assert rest.total_ns == sum(range(100, 110)) / 2
    assert rest.step_frac == rest.total_ns / 1000


def test_waits_by_rank_and_layer_sum_to_the_verdicts(analysis: TraceAnalysis) -> None:
    told: Counter[int] = Counter()
    for row in analysis.prefetch:
        told[row.rank] += row.stall_ns
    steps = {rank.rank: len(rank.steps) for rank in analysis.ranks}
    for rank in (0, 1):
        mine = [row.stall_ns for row in analysis.layer_waits if row.rank == rank]
        assert sum(mine) * steps[rank] == pytest.approx(told[rank])
    chart = wait_chart(analysis.layer_waits)
    (heatmap,) = chart["data"]
    assert heatmap["y"] == ["rank 0", "rank 1"]
    assert sum(map(sum, heatmap["z"])) == pytest.approx(
        sum(row.stall_ns for row in analysis.layer_waits) / 1e6
    )
    idle = replace(analysis, layer_waits=[replace(row, stall_ns=0) for row in analysis.layer_waits])
    assert "wait_chart" in build(analysis).charts()
    assert "wait_chart" not in build(idle).charts()


def test_arrivals_are_the_late_rows_whatever_their_cause(analysis: TraceAnalysis) -> None:
    kinds = [(row.fqn, row.phase, row.op) for row in analysis.arrivals]
    assert len(set(kinds)) == len(kinds)
    assert sum(row.stall_ns for row in analysis.arrivals) == pytest.approx(
        sum(row.stall_ns for row in analysis.late)
    )
    chart = prefetch_chart(analysis.arrivals)
    assert sum(len(bars["y"]) for bars in chart["data"]) == len(kinds)
    late = next(bars for bars in chart["data"] if bars["name"] == "came late")
    assert len(late["y"]) == sum(row.stall_ns > 0 for row in analysis.arrivals)


def sized(payload: int, seconds: float, *, known: bool = True) -> BandwidthRow:
    """An all-gather of 4 ranks that took so long."""
    wire = payload * 3 / 4
    return BandwidthRow(
        op="all_gather", process_group="1", mesh_dim="dp", group_size=4, dtype="bfloat16",
        payload_bytes=payload, count=3, algbw_bytes_per_s=payload / seconds,
        busbw_bytes_per_s=wire / seconds, best_busbw_bytes_per_s=None, of_best_frac=None, waits_known=known,
    )  # fmt: skip


def test_the_fit_finds_latency_rate_and_knee() -> None:
    """20 us and 100 GB/s: 1 MB of payload takes 20 + 7.5 us; the knee is where both are equal."""
    rows = [sized(size, 20e-6 + size * 0.75 / 100e9) for size in (10**6, 10**7, 10**8)]
    (fit,) = bandwidth_fits(rows)
    assert fit.latency_ns == pytest.approx(20_000)
    assert fit.bytes_per_s == pytest.approx(100e9)
    assert fit.knee_bytes == pytest.approx(20e-6 * 100e9 / 0.75)
    assert fit.error_frac == pytest.approx(0, abs=1e-9)
    assert fit.sizes == 3
    chart = bandwidth_chart(rows, [fit])
    points, curve = chart["data"]
    assert curve["y"][0] == pytest.approx(points["y"][0])
    assert curve["y"][-1] == pytest.approx(points["y"][-1])


@pytest.mark.parametrize(
    "rows",
    [
        [sized(10**6, 1e-4), sized(10**7, 2e-4)],
        [sized(size, 1e-3, known=False) for size in (10**6, 10**7, 10**8)],
        [sized(10**6, 1e-3), sized(10**7, 5e-4), sized(10**8, 1e-4)],
    ],
    ids=["two sizes", "waits unknown", "larger is faster"],
)
def test_what_no_line_fits_has_no_fit(rows: list[BandwidthRow]) -> None:
    assert bandwidth_fits(rows) == []


def test_the_document_has_a_table_behind_every_chart(analysis: TraceAnalysis) -> None:
    document = build(analysis)
    assert {
        "step_chart",
        "timeline",
        "layer_chart",
        "prefetch_chart",
        "wait_chart",
    } <= set(document.charts())
    assert {"breakdown", "stalls", "by_layer", "late", "bandwidth", "layer_waits", "kernels"} <= set(
        document.tables()
    )
