"""What a trace analysis holds for people: means by hand, causes, who waited, sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.results import MS, trace_analysis

from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds
from fsdp2prof.analyzers.ledger.words import trace_verdict
from fsdp2prof.analyzers.trace.analysis import merge_results
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.results.communication import CrossRank, LateCause, PrefetchRow, Straggler
from fsdp2prof.results.ledger import LedgerRemedy
from fsdp2prof.results.step import Throughput, TraceTotals
from fsdp2prof.results.trace import HostSyncRow, TraceAnalysis


def on_a_gpu(analysis: TraceAnalysis) -> TraceAnalysis:
    return of_part(replace(analysis, ranks=[replace(rank, device_type="cuda") for rank in analysis.ranks]))


def test_totals_by_hand() -> None:
    """50 ms: 30 compute, 2 copies, 7 all-gather, 3 reduce-scatter, 8 idle; 20 ms communication a step."""
    totals = trace_analysis().totals
    assert (totals.windows, totals.step_ns) == (4, 50 * MS)
    parts = {"compute": 30, "fsdp_copy": 2, "exposed_all_gather": 7, "exposed_reduce_scatter": 3, "idle": 8}
    assert {part: ns / MS for part, ns in totals.breakdown_ns.items() if ns} == parts
    assert sum(totals.breakdown_ns.values()) == totals.step_ns
    assert sum(totals.breakdown_frac.values()) == pytest.approx(1)
    assert totals.breakdown_frac["idle"] == 0.16
    assert (totals.communication_ns, totals.exposed_ns) == (20 * MS, 10 * MS)
    assert (totals.exposed_frac, totals.overlap_frac, totals.attributed_frac) == (0.2, 0.5, 1.0)


def test_idle_time_and_speed_are_means() -> None:
    """Idle 6 + 2 ms on rank 0 and 8 ms on rank 1; the slower rank's tokens count, the others are means."""
    analysis = trace_analysis()
    idle = [{"host_bound": 6 * MS, "queued": 2 * MS}, {"queued": 8 * MS}]
    speeds = [
        Throughput(step_ns=50 * MS, tokens_per_s=tokens, flops_per_s=flops, mfu=mfu)
        for tokens, flops, mfu in ((80_000.0, 2e14, 0.2), (70_000.0, 3e14, None))
    ]
    ranks = [
        replace(rank, throughput=speed, steps=[replace(step, idle_ns=causes) for step in rank.steps])
        for rank, speed, causes in zip(analysis.ranks, speeds, idle, strict=True)
    ]
    totals = of_part(replace(analysis, ranks=ranks)).totals
    assert list(totals.idle_ns.items()) == [("queued", 5 * MS), ("host_bound", 3 * MS)]
    assert (totals.tokens_per_s, totals.flops_per_s, totals.mfu) == (70_000, 2.5e14, 0.2)


def test_ranks_have_their_own_means_and_a_place() -> None:
    analysis = trace_analysis()
    first = analysis.ranks[0]
    slow = replace(first.steps[0], duration_ns=90 * MS)
    ranks = [replace(first, rank=rank) for rank in range(5)]
    ranks[3] = replace(ranks[3], steps=[slow, first.steps[1]])
    ranks.append(replace(first, rank=5, steps=[]))
    summed = of_part(replace(analysis, ranks=ranks))
    assert [(one.rank, one.steps, one.step_ns / MS) for one in summed.by_rank] == [
        (0, 2, 50),
        (1, 2, 50),
        (2, 2, 50),
        (3, 2, 70),
        (4, 2, 50),
    ]
    totals = summed.totals
    assert (totals.fastest_rank, totals.median_rank, totals.slowest_rank) == (0, 2, 3)
    assert totals.step_ns == 54 * MS


def test_without_steps_there_is_nothing_to_average() -> None:
    analysis = trace_analysis()
    empty = of_part(replace(analysis, ranks=[replace(rank, steps=[]) for rank in analysis.ranks]))
    assert empty.totals == TraceTotals()
    assert (empty.by_layer, empty.by_rank, empty.verdict, empty.advice) == ([], [], [], [])


def late(fqn: str, step: int, *, issued_ms: int, finished_ms: int, cause: LateCause | None) -> PrefetchRow:
    """An all-gather that the compute stream waited for as long as it came late."""
    stall = max(0, -finished_ms) * MS
    return PrefetchRow(
        rank=0,
        step=step,
        fqn=fqn,
        phase="forward",
        op="all_gather",
        process_group="1",
        issued_before_ns=issued_ms * MS,
        finished_before_ns=finished_ms * MS,
        stall_ns=stall,
        late_ns={cause: stall} if cause else {},
        cause=cause,
    )


