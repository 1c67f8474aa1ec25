"""One instant of a device's memory: live bytes, phase and layer, contents, and the allocator."""

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
    """Bytes of one layer, or of several similar ones."""

    name: str
    """Label: ``layers.0``, ``layers.0-31``, ``(root)``, ``(no layer)``."""
    fqns: list[str | None]
    """Layers of this row; the empty string is the root; null: unattributed."""
    bytes: int
    """Bytes of all layers of this row."""
    categories: dict[str, int]
    """Category -> bytes over all layers of the row; sums to ``bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """One allocation alive at an instant."""

    bytes: int
    category: str
    fqn: str | None
    phase: str
    """Phase that allocated it."""
    step: int | None
    """Step that allocated it; null if it was allocated before the history began."""
    op: str | None
    age_ns: int | None
    """Age of the allocation; null if unknown."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""
    place: str | None = None
    """Line of the model or script that allocated it: innermost frame outside torch, with a shortened path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBytes:
    """Live bytes of one category that one line of the model or script allocated."""

    place: str | None
    """Innermost Python frame outside torch, with a shortened path; null if no stack has a Python frame."""
    category: str
    bytes: int
    blocks: int
    """Number of allocations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPeak:
    """Highest total while one layer ran in one phase, and the step with it."""

    allocated_bytes: int
    step: int | None
    phase: str
    fqn: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The instant with the most allocated bytes."""

    allocated_bytes: int
    reserved_bytes: int | None
    """Highest reserved bytes at any time; null without a caching allocator."""
    step: int | None
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Bytes by category; they sum exactly to ``allocated_bytes``."""
    by_layer: list[LayerBytes]
    """Bytes by layer; they sum exactly to ``allocated_bytes``."""
    time_ns: int | None = None
    """Host time of the peak; null if the recording has no times."""
    largest_blocks: list[LiveBlock] = field(default_factory=list)
    """The ten largest allocations alive at the peak, largest first."""
    by_line: list[LineBytes] = field(default_factory=list)
    """The ten lines with most bytes at the peak, largest first; empty if no stack has a Python frame.
    Allocations without such a frame count as one line per category."""
    others: list[OtherPeak] = field(default_factory=list)
    """Other highest totals, one per (phase, fqn), highest first."""
    by_category: list[CategoryBytes] = field(default_factory=list)
    """``categories`` with fractions, largest first, without empty ones."""
    layers: list[LayerMemory] = field(default_factory=list)
    """``by_layer`` with one row per layer, largest first."""
    layers_folded: list[LayerMemory] = field(default_factory=list)
    """``layers`` with similar ones (names that differ in one number, same bytes) in one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change and the bytes that it would save at one instant."""

    action: str
    """Name of the change: ``activation_checkpointing``, ``smaller_batch``, ``chunked_loss``,
    ``low_precision_logits``, ``reshard_after_forward``, ``less_prefetch``, ``reduced_gradients``,
    ``wider_sharding``, ``no_grad`` or ``expandable_segments``; in an estimate also ``cpu_offload``,
    ``low_precision_states`` and ``fused_optimizer``."""
    saves_bytes: int
    """Upper bound of the bytes that this change alone saves; changes overlap and do not add up."""
    enough: bool | None
    """Whether it would have made a failed request fit; null if unknown, or if nothing failed."""
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The last request that the allocator could not serve, and the live memory at that instant."""

    requested_bytes: int
    op: str | None
    """Operator that allocated, otherwise the innermost Python frame."""
    phase: str
    fqn: str | None
    allocated_bytes: int
    reserved_bytes: int | None
    """Reserved bytes after the allocator freed its cached segments, as it does before it fails."""
    device_free_bytes: int | None
    """Free bytes of the driver; null if unknown."""
    outside_bytes: int | None
    """Bytes of the device that are neither free nor reserved by this process's allocator: other processes,
    libraries, the driver; null if the device's size is unknown."""
    missing_bytes: int | None
    """Bytes that the driver lacked for the segment of the request; null if its free memory is unknown, or
    was enough and another limit applied."""
    largest_free_block_bytes: int | None
    """Largest free block in the request's pool and stream; null if the history continues after the
    failure."""
    stack: list[str]
    """Frames, innermost first; empty if unknown."""
    categories: dict[str, int]
    """Category -> live bytes, without empty ones."""
    by_layer: list[LayerBytes]
    largest_blocks: list[LiveBlock]
    remedies: list[Remedy]
    """Changes that would have made it fit, most bytes first."""
    place: str | None = None
    """Line of the model or script that allocated: innermost frame outside torch, with a shortened path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Bytes of allocator blocks by state.

    ``reserved_bytes`` = ``allocated_bytes`` + ``pending_free_bytes`` + ``inactive_split_bytes`` +
    ``releasable_bytes``.
    """

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    """Bytes of blocks in use."""
    rounding_bytes: int = 0
    """Part of ``allocated_bytes`` beyond the requested sizes (rounding)."""
    pending_free_bytes: int = 0
    """Bytes that were freed but are still in use by another stream."""
    inactive_split_bytes: int = 0
    """Bytes of free parts of segments in use: fragmentation."""
    inactive_split_blocks: int = 0
    releasable_bytes: int = 0
    """Bytes of whole free segments, which the allocator can return to the device."""
    largest_free_block_bytes: int = 0
    """Largest request that fits without a new segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolBytes(BlockBytes):
    """One pool of one stream, which serves only that stream's requests."""

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
    """Reserved minus allocated bytes at the peak."""
    expandable_segments: bool = False
    segments: int = 0
    by_pool: list[PoolBytes] = field(default_factory=list)
    """Pools by stream, most reserved first."""
    by_segment: list[SegmentBytes] = field(default_factory=list)
    """The ten segments in use with the most free memory, most first."""
