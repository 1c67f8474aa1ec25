"""The timeline of a step: spans as they ran, stalls as they are told elsewhere, one clock, bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.samples import MESH, MODEL, POLICY
from support.traces import two_kernel_trace
from synthetic import Recording, Schedule, record, transformer, write_run
from synthetic.timeline import ENTER_NS, LEAVE_NS

from fsdp2prof.analyzers.trace.analysis import analyze_trace as analyze
from fsdp2prof.analyzers.trace.spans import SpanTable, fold
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.step import estimate_step
from fsdp2prof.reporters.charts.timeline import timeline_detail, timeline_figure
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.step import StepTimeline, TimelineLane
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.tables.columns import Strings
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.compare import compare
from fsdp2prof.workflows.job.job_files import open_job

SKEWS = (0, 40_000, -7_000)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Recording]]:
    schedule = Schedule(roots=(transformer(4),), steps=3)
    recordings = record(schedule, schedule.scaled(1.5, "layers.2"), schedule, skews=SKEWS)
    return write_run(recordings, tmp_path_factory.mktemp("timeline") / "run"), recordings


@pytest.fixture(scope="module")
def analysis(recorded: tuple[Path, list[Recording]]) -> TraceAnalysis:
    return analyze_trace(open_job(recorded[0]), workers=1)


def timeline_of(analysis: TraceAnalysis) -> StepTimeline:
    assert analysis.timeline is not None
    return analysis.timeline


def lane_of(timeline: StepTimeline, rank: int, lane: str) -> TimelineLane:
    return next(one for one in timeline.ranks[rank].lanes if one.lane == lane)


def test_it_is_the_step_of_median_duration(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    durations = {
        step: np.mean([one.duration_ns for rank in analysis.ranks for one in rank.steps if one.step == step])
        for step in (3, 4, 5)
    }
    assert timeline.step == sorted(durations, key=lambda step: durations[step])[1]
    assert [rank.rank for rank in timeline.ranks] == [0, 1, 2]
    assert timeline.ranks_left_out == timeline.stalls_left_out == timeline.resolution_ns == 0


def test_every_collective_is_there_as_it_ran(
    recorded: tuple[Path, list[Recording]], analysis: TraceAnalysis
) -> None:
    timeline = timeline_of(analysis)
    for rank, recording in enumerate(recorded[1]):
        for op in ("all_gather", "reduce_scatter"):
            lane = lane_of(timeline, rank, op)
            ran = [
                one for one in recording.timeline.collectives if one.step == timeline.step and one.op == op
            ]
            assert lane.duration_ns == [one.end - one.start for one in ran]
            assert [timeline.layers[layer] for layer in lane.layer] == [one.fqn for one in ran]
            assert lane.count == [1] * len(ran)
            assert None not in lane.payload_bytes


def test_all_ranks_are_on_one_clock(analysis: TraceAnalysis) -> None:
    """The ends of a collective are one instant, whatever the ranks' clocks say."""
    timeline = timeline_of(analysis)
    assert timeline.aligned
    ends = [
        np.array(lane.start_ns) + np.array(lane.duration_ns)
        for lane in (lane_of(timeline, rank, "reduce_scatter") for rank in range(3))
    ]
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])
    assert min(rank.start_ns for rank in timeline.ranks) == 0
    host = lane_of(timeline, 0, "host")
    assert host.start_ns[0] < 0, "the host issues the step before the device begins it"


def test_work_of_a_lane_sums_to_the_step_s_own_account(analysis: TraceAnalysis) -> None:
    """One stream computes: its spans' busy time is the breakdown's compute, less what overlaps nothing."""
    timeline = timeline_of(analysis)
    for rank, pictured in zip(analysis.ranks, timeline.ranks, strict=True):
        step = next(one for one in rank.steps if one.step == timeline.step)
        assert pictured.duration_ns == step.duration_ns
        assert sum(lane_of(timeline, rank.rank, "compute").busy_ns) == step.breakdown_ns.compute


def test_a_host_that_gets_a_batch_is_pictured_so(tmp_path: Path) -> None:
    (recording,) = record(Schedule(roots=(transformer(1),), steps=2, loading_ns=300_007))
    timeline = timeline_of(analyze_trace(open_job(write_run([recording], tmp_path / "run")), workers=1))
    host = lane_of(timeline, 0, "host")
    named = [timeline.names[name] for name in host.name]
    (length,) = [time for name, time in zip(named, host.duration_ns, strict=True) if name == "data loader"]
    assert length == 300_007 + ENTER_NS + LEAVE_NS


