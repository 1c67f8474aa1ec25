"""Laws of a replay: no change gains more than the busiest stream or the host allows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import Layer, Schedule, record, transformer, write
from synthetic.strategies import schedules

from fsdp2prof.analyzers.trace.analysis import analyze_tables, merge
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.whatif.changes import (
    Change,
    Changed,
    NotApplicableError,
    parse_change,
    parse_without,
    single_changes,
)
from fsdp2prof.analyzers.whatif.program import Job
from fsdp2prof.analyzers.whatif.recorded import program_of
from fsdp2prof.analyzers.whatif.run import Pace, Ran, RankRun, mean_step_ns, run
from fsdp2prof.analyzers.whatif.what_if import replay_job
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.tables.columns import BoolArray
from fsdp2prof.tables.trace import Trace

_LAYER = Layer(
    fqn="layers.0",
    numel=4,
    forward_ns=100_757,
    backward_ns=110_084,
    all_gather_ns=1,
    reduce_scatter_ns=1,
    all_reduce_ns=1,
    copy_ns=1,
    kernels=3,
    host_ns=12_003,
)
_BEHIND_A_CAST = Schedule(
    roots=((transformer(1)[0], _LAYER),),
    shard=2,
    replicas=2,
    reduce_dtype="Float",
    input_stream=True,
    labels="launch",
    unshard_async_op=True,
    user_ranges=True,
    steps=3,
    optimizer_ns=1,
    input_ns=1,
)
"""Where launches are lost, work of no known step ends as the first analysed step begins."""
REMOVED = ("without host_syncs", "without data_loader", "without straggler:0", "without straggler:1")
QUICKER = ("bandwidth=2x", "bandwidth=inf", "compute=1.2x", "compute=3x")


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[Schedule], float]:
    """One to four ranks, others slower than the first or later than it; and the part of launches lost."""
    first = draw(schedules())
    ranks = [first]
    for _ in range(draw(st.integers(0, min(3, first.shard * first.replicas - 1)))):
        other = first.scaled(draw(st.sampled_from([1.0, 1.3, 2.0])))
        ranks.append(replace(other, loading_ns=draw(st.sampled_from([0, 0, 2_000_000]))))
    lost = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return ranks, lost


def without_launches(trace: Trace, part: float) -> Trace:
    """Return a trace that no longer says who launched some of the device's work, as a trimmed capture."""
    events = trace.events
    launches = (events.thread >= 0) & events.name.matches(lambda name: name.startswith(("cuda", "hip", "cu")))
    lost = launches & (np.random.default_rng(0).random(len(events)) < part)
    return replace(trace, events=events.with_columns(correlation=np.where(lost, -1, events.correlation)))


def job_of(ranks: list[Schedule], lost: float, folder: Path) -> tuple[Job, float]:
    """Return ranks ready to be run again, and the mean step by the analysis."""
    programs, analyses = [], []
    for recording in record(*ranks):
        path = write(recording, folder / f"rank{recording.rank}_trace.json")
        tables = rank_tables(without_launches(read_trace(path, workers=1), lost))
        analysis = analyze_tables(tables, default_rank=recording.rank)
        programs.append((program_of(tables, analysis.summary), analysis.summary))
        analyses.append(analysis)
    return replay_job(programs).job, merge(analyses).totals.step_ns or 0.0


def changed(job: Job, *changes: Change) -> tuple[Changed, Ran] | None:
    made = Changed(job=job, pace=Pace(), memory_bytes=0)
    try:
        for change in changes:
            made = change.apply(made)
    except NotApplicableError:
        return None
    return made, run(made.job, made.pace)