def test_late_collectives_longest_wait_first() -> None:
    """Four windows; `a` waits 1 and 3 ms for the host, `b` 8 ms in a queue, `c` was in time."""
    rows = [
        late("a", 3, issued_ms=2, finished_ms=-1, cause="launch"),
        late("a", 4, issued_ms=4, finished_ms=-3, cause="launch"),
        late("b", 3, issued_ms=20, finished_ms=-8, cause="communicator"),
        late("c", 3, issued_ms=9, finished_ms=5, cause=None),
    ]
    summed = of_part(replace(trace_analysis(), prefetch=rows)).late
    assert [
        (
            row.fqn,
            row.cause,
            row.count,
            row.issued_before_ns / MS,
            row.finished_before_ns / MS,
            row.stall_ns / MS,
        )
        for row in summed
    ] == [
        ("b", "communicator", 0.25, 20, -8, 2),
        ("a", "launch", 0.5, 3, -2, 1),
        ("c", None, 0.25, 9, 5, 0),
    ]


def test_late_layers_fold_and_keep_their_sums() -> None:
    """Layers 0-3 wait 1 ms each, layer 4 waits 9 ms and keeps its row."""
    rows = [
        late(f"layers.{i}", 3, issued_ms=i, finished_ms=-9 if i == 4 else -1, cause="launch")
        for i in range(5)
    ]
    summed = of_part(replace(trace_analysis(), prefetch=rows))
    assert [(row.fqn, row.layers, row.count, row.issued_before_ns / MS) for row in summed.late_folded] == [
        ("layers.4", 1, 0.25, 4),
        ("layers.0-3", 4, 1, 1.5),
    ]
    assert sum(row.stall_ns for row in summed.late_folded) == sum(row.stall_ns for row in summed.late)


def test_host_synchronisations_are_summed_over_ranks() -> None:
    """Two ranks block 6 and 2 ms in the same place over four windows: 2 ms a window."""
    row = HostSyncRow(
        rank=0,
        fqn=None,
        phase="other",
        call="cudaStreamSynchronize",
        operator="aten::item",
        count=4,
        blocked_ns=6 * MS,
    )
    rows = [row, replace(row, rank=1, blocked_ns=2 * MS), replace(row, call="cudaMemcpy", blocked_ns=MS)]
    places = of_part(replace(trace_analysis(), host_syncs=rows)).host_sync_places
    assert [(place.call, place.count, place.blocked_ns) for place in places] == [
        ("cudaStreamSynchronize", 2, 2 * MS),
        ("cudaMemcpy", 1, MS / 4),
    ]


# Who waited for whom.


def waits(**caused_ms: int) -> CrossRank:
    """Rank 0 and 2 waited 10 and 20 ms; who caused it is given by rank."""
    caused = {rank.removeprefix("r"): ms * MS for rank, ms in caused_ms.items()}
    return CrossRank(
        match_key="comms_id",
        matched=8,
        unmatched=2,
        wait_ns={"0": 10 * MS, "1": 0, "2": 20 * MS},
        wait_caused_ns=caused,
        stragglers=[
            Straggler(rank=1, fqn="layers.1", wait_caused_ns=27 * MS, cause="its host paused", kind="host")
        ],
    )


def test_who_waited_for_whom_is_data_and_sentences() -> None:
    analysis = of_part(replace(trace_analysis(), cross_rank=waits(r0=2, r1=28, r2=0)))
    cross = analysis.cross_rank
    assert [(row.rank, row.wait_ns / MS, row.wait_caused_ns / MS) for row in cross.ranks] == [
        (1, 0, 28),
        (0, 10, 2),
        (2, 20, 0),
    ]
    assert cross.summary == [
        "8 collectives matched across ranks by comms id, 2 could not be.",
        "The others waited 28.0 ms for rank 1, 93.3% of all waiting, and it 0 ns for them; main cause: its "
        "host paused, at `layers.1`.",
    ]


def test_one_rank_waits_for_nobody() -> None:
    analysis = trace_analysis()
    alone = of_part(replace(analysis, ranks=analysis.ranks[:1]))
    assert alone.cross_rank.summary == []
    unmatched = replace(analysis.cross_rank, match_key=None, matched=0, unmatched=3)
    told = of_part(replace(analysis, cross_rank=unmatched)).cross_rank.summary
    assert told == ["Collectives could not be matched across ranks."]
    silent = replace(unmatched, unmatched=0)
    assert of_part(replace(analysis, cross_rank=silent)).cross_rank.summary == []


# The verdict.


