"""One instant of a device's memory: live bytes, the program's position, the contents, and the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryBytes:
    """Live bytes of one category."""

    category: str
    bytes: int
    frac: float
    """Fraction of all live bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Live bytes of one layer and category at the peak."""

    fqn: str | None
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """Bytes of one layer, or of several alike ones."""

    name: str
    """For people: ``layers.0``, ``layers.0-31``, ``(root)``, ``(no layer)``."""
    fqns: list[str | None]
    """The layers of this row; the empty string is the root; null: unattributed."""
    bytes: int
    """Bytes of all layers of this row."""
    categories: dict[str, int]
    """Category -> bytes of all of them; sums to ``bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """One allocation alive at an instant."""

    bytes: int
    category: str
    fqn: str | None
    phase: str
    """Phase that allocated it."""
    step: int | None
    """Step that allocated it; null if it was there before the history began."""
    op: str | None
    age_ns: int | None
    """Time since it was allocated; null if unknown."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""
    place: str | None = None
    """The line of the model or script that asked: the innermost frame outside torch, path cut short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBytes:
    """Live bytes of one category that one line of the model or script allocated."""

    place: str | None
    """The innermost Python frame outside torch, path cut short; null where no stack has a Python frame."""
    category: str
    bytes: int
    blocks: int
    """Number of allocations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPeak:
    """The highest total while one layer ran in one phase, and the step that had it."""

    allocated_bytes: int
    step: int | None
    phase: str
    fqn: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The instant of the largest allocated bytes."""

    allocated_bytes: int
    reserved_bytes: int | None
    """Most bytes reserved at any time; null where there is no caching allocator."""
    step: int | None
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Bytes by category; they sum exactly to ``allocated_bytes``."""
    by_layer: list[LayerBytes]
    """Bytes by layer; they sum exactly to ``allocated_bytes``."""
    time_ns: int | None = None
    """Host time of the peak; null where the recording has no times."""
    largest_blocks: list[LiveBlock] = field(default_factory=list)
    """The ten largest allocations alive at the peak, largest first."""
    by_line: list[LineBytes] = field(default_factory=list)
    """The ten lines that hold most at the peak, largest first; empty where no stack has a Python frame.
    What has no such frame, of one category, counts as one line."""
    others: list[OtherPeak] = field(default_factory=list)
    """The highest totals elsewhere, one a (phase, fqn), highest first."""
    by_category: list[CategoryBytes] = field(default_factory=list)
    """``categories`` with fractions, largest first; those that hold nothing are left out."""
    layers: list[LayerMemory] = field(default_factory=list)
    """``by_layer`` with one row a layer, largest first."""
    layers_folded: list[LayerMemory] = field(default_factory=list)
    """``layers`` with alike ones (names that differ in one number, same bytes) in one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change, and the bytes that it would save at one instant."""

    action: str
    """``activation_checkpointing``, ``smaller_batch``, ``chunked_loss``, ``low_precision_logits``,
    ``reshard_after_forward``, ``less_prefetch``, ``reduced_gradients``, ``wider_sharding``, ``no_grad`` or
    ``expandable_segments``; of an estimate also ``cpu_offload``, ``low_precision_states`` and
    ``fused_optimizer``."""
    saves_bytes: int
    """Bytes that this change alone saves, at most. Changes overlap and do not add up."""
    enough: bool | None
    """Whether it would have let a failed request fit; null where it is unknown, or nothing failed."""
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The last request that the allocator could not serve, and the live memory at that instant."""

    requested_bytes: int
    op: str | None
    """Operator that asked, else the innermost Python frame."""
    phase: str
    fqn: str | None
    allocated_bytes: int
    reserved_bytes: int | None
    """Reserved bytes after the cached segments were given back, as the allocator does before it fails."""
    device_free_bytes: int | None
    """Bytes that the driver had left; null unknown."""
    missing_bytes: int | None
    """What the driver lacked for the segment that the request takes; null where its free memory is unknown,
    or was enough and something else (a limit of the process) stood in the way."""
    largest_free_block_bytes: int | None
    """The largest block the allocator still had in that request's pool and stream; null if the history went
    on after the failure."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""
    categories: dict[str, int]
    """Category -> bytes alive; those that hold nothing are left out."""
    by_layer: list[LayerBytes]
    largest_blocks: list[LiveBlock]
    remedies: list[Remedy]
    """What would have let it fit, most bytes first."""
    place: str | None = None
    """The line of the model or script that asked: the innermost frame outside torch, path cut short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Bytes of some of the allocator's blocks by state.

    ``reserved_bytes`` = ``allocated_bytes`` + ``pending_free_bytes`` + ``inactive_split_bytes`` +
    ``releasable_bytes``.
    """

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    """Blocks in use."""
    rounding_bytes: int = 0
    """Part of ``allocated_bytes`` beyond the requested sizes (rounding)."""
    pending_free_bytes: int = 0
    """Freed, but another stream is not done with it."""
    inactive_split_bytes: int = 0
    """Free parts of segments in use: fragmentation."""
    inactive_split_blocks: int = 0
    releasable_bytes: int = 0
    """Whole free segments, which the allocator can give back."""
    largest_free_block_bytes: int = 0
    """The largest request that fits without a new segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolBytes(BlockBytes):
    """One pool of one stream: a request finds only the free blocks of its own."""

    pool: str | None
    stream: int
    expandable: bool
    segments: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentBytes(BlockBytes):
    """One segment in use."""

    address: int
    pool: str | None
    stream: int
    expandable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation(BlockBytes):
    """The allocator's unused memory when the recording ended."""

    gap_at_peak_bytes: int = 0
    """Reserved minus allocated at the peak."""
    expandable_segments: bool = False
    segments: int = 0
    by_pool: list[PoolBytes] = field(default_factory=list)
    """By pool and stream, most reserved first."""
    by_segment: list[SegmentBytes] = field(default_factory=list)
    """The ten segments in use with the most free memory, most first."""
