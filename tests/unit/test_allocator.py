"""The allocator model: sequences worked out by hand, invariants, and real allocators' own histories."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2prof.analyzers.memory.prepared import reserved_totals
from fsdp2prof.estimators.allocator.caching import AllocatorSettings, Block, CachingAllocator, OutOfMemory
from fsdp2prof.readers.memory.snapshot import read_snapshot
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import NEVER

MIB = 1 << 20


def classic(**settings: Any) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings(**settings))


def expandable(**settings: Any) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings(expandable_segments=True, **settings))


def test_requests_are_rounded_to_512_bytes() -> None:
    assert [classic().round_size(size) for size in (0, 1, 512, 513, 1025)] == [512, 512, 512, 1024, 1536]


def test_requests_are_rounded_to_a_fraction_of_a_power_of_two() -> None:
    allocator = classic(roundup_power2_divisions=4)
    assert allocator.round_size(1200) == 1536  # not above 4 x 512: whole blocks
    # 5000 is between 4096 and 8192, in quarters of 1024: 5120.
    assert allocator.round_size(5000) == 5120
    assert allocator.round_size(8192) == 8192


def test_small_requests_share_a_2_mib_segment() -> None:
    allocator = classic()
    allocator.malloc(MIB)
    allocator.malloc(MIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_medium_requests_share_a_20_mib_segment_and_large_ones_get_their_own() -> None:
    allocator = classic()
    allocator.malloc(MIB + 1)
    allocator.malloc(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(10 * MIB)  # 20 - 1 - 9 leaves less than 10 MiB
    assert allocator.reserved_bytes == 30 * MIB
    allocator.malloc(11 * MIB)  # rounded to 2 MiB
    assert allocator.reserved_bytes == 42 * MIB


def test_classic_keeps_a_remainder_of_up_to_1_mib_in_the_block() -> None:
    allocator = classic()
    block = allocator.malloc(19 * MIB + MIB // 2)
    assert (block.size, block.requested) == (20 * MIB, 19 * MIB + MIB // 2)
    assert allocator.allocated_bytes == 20 * MIB
    assert allocator.requested_bytes == 19 * MIB + MIB // 2


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = classic()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(18 * MIB).address == blocks[1].address
    assert allocator.malloc(25 * MIB).address == blocks[2].address
    assert allocator.reserved_bytes == 90 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = classic()
    first, second, third = (allocator.malloc(6 * MIB) for _ in range(3))
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(first)
    allocator.free(third)
    assert [block.size for block in allocator.blocks()] == [6 * MIB, 6 * MIB, 8 * MIB]
    allocator.free(second)
    assert [block.size for block in allocator.blocks()] == [20 * MIB]
    assert allocator.allocated_bytes == 0


def test_streams_do_not_share_memory() -> None:
    allocator = classic()
    allocator.free(allocator.malloc(50 * MIB, stream=1))
    allocator.malloc(50 * MIB, stream=2)
    assert allocator.reserved_bytes == 100 * MIB


def test_expandable_segments_grow_by_20_mib_pages() -> None:
    allocator = expandable()
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(10 * MIB)  # the last 5 MiB and one page more
    assert allocator.reserved_bytes == 60 * MIB
    assert [(segment.size, segment.small) for segment in allocator.segments()] == [(60 * MIB, False)]


def test_expandable_segments_grow_small_pools_by_2_mib_pages() -> None:
    allocator = expandable()
    for _ in range(3):
        allocator.malloc(MIB)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_request_may_be_larger_than_an_expandable_segment() -> None:
    allocator = expandable()
    huge = 30 << 40
    allocator.free(allocator.malloc(huge))
    allocator.malloc(MIB)
    assert allocator.peak_reserved_bytes >= huge


def test_expandable_segments_reuse_a_hole_that_fits_and_grow_from_the_free_end() -> None:
    allocator = expandable()
    first = allocator.malloc(100 * MIB)
    last = allocator.malloc(60 * MIB)
    allocator.free(first)
    assert allocator.malloc(100 * MIB).address == first.address
    allocator.free(last)
    allocator.malloc(80 * MIB)  # 60 free at the end, one page more
    assert allocator.reserved_bytes == 180 * MIB


def test_expandable_segments_prefer_an_inner_hole_to_the_growing_end() -> None:
    allocator = expandable()
    hole = allocator.malloc(40 * MIB)
    allocator.malloc(MIB + 512)
    end = allocator.malloc(30 * MIB)
    allocator.free(hole)
    allocator.free(end)
    assert allocator.malloc(20 * MIB).address == hole.address


def test_a_full_device_gives_back_its_cache_before_it_runs_out() -> None:
    allocator = classic(device_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)
    with pytest.raises(OutOfMemory) as error:
        allocator.malloc(40 * MIB)
    assert (error.value.requested_bytes, error.value.reserved_bytes) == (40 * MIB, 80 * MIB)


def test_expandable_segments_give_back_whole_pages_only() -> None:
    allocator = expandable()
    first = allocator.malloc(70 * MIB)
    allocator.malloc(5 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    # 80 MiB mapped; the first three pages lie in the free 70 MiB, the fourth holds the 5 MiB block.
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.malloc(70 * MIB).size == 70 * MIB


def test_large_blocks_are_not_split_below_max_split_size() -> None:
    allocator = classic(max_split_size=50 * MIB)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 140 * MIB
    allocator.malloc(90 * MIB)  # an oversize request may take an oversize block within 20 MiB
    assert allocator.reserved_bytes == 140 * MIB


def test_a_block_is_freed_once() -> None:
    allocator = classic()
    block = allocator.malloc(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)


REQUESTS = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 200 * MIB))
STEPS = st.lists(st.tuples(REQUESTS, st.integers(0, 2), st.integers(0, 30)), max_size=60)


@pytest.mark.parametrize("settings", [{}, {"expandable_segments": True}, {"max_split_size": 64 * MIB}])
@given(steps=STEPS)
def test_nothing_overlaps_and_nothing_gets_lost(
    settings: dict[str, Any], steps: list[tuple[int, int, int]]
) -> None:
    allocator = CachingAllocator(AllocatorSettings(**settings))
    live: list[Block] = []
    for size, stream, victim in steps:
        live.append(allocator.malloc(size, stream))
        if victim < len(live) - 1:
            allocator.free(live.pop(victim))
        blocks = allocator.blocks()
        assert sum(block.size for block in blocks) == allocator.reserved_bytes
        assert sum(segment.size for segment in allocator.segments()) == allocator.reserved_bytes
        assert {id(block) for block in blocks if block.allocated} == {id(block) for block in live}
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert all(block.size >= block.requested for block in live)
        for before, after in pairwise(blocks):
            assert before.address + before.size <= after.address
            assert before.allocated or after.allocated or before.next is not after
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


SNAPSHOTS = [
    "fsdp2-llama8b-a100-oom/rank0_memory_snapshot.pickle",
    "single-gpu/liger.pickle",
    "single-gpu/small_a.pickle",
    "single-gpu/transformer_200_events.pickle",
]


@pytest.mark.real_data
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_real_allocators_history_reserves_the_same_at_every_request(real_data: Path, name: str) -> None:
    recording = read_snapshot(real_data / "snapshots" / name)[0]
    reserved = reserved_totals(recording.segments, recording.events)
    assert reserved is not None
    allocator = classic()
    live = as_before_the_history(allocator, recording)
    requests = 0
    for order, action, row in history(recording):
        if action == "segment_free":
            if allocator.reserved_bytes != reserved[order]:
                allocator.empty_cache()
        elif action == "free":
            allocator.free(live.pop(row))
        else:
            size, stream = recording.allocations.size[row], recording.allocations.stream[row]
            live[row] = allocator.malloc(int(size), int(stream))
            assert allocator.reserved_bytes == reserved[order]
            requests += 1
    assert requests == np.count_nonzero(recording.allocations.alloc_order >= 0) > 0
    if not len(recording.ooms):  # a history that ends in one lacks the events after it
        assert sorted(block.size for block in allocator.blocks()) == sorted(recording.blocks.size.tolist())


def as_before_the_history(allocator: CachingAllocator, recording: MemoryRecording) -> dict[int, Block]:
    """Bring an allocator into the state that a recording found: segments with blocks and holes."""
    rows = np.flatnonzero(recording.allocations.alloc_order < 0)
    rows = rows[np.argsort(recording.allocations.address[rows])]
    live, holes = {}, []
    for segment in np.flatnonzero(recording.segments.alloc_order < 0).tolist():
        at = int(recording.segments.address[segment])
        end = at + int(recording.segments.size[segment])
        stream = int(recording.segments.stream[segment])
        piece = MIB if recording.segments.pool[segment] == "small" else 9 * MIB
        for row in rows.tolist():
            address = int(recording.allocations.address[row])
            if at <= address < end:
                holes.extend(fill(allocator, address - at, stream, piece))
                live[row] = allocator.malloc(int(recording.allocations.size[row]), stream)
                at = address + live[row].size
        holes.extend(fill(allocator, end - at, stream, piece))
    for hole in holes:
        allocator.free(hole)
    return live


def fill(allocator: CachingAllocator, size: int, stream: int, piece: int) -> list[Block]:
    """Allocate a hole in pieces small enough for the pool its segment belongs to."""
    pieces = [piece] * (size // piece) + [size % piece] * (size % piece > 0)
    return [allocator.malloc(part, stream) for part in pieces]


def history(recording: MemoryRecording) -> list[tuple[int, str, int]]:
    """Events by order: alloc and free with the allocation's row, segment_free with the segment's."""
    allocations, segments = recording.allocations, recording.segments
    events = [(int(order), "alloc", row) for row, order in enumerate(allocations.alloc_order) if order >= 0]
    events += [
        (int(order), "free", row) for row, order in enumerate(allocations.release_order) if order != NEVER
    ]
    events += [
        (int(order), "segment_free", row) for row, order in enumerate(segments.free_order) if order != NEVER
    ]
    return sorted(events)
