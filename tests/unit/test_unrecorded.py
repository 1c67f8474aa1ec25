"""The unrecorded step leads: its time and spread, what tracing adds, and what that explains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ledger import find
from support.rendered import text_of
from support.results import MS, memory_analysis, run_summary, trace_analysis
from synthetic import Schedule, record, transformer, write

from fsdp2prof.analyzers.compare.baseline import Side
from fsdp2prof.analyzers.compare.sides import compare
from fsdp2prof.analyzers.fail_on import check, parse
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds
from fsdp2prof.analyzers.run_summary import combine
from fsdp2prof.analyzers.steps import added_ns, are_unlike, typical_ns, unrecorded_step, waited_for
from fsdp2prof.analyzers.trace.analysis import References, analyze_rank, merge, throughput
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.errors import InputError
from fsdp2prof.manifest import RankManifest, StepInfo
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.run import StepTime
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import HostSyncRow, TraceAnalysis


def steps(*durations_ms: int, **others_ms: int) -> list[StepTime]:
    """Plain steps, then one of each other kind."""
    plain = [StepTime(step=i, duration_ns=ms * MS, kind="plain") for i, ms in enumerate(durations_ms)]
    return [*plain, *(StepTime(step=99, duration_ns=ms * MS, kind=kind) for kind, ms in others_ms.items())]


def measured(*ranks: list[StepTime]) -> UnrecordedStep:
    found = unrecorded_step(ranks)
    assert found is not None
    return found


def test_the_median_and_quartiles_are_of_all_ranks_without_each_ones_first_step() -> None:
    found = measured(steps(2000, 10, 20, 30, traced=44), steps(2000, 40, 50, traced=46, memory=900))
    assert (found.steps, found.median_ns, found.min_ns, found.max_ns) == (5, 30 * MS, 10 * MS, 50 * MS)
    assert (found.lower_quartile_ns, found.upper_quartile_ns) == (20 * MS, 40 * MS)
    assert (found.traced_median_ns, found.slowdown) == (45 * MS, 1.5)
    assert added_ns(found) == 15 * MS


def test_a_first_step_counts_where_nothing_else_is_known() -> None:
    found = measured(steps(70))
    assert (found.steps, found.median_ns, found.lower_quartile_ns) == (1, 70 * MS, 70 * MS)
    assert (found.traced_median_ns, found.slowdown, added_ns(found)) == (None, None, 0)
    assert unrecorded_step([steps(traced=5), []]) is None
    assert added_ns(None) == 0


def test_a_first_step_does_not_count_beside_traced_ones() -> None:
    assert unrecorded_step([steps(2000, traced=30)]) is None


def test_a_plain_step_after_the_recorded_ones_is_no_first_step() -> None:
    recorded_from_the_start = [*steps(traced=90), *steps(40, 60)]
    assert measured(recorded_from_the_start).steps == 2


def test_tracing_that_costs_nothing_adds_nothing() -> None:
    assert added_ns(measured(steps(10, 50, traced=40))) == 0


SLOW = measured(steps(1000, 340, 350, 360, traced=737))


def slowed(host_bound_ms: int, device: str = "cuda", step: UnrecordedStep | None = SLOW) -> TraceAnalysis:
    """737 ms traced: 220 of compute, what the host left idle, copies the rest; 350 ms unrecorded."""
    analysis = trace_analysis()
    ranks = []
    for rank in analysis.ranks:
        parts = replace(
            rank.steps[0].breakdown_ns,
            compute=220 * MS,
            fsdp_copy=(737 - 230 - host_bound_ms) * MS,
            idle=host_bound_ms * MS,
        )
        windows = [
            replace(one, duration_ns=737 * MS, breakdown_ns=parts, idle_ns={"host_bound": host_bound_ms * MS})
            for one in rank.steps
        ]
        ranks.append(replace(rank, device_type=device, steps=windows, unrecorded_step=step))
    measured = replace(analysis, ranks=ranks, unrecorded_step=step)
    return of_part(replace(measured, findings=find(measured)))


def named(analysis: TraceAnalysis) -> dict[str, Finding]:
    return {finding.id: finding for finding in analysis.findings}


def test_idle_time_that_tracing_added_is_not_told_as_the_hosts_fault() -> None:
    """468 ms of host-bound idle time, 387 of which are what tracing adds: 81 ms may be the training's."""
    analysis = slowed(468)
    found = named(analysis)
    assert "host_bound" in found
    assert found["host_bound"].severity == "high"
    assert found["host_bound"].evidence["cost_frac"] == pytest.approx(81 / 737)
    assert found["slowed_by_tracing"].severity == "info"
    assert (
        "2.11 times as long as one without recording (737.0 ms against 350.0 ms"
        in found["slowed_by_tracing"].message
    )
    assert analysis.verdict[0] == (
        "The device is idle for 81.0 ms (11.0%) of a traced step because the host launches work too slowly. "
        "A step takes 350.0 ms, a traced one 737.0 ms, slowed mostly on the host."
    )