def test_stalls_are_those_of_the_verdicts(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    for rank in timeline.ranks:
        told = sorted(
            (row.stall_ns, row.fqn or "", row.cause or "")
            for row in analysis.prefetch
            if row.rank == rank.rank and row.step == timeline.step and row.stall_ns
        )
        assert told == sorted((one.stall_ns, one.fqn or "", one.cause or "") for one in rank.stalls)
        assert told
        for stall in rank.stalls:
            assert stall.needed_ns + stall.stall_ns <= stall.end_ns
            lane = lane_of(timeline, rank.rank, stall.lane)
            assert stall.start_ns in lane.start_ns


def test_waiting_for_the_last_rank_is_the_comparison_s(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    waits = [sum(wait or 0 for lane in rank.lanes for wait in lane.peer_wait_ns) for rank in timeline.ranks]
    assert waits[1] < min(waits[0], waits[2]), "rank 1 is the slow one: the others wait for it"
    assert lane_of(timeline, 0, "compute").peer_wait_ns == []


def spans(count: int) -> SpanTable:
    """Alternating layers on one lane and collectives on another, 10 ns each, 5 ns apart."""
    lanes = ["compute", "all_gather"]
    start = np.repeat(np.arange(count) * 15, 2)
    return SpanTable(
        lane=Strings.intern(lanes * count),
        start_ns=start,
        end_ns=start + 10,
        busy_ns=np.full(2 * count, 10),
        count=np.ones(2 * count, dtype=np.int64),
        fqn=Strings.intern(f"layers.{i // 8 % 2}" for i in range(2 * count)),
        phase=Strings.full(2 * count, "forward"),
        name=Strings.full(2 * count, "gemm"),
        collective=np.tile([-1, 0], count) + np.repeat(np.arange(count), 2) * np.tile([0, 1], count),
    )


@pytest.mark.parametrize("most", [10_000, 2500, 700, 40])
def test_folding_keeps_to_the_bound_and_loses_no_time(most: int) -> None:
    original = spans(2000)
    folded, resolution = fold(original, most)
    assert len(folded) <= most
    assert (resolution > 0) == (most < len(original))
    for lane in ("compute", "all_gather"):
        mine = folded.take(folded.lane.equals(lane))
        assert int(mine.busy_ns.sum()) == 20_000
        assert int(mine.count.sum()) == 2000
        assert bool((mine.start_ns[1:] >= mine.end_ns[:-1]).all())


def test_layers_fold_before_collectives_do() -> None:
    folded, _ = fold(spans(2000), 2500)
    gathers = folded.take(folded.lane.equals("all_gather"))
    assert len(gathers) == 2000
    assert gathers.collective.tolist() == list(range(2000))


def test_what_a_page_gets_unpacks_to_the_spans(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    detail = timeline_detail([("", timeline)])
    for pictured, packed in zip(timeline.ranks, detail["sides"][0]["ranks"], strict=True):
        for lane, (key, gaps, durations, *_) in zip(pictured.lanes, packed["lanes"], strict=True):
            assert key == lane.lane
            length = len(lane.start_ns)
            gaps, durations = (
                column * length if len(column) == 1 else column for column in (gaps, durations)
            )
            starts, end = [], 0
            for gap, duration in zip(gaps, durations, strict=True):
                starts.append(end + gap)
                end += gap + duration
            assert starts == lane.start_ns
            assert durations == lane.duration_ns


def test_the_overview_has_a_row_a_lane(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    (heatmap,) = timeline_figure([("", timeline)])["data"]
    assert len(heatmap["z"]) == sum(len(rank.lanes) for rank in timeline.ranks)
    drawn = [any(code is not None for code in row) for row in heatmap["z"]]
    hosts = [lane.lane == "host" for rank in timeline.ranks for lane in rank.lanes]
    assert all(map(max, zip(drawn, hosts, strict=True))), "all but hosts that are done before the step begins"


def test_a_predicted_step_has_one_too() -> None:
    estimate = estimate_step(MODEL, MESH, POLICY, Cluster(hardware=HardwareSpec.parse("h100")))
    timeline = timeline_of(estimate.trace)
    lanes = [lane.lane for lane in timeline.ranks[0].lanes]
    assert {"compute", "fsdp_copy", "all_gather", "reduce_scatter"} <= set(lanes)
    assert "host" not in lanes, "labels cover a part of the work of a host that only issues"
    assert "timeline" in build(estimate).charts()


def test_a_comparison_shows_both_on_one_scale(
    recorded: tuple[Path, list[Recording]], analysis: TraceAnalysis
) -> None:
    compared = compare(recorded[0], recorded[0])
    assert compared.before_timeline == compared.after_timeline == analysis.timeline
    detail = build(compared).charts()["timeline"].zoomed()
    assert detail is not None
    assert [side["name"] for side in detail["sides"]] == ["before", "after"]


def test_the_terminal_draws_its_compute_in_a_line(analysis: TraceAnalysis) -> None:
    timeline = timeline_of(analysis)
    text = RENDERERS["text"].render(build(analysis), RenderOptions(width=100))
    assert isinstance(text, str)
    assert "Timeline of one step" in text
    assert "full height: every rank" in " ".join(text.split())
    assert all(0 <= part <= 1 for part in timeline.compute_frac)
    assert {"forward", "backward"} <= set(timeline.slice_phases)
    compute = np.mean([sum(lane_of(timeline, rank, "compute").busy_ns) for rank in range(3)])
    whole = np.mean(timeline.compute_frac) * timeline.duration_ns
    assert whole == pytest.approx(compute, rel=1e-6)


def test_ranks_without_a_common_clock_begin_where_their_own_steps_do() -> None:
    """No host is named and no collective shared: nothing says how the two clocks stand."""
    first = two_kernel_trace()
    second = replace(first, rank=1, base_time_ns=10**9)
    timeline = timeline_of(analyze([(replace(first, rank=0), None), (second, None)]))
    assert not timeline.aligned
    assert [rank.start_ns for rank in timeline.ranks] == [0, 0]
