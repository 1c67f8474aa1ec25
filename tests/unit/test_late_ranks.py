"""Who is late: ranks whose collectives begin at chosen times, against what a person would say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.ledger import find
from support.results import trace_analysis
from synthetic import Recording, Schedule, transformer
from synthetic.tables import summary_of
from synthetic.timeline import Collective, Timeline

from fsdp2prof.analyzers.ranks import comparison as ranks
from fsdp2prof.results.communication import CrossRank, LateRanks
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.trace import TraceAnalysis

MS = 1_000_000
SCHEDULE = Schedule(roots=(transformer(1),))


def compared(steps: Sequence[Sequence[Sequence[int]]], world: int | None = None) -> CrossRank:
    """Compare ranks: per step and collective, how many ms late each rank enters it; all leave together.

    ``world`` is the size of the group, by default the number of ranks there are.
    """
    count = len(steps[0][0])
    timelines = [Timeline(rank) for rank in range(count)]
    at, seq = 0, 0
    for step, collectives in enumerate(steps):
        for lateness in collectives:
            at, seq = at + 1_000 * MS, seq + 1
            for timeline, late in zip(timelines, lateness, strict=True):
                timeline.collectives.append(
                    Collective(
                        op="all_reduce",
                        fqn=None,
                        phase="backward",
                        step=step,
                        group="0",
                        mesh_dim=None,
                        dtype="Float",
                        payload_bytes=4_000,
                        ranks=tuple(range(world or count)),
                        seq=seq,
                        comms_id=seq,
                        issue=at + late * MS - 10,
                        start=at + late * MS,
                        end=at + 500 * MS,
                    )
                )
    recordings = [Recording(rank, count, SCHEDULE, timeline) for rank, timeline in enumerate(timelines)]
    return ranks.match([summary_of(recording) for recording in recordings]).result


def late(steps: Sequence[Sequence[Sequence[int]]]) -> LateRanks:
    found = compared(steps).late
    assert found is not None
    return found


def on_gpus(cross: CrossRank, count: int) -> TraceAnalysis:
    """``count`` ranks of two 50 ms steps, half of which is exposed communication."""
    analysis = trace_analysis()
    rank = replace(analysis.ranks[0], device_type="cuda")
    exposed = replace(rank.communication, exposed_ns=10**12)
    every = [replace(rank, rank=i, communication=exposed) for i in range(count)]
    return replace(analysis, ranks=every, cross_rank=cross, findings=[], prefetch=[])


def told(cross: CrossRank, count: int) -> list[Finding]:
    found = find(on_gpus(cross, count))
    return [one for one in found if one.id in ("straggler", "ranks_take_turns", "late_rank_unclear")]


def test_a_rank_late_in_every_step_is_slow() -> None:
    found = late([[[0, 3, 0, 0]]] * 3)
    assert [(one.rank, one.wait_caused_ns, one.wait_ns, one.late_steps) for one in found.ranks] == [
        (1, 27 * MS, 0, 3)
    ]
    assert (found.compared, found.steps, found.late_steps, found.explained_frac) == (4, 3, 3, 1.0)
    assert found.chance == pytest.approx(4 * (1 / 4) ** 3), "one of four, three times the same"
    assert found.steady


@pytest.mark.parametrize(("steps", "steady"), [(1, False), (4, False), (5, True), (10, True)])
def test_two_ranks_need_five_steps_to_tell_a_slow_one_from_chance(steps: int, steady: bool) -> None:
    found = late([[[0, 9], [1, 0]]] * steps)
    assert (found.steady, found.steps_needed) == (steady, 5)
    assert found.chance == pytest.approx(2 * 0.5**steps)


def test_a_rank_that_causes_nearly_all_waiting_of_three_steps_needs_no_more() -> None:
    assert late([[[0, 3]]] * 3).steady
    assert not late([[[0, 3]]] * 2).steady
    assert not late([[[0, 9], [1, 0]]] * 3).steady, "a tenth of the waiting is for rank 0"


def test_with_too_few_steps_nobody_is_accused_and_the_missing_steps_are_named() -> None:
    (found,) = told(compared([[[0, 9], [1, 0]]] * 3), 2)
    assert found.id == "late_rank_unclear"
    assert (
        "for rank 1, late in 3 of 3 steps: too few steps to distinguish a slow rank from coincidence"
        in found.message
    )
    assert "at least 5 steps" in found.change


def test_one_long_hiccup_is_no_slow_rank() -> None:
    """Rank 2 is 40 ms late in one step of six, and nobody in the others."""
    usual = [[[0, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 1]]]
    hiccup = [usual[0], [[0, 0, 40, 0]], *usual[1:], *usual[:2]]
    cross = compared(hiccup)
    assert cross.late is not None
    assert not cross.late.steady
    (found,) = told(cross, 4)
    assert found.id == "ranks_take_turns"
    assert "no rank is late in most steps" in found.message


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_that_take_turns_are_not_accused(count: int) -> None:
    """Each rank is late in as many steps as any other."""
    turns = [[[3 * (rank == step % count) for rank in range(count)]] for step in range(2 * count)]
    cross = compared(turns)
    assert cross.late is None
    (found,) = told(cross, count)
    assert found.id == "ranks_take_turns"
    assert "no rank is late in most steps" in found.message


def test_two_slow_ranks_are_both_named_though_each_waits_for_the_other() -> None:
    """Ranks 2 and 5 of 8 come late by turns: the second waits nearly as much as the others do for it."""
    step = [
        [0, 0, 9, 0, 0, 7, 0, 0],
        [0, 0, 7, 0, 0, 8, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 2],
    ]
    cross = compared([step] * 3)
    assert cross.late is not None
    assert {one.rank for one in cross.late.ranks} == {2, 5}
    assert cross.late.steady
    caused = sum(cross.wait_caused_ns[str(rank)] for rank in (2, 5))
    assert cross.late.explained_frac == pytest.approx(caused / sum(cross.wait_ns.values()))
    assert cross.late.explained_frac > 0.8
    found = told(cross, 8)
    blamed = [str(one.evidence["rank"]) for one in found if one.id == "straggler"]
    assert sorted(blamed) == ["2", "5"]
    assert "With rank 5 it causes" in next(one for one in found if one.evidence.get("rank") == 2).message
    assert not any("no single one" in one.message for one in found)


def test_waiting_is_known_only_where_all_ranks_of_a_group_are_there() -> None:
    steps = [[[0, 3]]] * 2
    assert compared(steps).waits_unknown_ns == 0
    missing = compared(steps, world=8)
    assert missing.matched == 2
    assert missing.waits_unknown_ns == sum(500 * MS + 497 * MS for _ in steps)