def test_idle_time_that_tracing_explains_is_no_finding_about_the_host() -> None:
    """380 ms of idle time against 387 that tracing adds."""
    found = named(slowed(380))
    assert "host_bound" not in found
    assert found["slowed_by_tracing"].severity == "info"


def test_manifests_decide_whether_the_host_is_to_blame(tmp_path: Path) -> None:
    """A synthetic GPU whose host launches 3 ms apart: unrecorded, it keeps up, or does not."""
    (recording,) = record(Schedule(roots=(transformer(6, forward_ns=2 * MS, host_ns=3 * MS),)))
    trace = read_trace(write(recording, tmp_path / "trace.json"), workers=1)
    alone = merge([analyze_rank(trace)])
    assert alone.totals.step_ns is not None
    traced_ns = round(alone.totals.step_ns)
    host_ns = round(alone.totals.idle_ns["host_bound"])
    for unrecorded_ns, blamed in ((traced_ns - host_ns, False), (traced_ns, True)):
        times: list[tuple[int, Any]] = [
            (9 * traced_ns, "plain"),
            *[(unrecorded_ns, "plain")] * 5,
            *[(traced_ns, "traced")] * 2,
        ]
        manifest = RankManifest(
            steps=[
                StepInfo(step=i, start_ns=0, duration_ns=ns, kind=kind) for i, (ns, kind) in enumerate(times)
            ]
        )
        found = merge([analyze_rank(trace, manifest)], manifests=[manifest])
        assert found.unrecorded_step is not None
        assert (found.unrecorded_step.steps, found.unrecorded_step.median_ns) == (5, unrecorded_ns)
        assert found.ranks[0].unrecorded_step == found.unrecorded_step
        assert ("host_bound" in named(found)) == blamed
        assert ("slowed_by_tracing" in named(found)) != blamed
        assert "a step takes " in " ".join(found.verdict).lower()


def test_a_host_that_runs_ahead_is_not_to_blame(tmp_path: Path) -> None:
    """Its unrecorded steps are shorter than the device's work: its clock times the host alone."""
    (recording,) = record(Schedule(roots=(transformer(6, forward_ns=2 * MS, host_ns=3 * MS),)))
    trace = read_trace(write(recording, tmp_path / "trace.json"), workers=1)
    steps = [StepInfo(step=i, start_ns=0, duration_ns=1 * MS, kind="plain") for i in range(3)]
    traced = StepInfo(step=3, start_ns=0, duration_ns=1 * MS, kind="traced")
    manifest = RankManifest(steps=[*steps, traced])
    found = merge([analyze_rank(trace, manifest)], manifests=[manifest])
    assert found.host_runs_ahead
    assert found.unrecorded_step is None
    assert found.ranks[0].unrecorded_step is None
    assert "host_bound" not in named(found)
    assert "a traced step takes " in " ".join(found.verdict).lower()


