"""Ranks compared: on simulated ranks whose waits, clocks and delays are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import Recording, Schedule, record, transformer
from synthetic.tables import summary_of
from synthetic.timeline import Collective, Timeline

from fsdp2prof.analyzers.ranks import comparison as ranks
from fsdp2prof.analyzers.ranks.summary import RankSummary

SKEWS = (0, 5_000_123, -72_000_456, 911)
"""Clock errors of four ranks, the first one's taken as the reference."""
BASE = Schedule(roots=(transformer(3),))


def waits_of(recording: Recording) -> int:
    return sum(c.latest_start - c.start for c in recording.timeline.collectives)


def four_ranks(slow: Schedule) -> list[Recording]:
    return record(BASE, BASE, slow, BASE, skews=SKEWS)


@pytest.mark.parametrize(
    ("hidden", "key"),
    [({}, "comms_id"), ({"comms": False}, "seq"), ({"comms": False, "seq": False}, "order")],
)
def test_waits_and_clocks_are_recovered_exactly_by_each_key(hidden: dict[str, Any], key: str) -> None:
    recordings = four_ranks(BASE.scaled(1.5, "layers.1"))
    found = ranks.match([summary_of(r, **hidden) for r in recordings]).result
    assert found.match_key == key
    assert (found.matched, found.unmatched) == (len(recordings[0].timeline.collectives), 0)
    assert found.clock_offset_ns == {f"rank {i}": skew for i, skew in enumerate(SKEWS)}
    assert found.wait_ns == {str(r.rank): waits_of(r) for r in recordings}
    assert found.end_spread_ns == 0
    assert sum(found.wait_caused_ns.values()) == sum(found.wait_ns.values()) > 0


def test_clock_is_shared_by_the_ranks_of_a_host() -> None:
    recordings = record(BASE, BASE, BASE, BASE, skews=(7, 7, 4_000, 4_000))
    found = ranks.match([summary_of(r, host=f"node{r.rank // 2}") for r in recordings]).result
    assert found.clock_offset_ns == {"node0": 0, "node1": 3_993}


def test_slow_layer_is_named_with_its_kernel() -> None:
    found = ranks.match([summary_of(r) for r in four_ranks(BASE.scaled(1.5, "layers.1"))]).result
    worst = found.stragglers[0]
    assert (worst.rank, worst.fqn, worst.kind) == (2, "layers.1", "kernel")
    assert worst.cause is not None
    assert "sm90_xmma_gemm" in worst.cause
    others = sum(caused for rank, caused in found.wait_caused_ns.items() if rank != "2")
    assert others < found.wait_caused_ns["2"] / 10


def test_late_host_is_told_from_slow_kernels() -> None:
    late = BASE.changed("layers.2", late_ns=3_000_000)
    found = ranks.match([summary_of(r) for r in four_ranks(late)]).result
    worst = found.stragglers[0]
    assert (worst.rank, worst.fqn, worst.kind) == (2, "layers.2", "host")


def test_transfer_and_busbw_leave_the_waiting_out() -> None:
    recordings = four_ranks(BASE.scaled(1.5, "layers.1"))
    found = ranks.match([summary_of(r) for r in recordings]).result
    (row,) = [g for g in found.groups if (g.fqn, g.phase, g.op) == ("layers.2", "forward", "all_gather")]
    transfer = 2 * 120_013
    assert row.count == 2
    assert row.transfer_ns == transfer
    assert row.busbw_bytes_per_s == pytest.approx(2 * 8_000_000 * 3 / 4 / (transfer / 1e9))
    slow_rank = [
        c for c in recordings[0].timeline.collectives if c.fqn == "layers.2" and c.phase == "forward"
    ]
    assert row.wait_ns >= sum(c.latest_start - c.start for c in slow_rank)


def test_lost_collective_is_reported_and_shifts_nothing() -> None:
    recordings = four_ranks(BASE.scaled(1.5, "layers.1"))
    lost = recordings[1].timeline.collectives[4]
    summaries = [summary_of(r, keep=lambda c: c is not lost) for r in recordings]
    found = ranks.match(summaries)
    assert found.result.unmatched_reasons == {"missing on some rank": 1}
    assert found.result.matched == len(recordings[0].timeline.collectives) - 1
    for recording in recordings:
        missing = recording.timeline.collectives[4]
        rest = waits_of(recording) - (missing.latest_start - missing.start)
        assert found.result.wait_ns[str(recording.rank)] == rest


def test_without_identifiers_a_lost_collective_refuses_its_step() -> None:
    """11 collectives a step: the first step is refused whole, the second is matched by order."""
    recordings = four_ranks(BASE.scaled(1.5, "layers.1"))
    lost = recordings[1].timeline.collectives[4]
    found = ranks.match(
        [summary_of(r, keep=lambda c: c is not lost, seq=False, comms=False) for r in recordings]
    )
    assert (found.result.match_key, found.result.matched, found.result.unmatched) == ("order", 11, 11)
    assert len(found.warnings) == 1
    assert "process group 1" in found.warnings[0]
    assert "in step 3 their number, kinds or sizes differ" in found.warnings[0]
    for recording in recordings:
        second = [c for c in recording.timeline.collectives if c.step == 4]
        assert found.result.wait_ns[str(recording.rank)] == sum(c.latest_start - c.start for c in second)


def test_without_identifiers_ranks_that_recorded_other_steps_match_the_common_one() -> None:
    first, second = record(*[replace(BASE, steps=3)] * 2)
    early = summary_of(first, keep=lambda c: c.step < 5, seq=False, comms=False)
    found = ranks.match([early, summary_of(second, seq=False, comms=False)]).result
    assert (found.match_key, found.matched, found.unmatched) == ("order", 22, 11)


