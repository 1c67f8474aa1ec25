"""Tables behind the breakdown: late collectives, bandwidth, host synchronisations, idle causes, speed."""

from __future__ import annotations

from dataclasses import replace

from support.results import MIB, MS, trace_analysis

from fsdp2prof.reporters.cause_grids import bandwidth_grid, late_grid, sync_grid
from fsdp2prof.reporters.trace_grids import breakdown_grid
from fsdp2prof.results import BandwidthRow, HostSyncRow, LateCause, PrefetchRow, Throughput
from fsdp2prof.units import format_flops


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
    analysis = replace(trace_analysis(), prefetch=rows)
    grid = late_grid(analysis)
    assert grid is not None
    assert [list(row) for row in grid.rows] == [
        ["b", "forward", "all-gather", "0.2", "20.00", "-8.00", "2.00", "queued behind another collective"],
        ["a", "forward", "all-gather", "0.5", "3.00", "-2.00", "1.00", "began too late to hide"],
    ]
    every = late_grid(analysis, every=True)
    assert every is not None
    assert list(every.rows[-1]) == ["c", "forward", "all-gather", "0.2", "9.00", "5.00", "0", "in time"]
    assert late_grid(replace(analysis, prefetch=rows[3:])) is None


def test_bandwidth_most_bytes_first() -> None:
    row = BandwidthRow(
        op="all_gather",
        process_group="7",
        mesh_dim=None,
        group_size=8,
        dtype="bfloat16",
        payload_bytes=MIB,
        count=10,
        algbw_bytes_per_s=20e9,
        busbw_bytes_per_s=17.5e9,
        best_busbw_bytes_per_s=18e9,
        of_best_frac=0.5,
    )
    large = replace(row, payload_bytes=64 * MIB, count=1, busbw_bytes_per_s=None, of_best_frac=None)
    grid = bandwidth_grid(replace(trace_analysis(), bandwidth=[row, large]))
    assert grid is not None
    assert [list(cells) for cells in grid.rows] == [
        ["all-gather", "7", "8", "bf16", "64.0 MiB", "1", "20.00", "-", "-"],
        ["all-gather", "7", "8", "bf16", "1.00 MiB", "10", "20.00", "17.50", "50.0%"],
    ]
    with_peak = bandwidth_grid(replace(trace_analysis(), bandwidth=[replace(row, of_peak_frac=0.04)]))
    assert with_peak is not None
    assert with_peak.rows[0][-1] == "4.0%"


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
    grid = sync_grid(replace(trace_analysis(), host_syncs=[row, replace(row, rank=1, blocked_ns=2 * MS)]))
    assert grid is not None
    assert [list(cells) for cells in grid.rows] == [
        ["(no layer)", "other", "cudaStreamSynchronize", "aten::item", "2.0", "2.00 ms"]
    ]
    assert sync_grid(trace_analysis()) is None


def test_idle_time_and_speed_are_explained_under_the_breakdown() -> None:
    analysis = trace_analysis()
    speed = Throughput(step_ns=50 * MS, tokens_per_s=80_000.0, flops_per_s=2.5e14, mfu=0.25)
    ranks = [
        replace(
            rank,
            throughput=speed,
            steps=[replace(step, idle_ns={"host_bound": 6 * MS, "queued": 2 * MS}) for step in rank.steps],
        )
        for rank in analysis.ranks
    ]
    grid = breakdown_grid(replace(analysis, ranks=ranks))
    assert grid is not None
    assert list(grid.remarks) == [
        "Idle: 6.00 ms nothing launched in time; 2.00 ms launched, not yet started.",
        "Speed: 80,000 tokens/s over all ranks, 250.00 TFLOP/s a rank, MFU 25.0%.",
    ]


def test_a_small_models_speed_is_not_nothing() -> None:
    assert format_flops(3.1e9) == "3.10 GFLOP/s"
    assert format_flops(1.2345e15) == "1,234.50 TFLOP/s"