def test_steps_in_which_the_host_ran_ahead_are_no_other_kind() -> None:
    """Two of five steps took less than the device computes in any: the others are the pace."""
    found = measured(steps(1000, 37, 52, 111, 109, 110, traced=110))
    assert are_unlike(found)
    analysis = trace_analysis()
    ranks = [
        replace(
            rank,
            steps=[
                replace(one, breakdown_ns=replace(one.breakdown_ns, compute=98 * MS)) for one in rank.steps
            ],
        )
        for rank in analysis.ranks
    ]
    on_device = [replace(rank, device_type="cuda") for rank in ranks]
    paced = waited_for(found, on_device)
    assert paced is not None
    assert (are_unlike(paced), typical_ns(paced), paced.slowdown) == (False, 109 * MS, 110 / 109)
    assert waited_for(found, [replace(rank, device_type="cpu") for rank in ranks]) == found


def test_a_host_that_is_slow_by_itself_still_is() -> None:
    calm = measured(steps(1000, 700, 700, traced=737))
    analysis = slowed(468, step=calm)
    found = named(analysis)
    assert found["host_bound"].evidence["cost_frac"] == pytest.approx((468 - 37) / 737)
    assert "slowed_by_tracing" not in found, "1.05 times as long is not worth a word"
    assert analysis.verdict[0] == (
        "The device is idle for 431.0 ms (58.5%) per step because the host launches work too slowly. "
        "A step takes 700.0 ms."
    )


def test_a_foreign_trace_says_that_the_profiler_was_running() -> None:
    found = named(slowed(468, step=None))
    assert found["host_bound"].evidence["cost_frac"] == pytest.approx(468 / 737)
    assert "the profiler causes an unknown part of this" in found["host_bound"].message
    assert "slowed_by_tracing" not in found


def test_what_tracing_added_is_taken_off_launching_before_waiting() -> None:
    analysis = slowed(468)
    ranks = [
        replace(
            rank,
            steps=[
                replace(one, idle_ns={"host_bound": 300 * MS, "device_sync": 168 * MS}) for one in rank.steps
            ],
        )
        for rank in analysis.ranks
    ]
    calls = [HostSyncRow(rank=0, fqn=None, phase="other", call="cudaStreamSynchronize", operator=None,
                         count=4, blocked_ns=MS)]  # fmt: skip
    found = {one.id: one for one in find(replace(analysis, ranks=ranks, host_syncs=calls))}
    assert "host_bound" not in found
    assert found["host_sync"].evidence["cost_frac"] == pytest.approx((168 - 87) / 737)
    assert "in other" not in found["host_sync"].message


def test_the_threshold_of_the_slowdown_can_be_moved() -> None:
    limits = FindingThresholds(slowdown=3)
    assert "slowed_by_tracing" not in {one.id for one in find(slowed(468), thresholds=limits)}


def test_advice_begins_with_the_unrecorded_step() -> None:
    analysis = slowed(468)
    assert analysis.ledger is not None
    first, *rest = analysis.advice
    assert rest == analysis.ledger.not_judged
    assert first == (
        "A step takes 350.0 ms without recording (median of 3, quartiles 345.0 ms to 355.0 ms). "
        "The median traced step takes 737.0 ms, 2.11 times as long."
    )
    assert first in text_of(analysis, width=400), "among the notes"
    assert first not in str(build(analysis).brief)


def test_a_run_without_a_trace_says_how_long_a_step_takes() -> None:
    run = replace(run_summary(), unrecorded_step=SLOW)
    analysis = combine(run, None, None)
    assert analysis.verdict == analysis.advice == slowed(468).advice[:1]
    assert combine(run, None, memory_analysis()).advice[0].startswith("A step takes 350.0 ms")