def test_ranks_that_disagree_about_a_collective_are_not_compared_on_it() -> None:
    other = BASE.changed("layers.1", numel=8)
    found = ranks.match([summary_of(r) for r in record(BASE, BASE, BASE, other)]).result
    assert found.unmatched_reasons == {"ranks disagree about kind, type or size": 6}


def test_hsdp_groups_with_equal_names_are_kept_apart_by_their_ranks() -> None:
    hsdp = Schedule(roots=(transformer(2),), shard=2, replicas=2)
    recordings = record(*[hsdp] * 4, skews=SKEWS)
    assert {r.timeline.collectives[0].group for r in recordings} == {"1"}
    found = ranks.match([summary_of(r) for r in recordings]).result
    assert found.unmatched == 0
    assert found.clock_offset_ns == {f"rank {i}": skew for i, skew in enumerate(SKEWS)}
    per_rank = len(recordings[0].timeline.collectives)
    assert found.matched == per_rank * 2


def test_ranks_without_a_common_group_have_unknown_clocks() -> None:
    hsdp = Schedule(roots=(transformer(2),), shard=2, replicas=2)
    recordings = record(*[hsdp] * 4)
    alone = [summary_of(r, keep=lambda c: c.op != "all_reduce") for r in (recordings[0], recordings[3])]
    found = ranks.match(alone).result
    assert (found.match_key, found.matched, found.unmatched) == (None, 0, 0)


def test_one_rank_is_compared_with_nobody() -> None:
    (recording,) = record(BASE)
    found = ranks.match([summary_of(recording)])
    assert (found.result.match_key, found.result.matched, found.result.wait_ns) == (None, 0, {})
    assert set(found.wait_ns[0]) == {-1}


def test_two_ranks_in_any_order_give_the_same_answer() -> None:
    recordings = four_ranks(BASE.scaled(1.5, "layers.1"))
    forwards = ranks.match([summary_of(r) for r in recordings]).result
    backwards = ranks.match([summary_of(r) for r in reversed(recordings)]).result
    assert forwards == backwards


def collective(rank_start: int, rank_end: int, op: str, seq: int) -> Collective:
    return Collective(
        op=op,
        fqn="",
        phase="other",
        step=0,
        group="0",
        mesh_dim=None,
        dtype="Float",
        payload_bytes=4_000,
        ranks=(0, 1),
        seq=seq,
        comms_id=seq,
        issue=rank_start - 10,
        start=rank_start,
        end=rank_end,
    )


def rank_with(rank: int, *collectives: Collective) -> RankSummary:
    timeline = Timeline(rank)
    timeline.collectives = list(collectives)
    return summary_of(Recording(rank, 2, BASE, timeline))


def test_broadcast_whose_root_left_early_has_no_transfer_and_does_not_move_the_clocks() -> None:
    """The root is done at 200 before the receiver comes at 900; the all-reduce says clocks agree to 3 ns."""
    root = rank_with(0, collective(100, 200, "broadcast", 1), collective(1_000, 1_500, "all_reduce", 2))
    receiver = rank_with(1, collective(900, 950, "broadcast", 1), collective(1_203, 1_503, "all_reduce", 2))
    found = ranks.match([root, receiver]).result
    assert found.clock_offset_ns == {"rank 0": 0, "rank 1": 3}
    rows = {row.op: row for row in found.groups}
    assert (rows["broadcast"].transfer_ns, rows["broadcast"].busbw_bytes_per_s) == (None, None)
    assert rows["broadcast"].wait_ns == 100, "no longer than the root was in it"
    assert rows["all_reduce"].wait_ns == 200
    assert rows["all_reduce"].transfer_ns == 300
    assert rows["all_reduce"].busbw_bytes_per_s == pytest.approx(4_000 / 300e-9)
    assert found.wait_ns == {"0": 300, "1": 0}
    assert found.wait_caused_ns == {"0": 0, "1": 300}


def test_ranks_linked_by_broadcasts_alone_have_unknown_waits() -> None:
    found = ranks.match(
        [
            rank_with(0, collective(100, 200, "broadcast", 1)),
            rank_with(1, collective(900, 950, "broadcast", 1)),
        ]
    )
    assert found.result.matched == 1
    assert (found.result.wait_ns, found.result.clock_offset_ns) == ({}, {})
    assert [list(wait) for wait in found.wait_ns.values()] == [[-1], [-1]]
    assert "clocks cannot be aligned" in found.warnings[0]


@settings(max_examples=40, deadline=None)
@given(
    skews=st.lists(st.integers(-(10**15), 10**15), min_size=4, max_size=4),
    lost=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 21)), max_size=6),
    factor=st.floats(1.0, 3.0),
)
def test_whatever_is_lost_the_rest_is_exact(
    skews: list[int], lost: set[tuple[int, int]], factor: float
) -> None:
    recordings = record(BASE, BASE.scaled(factor, "layers.0"), BASE, BASE, skews=skews)
    drop = {id(recordings[rank].timeline.collectives[index]) for rank, index in lost}
    found = ranks.match([summary_of(r, keep=lambda c: id(c) not in drop) for r in recordings]).result
    gone = {index for _, index in lost}
    assert found.matched == 22 - len(gone)
    assert found.unmatched == sum(1 for index in gone if any((rank, index) not in lost for rank in range(4)))
    assert found.clock_offset_ns == {f"rank {i}": skew - skews[0] for i, skew in enumerate(skews)}
    for recording in recordings:
        kept = [c for i, c in enumerate(recording.timeline.collectives) if i not in gone]
        assert found.wait_ns[str(recording.rank)] == sum(c.latest_start - c.start for c in kept)
