"""One instant of a device's memory: live bytes, the program's position, and the contents."""

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
    others: list[OtherPeak] = field(default_factory=list)
    """The highest totals elsewhere, one a (phase, fqn), highest first."""
    by_category: list[CategoryBytes] = field(default_factory=list)
    """``categories`` with fractions, largest first; those that hold nothing are left out."""
    layers: list[LayerMemory] = field(default_factory=list)
    """``by_layer`` with one row a layer, largest first."""
    layers_folded: list[LayerMemory] = field(default_factory=list)
    """``layers`` with alike ones (names that differ in one number, same bytes) in one row."""
