"""The content of a memory history, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table
from fsdp2prof.tables.trace import LabelTable, StepTable

GIVEN = "given to "
"""Begins the ``op`` of an allocation that no operator made in sight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationTable(Table):
    """One row per allocation of one device, sorted by ``alloc_order``.

    ``*_order`` is the position in the allocator's own history: always known, unique, and what a peak is
    computed from. ``*_ns`` is host time and may be missing (-1) in old snapshots. An allocation alive before
    the history began has order -1 and time -1; one alive at its end has :data:`NEVER` for both.
    """

    alloc_order: IntArray
    free_order: IntArray
    alloc_ns: IntArray
    free_ns: IntArray
    size: IntArray
    """Requested bytes."""
    address: IntArray
    stream: IntArray
    pool: Strings
    """Allocator pool as written; None is the default pool."""
    step: IntArray
    """Step that allocated it; -1 unknown."""
    phase: Strings
    fqn: Strings
    activity: Strings
    """FSDP activity that allocated it, one of :data:`~fsdp2prof.vocabulary.ACTIVITIES`; None unknown."""
    category: Strings
    """One of :data:`~fsdp2prof.vocabulary.CATEGORIES`."""
    op: Strings
    """Operator or innermost frame that allocated it; None unknown. :data:`GIVEN` and an operator: made out of
    sight, inside a backend or another library, and first seen as that operator's argument."""
    stack: IntArray
    """Row of the stack in the recording's :class:`Stacks`; -1 unknown."""
    tag: Strings
    """``user_metadata`` that the recorder set at the allocation; None if it set none."""
    release_order: IntArray
    """When the block could be reused: after ``free_order`` while another stream still needed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTable(Table):
    """Memory that the allocator reserved from the device, one row per segment or mapped range.

    Orders and times as in :class:`AllocationTable`. Empty without a caching allocator.
    """

    alloc_order: IntArray
    free_order: IntArray
    alloc_ns: IntArray
    size: IntArray
    address: IntArray
    stream: IntArray
    pool: Strings
    """``small``, ``large`` or a private pool's id as written; None unknown."""
    expandable: BoolArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTable(Table):
    """Blocks of the segments when the recording ended, sorted by address; fragmentation is read from it."""

    address: IntArray
    size: IntArray
    """Bytes of the block, rounding included."""
    requested: IntArray
    """Requested bytes; equal to ``size`` if the file does not contain them, 0 in free blocks."""
    state: Strings
    """``allocated``, ``pending_free`` (freed, still needed by another stream) or ``free``."""
    segment: IntArray
    """Address of its segment."""
    stream: IntArray
    pool: Strings
    expandable: BoolArray
    stack: IntArray
    """Row of the stack that allocated it; -1 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OomTable(Table):
    """Requests the allocator could not serve."""

    order: IntArray
    time_ns: IntArray
    requested: IntArray
    device_free: IntArray
    """Bytes the driver still had; -1 unknown."""
    stream: IntArray
    stack: IntArray
    op: Strings
    """Operator or innermost Python frame that asked; None unknown."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Distinct call stacks, innermost frame first: stack ``i`` is ``frames[offsets[i]:offsets[i + 1]]``."""

    offsets: IntArray
    frames: Strings

    @classmethod
    def empty(cls) -> Stacks:
        """Build an empty list."""
        return cls(np.zeros(1, dtype=np.int64), Strings.full(0, None))

    @classmethod
    def intern(cls, stacks: Iterable[Sequence[str]]) -> Stacks:
        """Build the list from sequences of frame texts."""
        lengths: list[int] = [0]
        frames: list[str] = []
        for stack in stacks:
            frames.extend(stack)
            lengths.append(len(stack))
        return cls(np.cumsum(np.asarray(lengths, dtype=np.int64)), Strings.intern(frames))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> tuple[str, ...]:
        codes = self.frames.codes[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return tuple(self.frames.values[code] for code in codes)


MemorySource: TypeAlias = Literal["cuda_snapshot", "storage_count", "kineto", "estimate"]
"""Who counted: the CUDA allocator, the storage tracker, Kineto's memory events, or a fake execution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecording:
    """One device's memory history, recorded or estimated: the input of every memory analysis."""

    source: MemorySource
    device: str
    """``cuda:0``, ``cpu``."""
    allocations: AllocationTable
    """As recorded; step, phase, fqn, activity and category are filled in by the analyzers."""
    segments: SegmentTable
    blocks: BlockTable
    labels: LabelTable
    """Host ranges on the clock of the allocations; empty where the file has none."""
    steps: StepTable
    stacks: Stacks
    ooms: OomTable
    events: int
    """Length of the history: every order is below it."""
    end_ns: int
    """Host time of its end; -1 unknown."""
    truncated: bool
    """The ring buffer lost the beginning of the history."""
    settings: dict[str, str]
    """Allocator settings as written."""
    warnings: tuple[str, ...] = ()
