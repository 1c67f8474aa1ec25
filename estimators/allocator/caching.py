"""The CUDA caching allocator, modelled: what a sequence of allocations and frees reserves on the device.

Rules of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.1 to 2.13): a small and a large pool per stream,
sizes rounded to 512 bytes, best fit over free blocks, splitting, coalescing of neighbours, and segments taken
from the driver either one by one (*classic*) or as one growing address range per stream and pool
(*expandable*). Addresses are the model's own; everything is an integer number of bytes.

Not modelled: ``record_stream`` (FSDP2 does not use it), private pools (CUDA graphs), garbage collection.

From what a run allocates to what its device reserves: a recording replayed through the allocator model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fsdp2prof.tables.allocations import AllocationTable, BlockTable, MemoryRecording, SegmentTable
from fsdp2prof.tables.columns import NEVER, IntArray, Strings

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
"""Requests up to this size come from the small pool (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_LARGE_ALLOC_BYTES = 10 << 20
"""Requests below this share a 20 MiB segment, larger ones get their own (``kMinLargeAlloc``)."""
ROUND_LARGE_BYTES = 2 << 20

_ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 20
"""Address space of one expandable segment: whole pages, more than any device has."""


class OutOfMemory(Exception):  # noqa: N818 - the allocator's own word
    """A request that does not fit in the device even after every cached block was given back."""

    def __init__(self, requested_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes requested, {reserved_bytes} reserved")
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` sets, and how much the device gives."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """``max_split_size_mb`` in bytes; null is unlimited."""
    roundup_power2_divisions: int = 0
    """One value for all sizes; 0 and 1 mean off."""
    device_bytes: int | None = None
    """Most bytes the driver gives; null is unlimited."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: in use, cached, or (expandable segments) address space that is not mapped yet."""

    stream: int
    address: int
    size: int
    small: bool
    allocated: bool = False
    mapped: bool = True
    requested: int = 0
    previous: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that the driver allocated (expandable: one mapped range of address space)."""

    stream: int
    address: int
    size: int
    small: bool


class _FreeList:
    """Cached blocks of one stream and pool, ordered by (size, address) as the allocator's set is."""

    __slots__ = ("_blocks", "_keys")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def at_least(self, size: int) -> Iterator[Block]:
        """Blocks of at least ``size`` bytes, smallest and lowest first."""
        for position in range(bisect_left(self._keys, (size, 0)), len(self._keys)):
            yield self._blocks[self._keys[position][1]]

    def blocks(self) -> list[Block]:
        return [self._blocks[address] for _, address in self._keys]


class CachingAllocator:
    """The state of one device's caching allocator.

    ``allocated_bytes`` counts rounded blocks in use, ``requested_bytes`` what was asked for and
    ``reserved_bytes`` what the driver gave; their peaks are kept until :meth:`reset_peaks`.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.retries = 0
        """Times cached blocks had to be given back because the device was full."""
        self.taken: list[Segment] = []
        """Every segment allocated from the driver so far, in order, including those freed since."""
        self._free: dict[tuple[int, bool], _FreeList] = {}
        self._unmapped: dict[tuple[int, bool], list[Block]] = {}
        self._heads: list[Block] = []
        self._next_address = _ADDRESS_SPACE_BYTES
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Start new peaks from the present state (``torch.cuda.reset_peak_memory_stats``)."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """Hand out a block for ``requested`` bytes on ``stream``; raises :class:`OutOfMemory`."""
        size = self.round_size(requested)
        small = size <= SMALL_BYTES
        block = self._find(size, stream, small) or self._grow(size, stream, small)
        remaining = block.size - size
        if self._should_split(size, remaining, small):
            self._split(block, size)
        block.allocated = True
        block.requested = requested
        self.allocated_bytes += block.size
        self.requested_bytes += requested
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back into its stream's cache, merged with its free neighbours."""
        if not block.allocated:
            raise ValueError(f"block at {block.address} is not allocated")
        block.allocated = False
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        self._list(block).add(self._merge(block))

    def empty_cache(self) -> None:
        """Give every cached byte that can be given back to the driver (``torch.cuda.empty_cache``)."""
        for free_list in self._free.values():
            for block in free_list.blocks():
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    free_list.remove(block)
                    self._heads.remove(block)
                    self.reserved_bytes -= block.size

    def segments(self) -> list[Segment]:
        """Return the segments from the driver, by address."""
        found = []
        for head in self._heads:
            block: Block | None = head
            start = size = 0
            while block is not None:
                if block.mapped:
                    start = block.address if size == 0 else start
                    size += block.size
                if size and (not block.mapped or block.next is None):
                    found.append(Segment(block.stream, start, size, block.small))
                    size = 0
                block = block.next
        return sorted(found, key=lambda segment: segment.address)

    def blocks(self) -> list[Block]:
        """Return every mapped block, by address."""
        found = []
        for head in self._heads:
            block: Block | None = head
            while block is not None:
                if block.mapped:
                    found.append(block)
                block = block.next
        return sorted(found, key=lambda item: item.address)

    def round_size(self, requested: int) -> int:
        """Round a request up to the allocator's block size (``round_size``)."""
        size = max(requested, MIN_BLOCK_BYTES)
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def _find(self, size: int, stream: int, small: bool) -> Block | None:
        free_list = self._free.setdefault((stream, small), _FreeList())
        candidates = free_list.at_least(size)
        best = next(candidates, None)
        if best is None:
            return None
        if self.settings.expandable_segments:
            # A block at the growing end counts as large as it can become, so prefer others.
            for other in candidates:
                if _expandable_size(other) >= _expandable_size(best):
                    break
                best = other
        limit = self.settings.max_split_size
        if limit is not None:  # blocks above the limit are kept whole for requests above it
            if size < limit <= best.size:
                return None
            if size >= limit and best.size >= size + LARGE_SEGMENT_BYTES:
                return None
        free_list.remove(best)
        return best

    def _grow(self, size: int, stream: int, small: bool) -> Block:
        try:
            return self._take(size, stream, small)
        except OutOfMemory:  # as CUDA's allocator: one retry after all cached blocks went back
            self.retries += 1
            self.empty_cache()
            return self._take(size, stream, small)

    def _take(self, size: int, stream: int, small: bool) -> Block:
        if self.settings.expandable_segments:
            return self._take_expandable(size, stream, small)
        if small:
            segment_size = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_ALLOC_BYTES:
            segment_size = LARGE_SEGMENT_BYTES
        else:
            segment_size = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        self._take_from_driver(Segment(stream, self._next_address, segment_size, small))
        block = Block(stream, self._next_address, segment_size, small)
        self._next_address += segment_size + ROUND_LARGE_BYTES  # a gap: segments of cudaMalloc never merge
        self._heads.append(block)
        return block

    def _take_expandable(self, size: int, stream: int, small: bool) -> Block:
        unmapped = self._unmapped.setdefault((stream, small), [])
        candidate = next((start for block in unmapped if (start := _room(block, size)) is not None), None)
        if candidate is None:
            space = max(_ADDRESS_SPACE_BYTES, -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES)
            candidate = Block(stream, self._next_address, space, small, mapped=False)
            self._next_address += 2 * space
            self._heads.append(candidate)
            unmapped.append(candidate)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        # A free block before the unmapped one keeps its pages; only what is missing is mapped behind it.
        while candidate.size < size:
            following = candidate.next
            assert following is not None
            candidate = self._map(following, min(size - candidate.size, following.size))
        self._list(candidate).remove(candidate)
        return candidate

    def _map(self, block: Block, size: int) -> Block:
        """Map the first ``size`` bytes of an unmapped block in whole pages and cache them, merged."""
        page = SMALL_SEGMENT_BYTES if block.small else LARGE_SEGMENT_BYTES
        mapped = -(-size // page) * page
        self._take_from_driver(Segment(block.stream, block.address, mapped, block.small))
        self._unmapped[block.stream, block.small].remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = self._cut(block, mapped)
            rest.mapped = False
            insort(self._unmapped[block.stream, block.small], rest, key=_address)
        block = self._merge(block)
        self._list(block).add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap a cached block's whole pages; a rest smaller than a page stays cached."""
        page = SMALL_SEGMENT_BYTES if block.small else LARGE_SEGMENT_BYTES
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        self._list(block).remove(block)
        if begin > block.address:
            middle = self._cut(block, begin - block.address)
            self._list(block).add(block)
            block = middle
        if end < block.address + block.size:
            self._list(block).add(self._cut(block, end - block.address))
        block.mapped = False
        block = self._merge_unmapped(block)
        insort(self._unmapped[block.stream, block.small], block, key=_address)
        self.reserved_bytes -= end - begin

    def _merge(self, block: Block) -> Block:
        """Absorb free neighbours in the same state; they leave the cache."""
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.allocated and neighbour.mapped:
                self._list(neighbour).remove(neighbour)
                block = self._join(block, neighbour)
        return block

    def _merge_unmapped(self, block: Block) -> Block:
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.mapped:
                self._unmapped[block.stream, block.small].remove(neighbour)
                block = self._join(block, neighbour)
        return block

    def _join(self, block: Block, neighbour: Block) -> Block:
        first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        return first

    def _cut(self, block: Block, size: int) -> Block:
        """Cut ``block`` after ``size`` bytes and return the rest, linked but not cached."""
        rest = Block(block.stream, block.address + size, block.size - size, block.small, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        return rest

    def _split(self, block: Block, size: int) -> None:
        self._list(block).add(self._cut(block, size))

    def _should_split(self, size: int, remaining: int, small: bool) -> bool:
        # Classic large blocks are not split for a rest below 1 MiB, which would serve no large request;
        # expandable segments can always map the rest's pages to something else.
        if small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and remaining > SMALL_BYTES

    def _list(self, block: Block) -> _FreeList:
        return self._free.setdefault((block.stream, block.small), _FreeList())

    def _take_from_driver(self, segment: Segment) -> None:
        limit = self.settings.device_bytes
        if limit is not None and self.reserved_bytes + segment.size > limit:
            raise OutOfMemory(segment.size, self.reserved_bytes)
        self.taken.append(segment)
        self.reserved_bytes += segment.size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def _address(block: Block) -> int:
    return block.address


def _expandable_size(block: Block) -> int:
    growth = block.next.size if block.next is not None and not block.next.mapped else 0
    return block.size + growth


def _room(unmapped: Block, size: int) -> Block | None:
    """Return where ``size`` bytes of free or mappable address space begin at an unmapped block."""
    start = unmapped
    if start.previous is not None and not start.previous.allocated:
        start = start.previous
    block: Block | None = start
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.next
    return start if room >= size else None


def allocator_settings(allocator: str | None) -> AllocatorSettings:
    """Settings for a policy's ``allocator``, on a device without limit; not given, it is expandable."""
    return AllocatorSettings(expandable_segments=allocator != "classic")


def replay(recording: MemoryRecording, settings: AllocatorSettings) -> MemoryRecording:
    """Return the recording with the segments, blocks and addresses of an allocator with unlimited memory."""
    allocator = CachingAllocator(replace(settings, device_bytes=None))
    allocations = recording.allocations
    addresses = np.full(len(allocations), -1, dtype=np.int64)
    makers: list[int] = []
    for row, block in _run(recording, allocator):
        addresses[row] = block.address
        makers.extend([row] * (len(allocator.taken) - len(makers)))
    taken_by = np.array(makers, dtype=np.int64)
    allocations = allocations.with_columns(address=addresses)
    return replace(
        recording,
        allocations=allocations,
        segments=SegmentTable(
            alloc_order=allocations.alloc_order[taken_by],
            free_order=np.full(len(taken_by), NEVER, dtype=np.int64),
            alloc_ns=allocations.alloc_ns[taken_by],
            size=_column(allocator.taken, "size"),
            address=_column(allocator.taken, "address"),
            stream=_column(allocator.taken, "stream"),
            pool=_pools(allocator.taken),
            expandable=np.full(len(taken_by), settings.expandable_segments),
        ),
        blocks=_blocks(allocator, allocations),
        settings={"expandable_segments": str(settings.expandable_segments)},
    )


def peak_reserved(recording: MemoryRecording, settings: AllocatorSettings) -> int:
    """Return the most bytes reserved on a device of these settings. Raises ``OutOfMemory``."""
    allocator = CachingAllocator(settings)
    for _ in _run(recording, allocator):
        pass
    return allocator.peak_reserved_bytes


def _run(recording: MemoryRecording, allocator: CachingAllocator) -> Iterator[tuple[int, Block]]:
    """Replay the history, yielding each allocation's row and block."""
    allocations = recording.allocations
    freed = np.flatnonzero(allocations.free_order != NEVER)
    orders = np.concatenate([allocations.alloc_order, allocations.free_order[freed]])
    rows = np.concatenate([np.arange(len(allocations)), ~freed])  # ~row: freed
    sizes, streams = allocations.size.tolist(), allocations.stream.tolist()
    live: dict[int, Block] = {}
    for row in rows[np.argsort(orders, kind="stable")].tolist():
        if row >= 0:
            live[row] = allocator.malloc(sizes[row], streams[row])
            yield row, live[row]
        else:
            allocator.free(live.pop(~row))


def _blocks(allocator: CachingAllocator, allocations: AllocationTable) -> BlockTable:
    blocks = allocator.blocks()
    alive = allocations.take(allocations.free_order == NEVER)
    stack_at = dict(zip(alive.address.tolist(), alive.stack.tolist(), strict=True))
    starts = _column(allocator.segments(), "address")
    address = _column(blocks, "address")
    return BlockTable(
        address=address,
        size=_column(blocks, "size"),
        requested=np.array([block.requested if block.allocated else 0 for block in blocks], dtype=np.int64),
        state=Strings.intern("allocated" if block.allocated else "free" for block in blocks),
        segment=starts[np.searchsorted(starts, address, side="right") - 1],
        stream=_column(blocks, "stream"),
        pool=_pools(blocks),
        expandable=np.full(len(blocks), allocator.settings.expandable_segments),
        stack=np.array([stack_at.get(block.address, -1) for block in blocks], dtype=np.int64),
    )


def _column(items: Sequence[Block | Segment], name: str) -> IntArray:
    return np.array([getattr(item, name) for item in items], dtype=np.int64)


def _pools(items: Sequence[Block | Segment]) -> Strings:
    return Strings.intern("small" if item.small else "large" for item in items)