def test_speed_is_that_of_unrecorded_steps() -> None:
    """1e12 operations and 1000 tokens a step: over 0.5 s unrecorded, over 1 s traced."""
    traced = [replace(one, duration_ns=10**9, flops=10**12) for one in trace_analysis().ranks[0].steps]
    references = References(tokens_per_step=1000, peak_flops_per_s={"bfloat16": 8e12})
    fast = throughput(traced, references, measured(steps(500)), dtype="bfloat16")
    slow = throughput(traced, references, dtype="bfloat16")
    assert fast is not None
    assert slow is not None
    assert (fast.measured_on, fast.tokens_per_s, fast.flops_per_s, fast.mfu) == (
        "unrecorded",
        2000,
        2e12,
        0.25,
    )
    assert (slow.measured_on, slow.tokens_per_s, slow.flops_per_s, slow.mfu) == ("traced", 1000, 1e12, 0.125)


# Gates.


def test_gates_test_the_unrecorded_step_and_the_traced_one_by_name() -> None:
    analysis = slowed(468)
    failures = check([parse("step_time_ms>300"), parse("step_time_max_ms>300")], analysis)
    assert [failure.value for failure in failures] == [350, 360]
    assert check([parse("step_time_ms>400")], analysis) == []
    (traced,) = check([parse("traced_step_time_ms>400")], analysis)
    assert traced.value == 737


def test_a_gate_on_a_run_needs_no_trace() -> None:
    run = combine(run_summary(), None, None)
    (failure,) = check([parse("step_time_ms>39")], run)
    assert (failure.value, failure.ranks) == (40, 2)
    unknown = [replace(rank, unrecorded_step=None) for rank in run.run.ranks]
    with pytest.raises(InputError, match="undefined"):
        check([parse("step_time_ms>39")], replace(run, run=replace(run.run, ranks=unknown)))
    with_trace = replace(run, run=replace(run.run, ranks=unknown), trace=trace_analysis())
    assert check([parse("step_time_ms>49")], with_trace)[0].value == 50


def test_a_comparison_gates_on_traced_steps_where_one_side_knows_no_others() -> None:
    before = Side(path="a", kind="run", trace=trace_analysis(), run=run_summary())
    after = Side(path="b", kind="trace", trace=slowed(468, step=None))
    comparison = compare(before, after)
    assert comparison.unrecorded_step is None
    for metric in ("step_time_frac", "traced_step_time_frac"):
        (failure,) = check([parse(f"{metric}>1")], comparison)
        assert failure.value == pytest.approx(737 / 50 - 1)


@pytest.mark.parametrize(
    ("device", "host_ms", "is_known"), [("cuda", 19, False), ("cuda", 60, True), ("cpu", 19, True)]
)
def test_a_host_that_runs_ahead_of_its_device_does_not_time_its_steps(
    device: str, host_ms: int, is_known: bool
) -> None:
    """No step is shorter than what the device computes in it."""
    step = measured(steps(2000, host_ms, host_ms))
    ranks = [replace(one, device_type=device) for one in trace_analysis().ranks]
    computed = min(one.breakdown_ns.compute for rank in ranks for one in rank.steps)
    assert 19 * MS < computed < 60 * MS
    assert (waited_for(step, ranks) is not None) is is_known
    trace = replace(trace_analysis(), ranks=ranks)
    both = combine(replace(run_summary(), unrecorded_step=step), trace, None)
    assert (both.run.unrecorded_step is not None) is is_known


def test_steps_of_several_kinds_take_their_mean() -> None:
    """Two models in turns: a median is one of them, and traced steps have both."""
    traced = [StepTime(step=90, duration_ns=ms * MS, kind="traced") for ms in (100, 240)]
    found = measured([*steps(900, 60, 170, 60, 170, 60, 170, 60), *traced])
    assert are_unlike(found)
    assert typical_ns(found) == found.mean_ns == pytest.approx(750 * MS / 7)
    assert found.slowdown == pytest.approx(170 * MS / found.mean_ns)
    assert added_ns(found) == pytest.approx(170 * MS - 750 * MS / 7)
    alike = measured(steps(900, 60, 62, 61, 63))
    assert typical_ns(alike) == alike.median_ns