def busy(ran: RankRun, stream: int) -> int:
    """Time in which a stream runs anything but collectives, which may only wait, and copies to the host."""
    table = ran.program.activities
    counted = (table.stream == stream) & ~table.kind.equals("collective") & ~table.role.equals("to_host")
    rows = np.flatnonzero(counted & analysed(ran))
    mine = zip(ran.started[rows].tolist(), ran.ended[rows].tolist(), strict=True)
    total = reached = 0
    for begin, end in sorted(mine):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def analysed(ran: RankRun) -> BoolArray:
    """Mask of the launched activities of the analysed steps; all if no activity has a step."""
    step = ran.program.activities.step
    labelled = bool((step[: ran.program.recorded] >= 0).any())
    return ran.program.launched & (np.isin(step, ran.program.steps) if labelled else True)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recorded=recordings(), mixed=st.randoms(use_true_random=False))
def test_no_change_breaks_a_law(
    recorded: tuple[list[Schedule], float], mixed: random.Random, tmp_path: Path
) -> None:
    """Changes one by one, and some of them together in any order."""
    job, step_ns = job_of(*recorded, tmp_path)
    before = run(job)
    assert mean_step_ns(before) == step_ns
    single = [
        *single_changes(job),
        *(parse_without(text.removeprefix("without ")) for text in REMOVED[2:] if len(job) > 1),
        *map(parse_change, QUICKER),
    ]
    tried = [[one] for one in single] + [mixed.sample(single, min(3, len(single))) for _ in range(4)]
    for changes in tried:
        made = changed(job, *changes)
        if made is not None:
            assert_laws(changes, before, made[1], recorded[1])


def assert_laws(changes: list[Change], before: Ran, after: Ran, lost: float) -> None:
    names = " and ".join(change.text for change in changes)
    shorter = all(change.text in REMOVED + QUICKER for change in changes)
    removed = all(change.text in REMOVED for change in changes)
    for old, new in zip(before.ranks, after.ranks, strict=True):
        rank = frozenset({new.program.rank})
        step = mean_step_ns(after, rank)
        streams = set(new.program.activities.stream[new.program.launched].tolist())
        whole = step * len(new.program.steps)
        assert whole >= max(busy(new, stream) for stream in streams), names
        if shorter:
            assert step <= mean_step_ns(before, rank), names
        if removed:
            assert all(busy(new, stream) >= busy(old, stream) for stream in streams), names
            assert lost or whole >= host_work(new), names


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recorded=recordings(), kind=st.sampled_from(["bandwidth", "compute"]))
@example(recorded=([_BEHIND_A_CAST], 0.3), kind="compute")
def test_faster_is_never_slower(recorded: tuple[list[Schedule], float], kind: str, tmp_path: Path) -> None:
    job, _ = job_of(*recorded, tmp_path)
    steps = []
    for times in ("1.1x", "1.5x", "2x", "8x"):
        made = changed(job, parse_change(f"{kind}={times}"))
        steps.append(mean_step_ns(made[1]) if made else 0.0)
    assert steps == sorted(steps, reverse=True)


def host_work(ran: RankRun) -> int:
    """The host's own work between the first and the last launch of the analysed steps."""
    points, table = ran.program.points, ran.program.activities
    launching = np.flatnonzero(np.append(analysed(ran), False)[points.launches])
    first = launching[np.argmin(ran.started[points.launches[launching]])]
    early = (-table.early[ran.program.launched]).max()
    return int(points.work_ns[first + 1 : launching[-1] + 1].sum() - early)


@pytest.mark.parametrize("text", ["without host_syncs", "bandwidth=inf"])
def test_the_report_of_a_stream_that_is_always_busy_gains_next_to_nothing(text: str, tmp_path: Path) -> None:
    """Half of the launches are unknown: their order on the stream is not."""
    layers = transformer(4, sync=True, all_gather_ns=1_003, reduce_scatter_ns=1_007, host_ns=0)
    job, step_ns = job_of([Schedule(roots=(layers,), steps=2)], 0.5, tmp_path)
    change = parse_without("host_syncs") if text.startswith("without") else parse_change(text)
    made = changed(job, change)
    assert made is not None
    after = made[1].ranks[0]
    least = max(busy(after, stream) for stream in set(job[0].activities.stream.tolist()))
    assert least / 2 <= mean_step_ns(made[1]) <= step_ns