def test_the_verdict_says_what_bounds_a_step_that_needs_no_change() -> None:
    analysis = trace_analysis()
    traced = [
        replace(rank, steps=[replace(step, idle_ns={"profiler": 8 * MS}) for step in rank.steps])
        for rank in analysis.ranks
    ]
    analysis = on_a_gpu(replace(analysis, ranks=traced))
    assert analysis.verdict[0] == "Nothing to fix was found."
    assert analysis.verdict[1] == (
        "A traced step takes 50.0 ms. Most of the step is compute: 30.0 ms (60.0%), "
        "then the first all-gather and the last reduce-scatter (7.00 ms)."
    )


@pytest.mark.parametrize(
    ("causes", "device", "said"),
    [
        ({"host_bound": 8}, "cuda", "The device is idle for 20.0 ms"),
        ({"host_bound": 8}, "cpu", "A traced step takes 50.0 ms. The largest part of the step is Python"),
        ({"device_sync": 5, "memcpy": 3}, "cuda", "The device is idle for 20.0 ms"),
        (
            {"queued": 8},
            "cuda",
            "Launched work waits 20.0 ms (40.0%) per step to start. A traced step takes 50.0 ms.",
        ),
        (
            {"unknown": 8},
            "cuda",
            "Nothing runs for 20.0 ms (40.0%) per step; the trace has no launch that explains it.",
        ),
        ({}, "cuda", "Nothing runs for 20.0 ms (40.0%) per step; the trace has no launch that explains it."),
        (
            {"communication": 8},
            "cpu",
            "A traced step takes 50.0 ms. Most of the step is FSDP's collectives",
        ),
    ],
)
def test_what_a_step_loses_most_is_named_by_its_cause(causes: dict[str, int], device: str, said: str) -> None:
    """Compute 18 ms, exposed 10 ms, copies 2 ms, idle 20 ms."""
    analysis = trace_analysis()
    ranks = [
        replace(
            rank,
            device_type=device,
            steps=[
                replace(
                    step,
                    breakdown_ns=replace(step.breakdown_ns, compute=18 * MS, idle=20 * MS),
                    idle_ns={cause: share * 20 * MS // 8 for cause, share in causes.items()},
                )
                for step in rank.steps
            ],
        )
        for rank in analysis.ranks
    ]
    first, second, *_ = of_part(replace(analysis, ranks=ranks)).verdict
    assert first.startswith(said) or (first.startswith("Nothing to fix") and second.startswith(said))


def test_waiting_that_is_next_to_nothing_is_nobodys() -> None:
    cross = replace(waits(r1=1), wait_ns={"0": MS, "1": 0})
    told = of_part(replace(trace_analysis(), cross_rank=cross)).cross_rank.summary
    assert told[1:] == ["The ranks wait for each other less than 1.0% of their time."]


def test_a_loss_that_nothing_explains_is_named_with_what_would_explain_it() -> None:
    """Idle time of unknown cause leads the verdict at 16 % of the step, and not at 8 %."""
    lost = on_a_gpu(trace_analysis())
    assert lost.verdict[0].startswith("Nothing runs for 8.00 ms (16.0%)")
    assert lost.verdict[1] == "The recording does not show which change would avoid it."
    remedy = LedgerRemedy(change="Do it.", gain_ns=0.0, gain_frac=0.0, basis="unknown", reason="")
    assert lost.ledger is not None
    for one, said in ((replace(remedy, basis="replay"), lost.verdict[1]), (remedy, "Do it.")):
        entries = [
            replace(entry, remedy=one) if entry.cause == "unknown" else entry for entry in lost.ledger.entries
        ]
        found = trace_verdict(replace(lost, ledger=replace(lost.ledger, entries=entries)))
        assert found[1] == said, "what a replay found to gain nothing is not proposed"
    little = [
        replace(
            rank, steps=[replace(one, idle_ns={"profiler": 4 * MS, "unknown": 4 * MS}) for one in rank.steps]
        )
        for rank in trace_analysis().ranks
    ]
    assert on_a_gpu(replace(trace_analysis(), ranks=little)).verdict[0] == "Nothing to fix was found."


@pytest.mark.parametrize("reached", [True, False])
def test_the_ledger_of_summaries_is_that_of_their_findings(reached: bool) -> None:
    """Where no loss reaches a threshold, neither reports one."""
    parts = [
        replace(
            trace_analysis(),
            ranks=[replace(rank, steps=[replace(one, idle_ns={"host_bound": 8 * MS}) for one in rank.steps])],
        )
        for rank in trace_analysis().ranks
    ]
    most = FindingThresholds() if reached else FindingThresholds(host_bound_frac=2)
    merged = merge_results([on_a_gpu(part) for part in parts], [], most)
    assert merged.ledger is not None
    reported = {one.id for one in merged.ledger.entries if one.told}
    assert bool(reported) is reached
    assert reported <= {one.id for one in merged.findings}
