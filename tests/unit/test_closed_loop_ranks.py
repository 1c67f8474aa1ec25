"""Simulated ranks with skewed clocks, written to files, and compared by the whole pipeline."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import Activity, Recording, Schedule, record, transformer, truth_of, write, write_run
from synthetic.strategies import schedules

from fsdp2prof.results.communication import CrossRank
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

SKEWS = (0, 5_000_123, -72_000_456, 911)
BASE = Schedule(roots=(transformer(3),))


def compared(recordings: list[Recording], folder: Path, **options: bool) -> CrossRank:
    return analyze_trace(open_job(write_run(recordings, folder, **options)), workers=1).cross_rank


def waits_of(recordings: list[Recording]) -> dict[str, int]:
    return {str(r.rank): sum(c.latest_start - c.start for c in r.timeline.collectives) for r in recordings}


@pytest.mark.parametrize(
    ("known", "key"),
    [({}, "comms_id"), ({"comms": False}, "seq"), ({"comms": False, "seq": False}, "order")],
)
def test_waits_are_exact_under_skewed_clocks(known: dict[str, bool], key: str, tmp_path: Path) -> None:
    recordings = record(BASE, BASE.scaled(1.4, "layers.1"), BASE, BASE, skews=SKEWS)
    found = compared(recordings, tmp_path / "run", **known)
    assert (found.match_key, found.matched, found.unmatched) == (key, 22, 0)
    assert found.wait_ns == waits_of(recordings)
    assert found.clock_offset_ns == {f"rank {i}": skew for i, skew in enumerate(SKEWS)}


@pytest.mark.parametrize(
    ("slow", "fqn", "kind"),
    [
        (BASE.scaled(1.4, "layers.1"), "layers.1", "kernel"),
        (BASE.changed("layers.2", backward_ns=2_000_000), "layers.2", "kernel"),
        (BASE.changed("layers.2", late_ns=3_000_000), "layers.2", "host"),
        (BASE.changed("layers.1", late_backward_ns=4_000_000), "layers.1", "host"),
    ],
)
def test_stragglers_are_named_with_layer_and_work(
    slow: Schedule, fqn: str, kind: str, tmp_path: Path
) -> None:
    found = compared(record(BASE, BASE, slow, BASE, skews=SKEWS), tmp_path / "run")
    worst = found.stragglers[0]
    assert (worst.rank, worst.fqn, worst.kind) == (2, fqn, kind)
    assert worst.wait_caused_ns > 0.98 * found.wait_caused_ns["2"], "and nothing else is blamed"


def test_a_late_step_is_unexplained_once_and_then_the_host(tmp_path: Path) -> None:
    """What a rank did before its first recorded collective is not in the trace; later causes are."""
    late = BASE.changed("", late_ns=15_000_000)
    found = compared(record(BASE, BASE, late, BASE, skews=SKEWS), tmp_path / "run")
    causes = {(worst.rank, worst.fqn, worst.kind): worst.cause for worst in found.stragglers[:2]}
    assert causes == {
        (2, "", "unknown"): "it was late when the recording began",
        (2, "", "host"): "its host launched nothing for longer than the other hosts",
    }


@pytest.mark.parametrize("head", [True, False])
def test_hsdp_ranks_meet_in_two_kinds_of_groups(head: bool, tmp_path: Path) -> None:
    """Groups of different ranks share a name; without the file's head the collectives tell their ranks."""
    hsdp = Schedule(roots=(transformer(2),), shard=2, replicas=2)
    recordings = record(hsdp, hsdp, hsdp.scaled(1.3), hsdp, skews=SKEWS)
    found = compared(recordings, tmp_path / "run", head=head)
    assert (found.unmatched, found.matched_by) == (0, {"comms_id": 2 * 22})
    assert found.wait_ns == waits_of(recordings)
    assert found.stragglers[0].rank == 2


def test_a_rank_late_because_it_waited_elsewhere_is_not_blamed_for_work(tmp_path: Path) -> None:
    """Rank 3 shards with slow rank 2 and replicates with rank 1: it makes rank 1 wait in turn."""
    hsdp = Schedule(roots=(transformer(3),), shard=2, replicas=2)
    found = compared(record(hsdp, hsdp, hsdp.scaled(1.5, "layers.1"), hsdp, skews=SKEWS), tmp_path / "run")
    kinds = {(s.rank, s.kind) for s in found.stragglers if s.wait_caused_ns > 100_000}
    assert (2, "kernel") in kinds
    assert (3, "communication") in kinds
    assert (3, "kernel") not in kinds
    assert (3, "host") not in kinds


def test_a_collective_lost_by_one_rank_is_reported_and_shifts_nothing(tmp_path: Path) -> None:
    recordings = record(BASE, BASE.scaled(1.4, "layers.1"), BASE, BASE, skews=SKEWS)
    lost = recordings[0].timeline.collectives[9]

    def keep(activity: Activity) -> bool:
        return activity.collective is not lost

    folder = write_run(recordings, tmp_path / "run")
    write(recordings[0], folder / "rank0_trace.json.gz", keep=keep)
    found = analyze_trace(open_job(folder), workers=1).cross_rank
    assert (found.matched, found.unmatched_reasons) == (21, {"missing on some rank": 1})
    for recording in recordings:
        missing = recording.timeline.collectives[9]
        rest = waits_of([recording])[str(recording.rank)] - (missing.latest_start - missing.start)
        assert found.wait_ns[str(recording.rank)] == rest


def test_processes_give_the_same_answer(tmp_path: Path) -> None:
    folder = write_run(record(BASE, BASE, skews=SKEWS[:2]), tmp_path / "run")
    assert analyze_trace(open_job(folder), workers=2) == analyze_trace(open_job(folder), workers=1)


@settings(max_examples=25, deadline=None)
@given(
    schedule=schedules(),
    factors=st.lists(st.sampled_from([1.0, 1.3]), min_size=2, max_size=4),
    skew=st.integers(-(10**12), 10**12),
)
def test_any_ranks_are_recovered(schedule: Schedule, factors: list[float], skew: int) -> None:
    """However slow they are: their steps, their waits, and every wait charged to a rank exactly once."""
    ranks = [schedule.scaled(factor) for factor in factors[: schedule.shard * schedule.replicas]]
    recordings = record(*ranks, skews=[skew * rank for rank in range(len(ranks))])
    with tempfile.TemporaryDirectory() as folder:
        found = analyze_trace(open_job(write_run(recordings, Path(folder) / "run")), workers=1)
    for recording, rank in zip(recordings, found.ranks, strict=True):
        truth = {step: answer.breakdown_ns for step, answer in truth_of(recording).steps.items()}
        assert {step.step: asdict(step.breakdown_ns) for step in rank.steps} == truth
        met = [c for c in recording.timeline.collectives if sum(r < len(ranks) for r in c.ranks) > 1]
        assert found.cross_rank.wait_ns.get(str(rank.rank), 0) == sum(c.latest_start - c.start for c in met)
    cross = found.cross_rank
    assert sum(cross.wait_caused_ns.values()) == sum(cross.wait_ns.values())
    for rank_number, caused in cross.wait_caused_ns.items():
        assert sum(s.wait_caused_ns for s in cross.stragglers if str(s.rank) == rank_number) <= caused
    assert found.attribution.attributed == found.attribution.collectives
