"""A run of many ranks and 128 layers in which every number differs: no page has more to hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from random import Random

from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.results.communication import PrefetchRow
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.step import RankTimeline, StepTimeline, TimelineLane, TimelineStall
from support.results import group, run_analysis, trace_analysis

__all__ = ["KINDS", "LAYERS", "large_run"]

LAYERS = [f"layers.{i}" for i in range(128)]
KINDS = (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
SPANS = {"host": 300, "compute": 300, "fsdp_copy": 150, "all_gather": 150, "reduce_scatter": 100}
"""A thousand a rank: as many as a timeline of 64 ranks holds."""
STALLS = 1000
"""Of all ranks, as many as a timeline holds."""


def large_run(ranks: int) -> RunAnalysis:
    """Every rank with its own times of every collective, which compress badly."""
    random = Random(ranks)
    base, run = trace_analysis(), run_analysis()
    one = replace(base.ranks[0], steps=base.ranks[0].steps[:1])
    groups, prefetch = [], []
    for rank in range(ranks):
        for fqn in LAYERS:
            for op, phase in KINDS:
                stall = random.randrange(3_000_000)
                row = group(fqn, op, rank, 3, exposed_ms=1, phase=phase)
                groups.append(replace(row, exposed_ns=random.randrange(4_000_000)))
                prefetch.append(
                    PrefetchRow(
                        rank=rank,
                        step=3,
                        fqn=fqn,
                        phase=phase,
                        op=op,
                        process_group="1",
                        issued_before_ns=random.randrange(9_000_000),
                        finished_before_ns=-stall,
                        stall_ns=stall,
                        late_ns={"launch": stall},
                        cause="launch",
                    )
                )
    trace = replace(
        base,
        ranks=[replace(one, rank=rank) for rank in range(ranks)],
        groups=groups,
        prefetch=prefetch,
        timeline=timeline(random, ranks),
    )
    assert run.memory is not None
    fullest, left = run.memory.ranks[0], run.run.ranks[0]
    memory = replace(run.memory, ranks=[replace(fullest, rank=rank) for rank in range(ranks)])
    what = replace(run.run, ranks=[replace(left, rank=rank) for rank in range(ranks)], world_size=ranks)
    return replace(run, trace=of_part(trace), memory=memory, run=what)


def timeline(random: Random, ranks: int) -> StepTimeline:
    shown = min(ranks, 64)
    return StepTimeline(
        step=3, duration_ns=10**9, aligned=True, resolution_ns=20_000, layers=[*LAYERS],
        phases=["forward", "backward"], names=[f"kernel_{i}" for i in range(60)],
        ranks=[
            RankTimeline(
                rank=rank, start_ns=0, duration_ns=10**9, stalls=stalls(random, STALLS // shown),
                lanes=[lane(random, name, count) for name, count in SPANS.items()],
            )
            for rank in range(shown)
        ],
        ranks_left_out=ranks - shown, stalls_left_out=0,
    )  # fmt: skip


def lane(random: Random, name: str, count: int) -> TimelineLane:
    edges = list(accumulate(random.randrange(1, 400_000) for _ in range(2 * count)))
    starts = edges[::2]
    durations = [end - start for start, end in zip(starts, edges[1::2], strict=True)]
    is_collective = name in ("all_gather", "reduce_scatter")
    return TimelineLane(
        lane=name,
        start_ns=starts,
        duration_ns=durations,
        busy_ns=[length - random.randrange(1 + length // 9) for length in durations],
        count=[random.randrange(1, 30) for _ in durations],
        layer=[i % len(LAYERS) for i in range(count)],
        phase=[i * 2 // count for i in range(count)],
        name=[random.randrange(60) for _ in durations],
        payload_bytes=[436_224_000] * count if is_collective else [],
        peer_wait_ns=[random.randrange(1 + length) for length in durations] if is_collective else [],
    )


def stalls(random: Random, count: int) -> list[TimelineStall]:
    found = []
    for i in range(count):
        needed, length = random.randrange(10**8), random.randrange(1, 3_000_000)
        found.append(
            TimelineStall(
                lane="all_gather", fqn=LAYERS[i % len(LAYERS)], phase="forward", start_ns=needed // 2,
                end_ns=needed + length, needed_ns=needed, stall_ns=length, cause="launch",
            )
        )  # fmt: skip
    return found
