"""Collectives of a trace: by layer, in time or late, their rates, and what could not be placed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """A rank's communication over the analysed window."""

    total_ns: int
    """Union of the rank's collectives, not a sum."""
    exposed_ns: int
    overlap_frac: float | None
    """Overlap: 1 - exposed / total; null where there is no communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """Collectives of one (rank, step, fqn, phase, op, process group, dtype), summed."""

    rank: int
    step: int
    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    phase: str
    op: str
    process_group: str | None
    mesh_dim: str | None
    dtype: str | None
    count: int
    payload_bytes: int | None
    wire_bytes: int | None
    total_ns: int
    exposed_ns: int
    stall_ns: int | None
    overlap_frac: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """Collectives of one layer, phase, op, group and dtype: means per rank and step, bytes and counts too.

    Of repeated layers folded into one row, sums over them.
    """

    fqn: str | None
    """FSDP module, ``layers.0-31`` for folded ones; the empty string is the root, null is unattributed."""
    layers: int
    """Layers folded into this row."""
    phase: str
    op: str
    group: str | None
    """Mesh dimension, or the process group's name where no mesh is known."""
    dtype: str | None
    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float
    exposed_ns: float
    stall_ns: float | None
    overlap_frac: float | None
    busbw_bytes_per_s: float | None
    """Bus bandwidth: wire bytes over the time they took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotal:
    """All collectives of one layer: means per rank and step."""

    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    total_ns: float
    """Communication time, summed over the layer's collectives."""
    exposed_ns: float


LateCause = Literal["launch", "communicator", "stream", "transfer", "peer", "transfer_or_peer"]
"""Why a collective came late: it began too late to hide; it queued behind another one of its process group,
or behind other work of its stream; its transfer was slower than the median of its kind; a peer came late; one
of the last two, which the trace of one rank alone does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRow:
    """One collective that the compute stream waits for: was it there in time?"""

    rank: int
    step: int
    fqn: str | None
    phase: str
    op: str
    process_group: str | None
    issued_before_ns: int
    """From its launch to when it was needed; negative if it was needed before it was launched."""
    finished_before_ns: int
    """From its end to when it was needed; negative if it came late."""
    stall_ns: int
    """How long the compute stream waited for it."""
    late_ns: dict[LateCause, int]
    """The stall by cause; the parts sum to it."""
    cause: LateCause | None
    """The largest cause; null if the collective was in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRow:
    """Collectives of one layer, phase and op that were late for one main cause, or in time."""

    fqn: str | None
    """FSDP module, ``layers.0-31`` for folded ones; the empty string is the root, null is unattributed."""
    layers: int
    """Layers folded into this row."""
    phase: str
    op: str
    cause: LateCause | None
    """Main cause of the lateness; null where they were in time."""
    count: float
    """Collectives, mean per rank and step."""
    issued_before_ns: float
    """Median."""
    finished_before_ns: float
    """Median of when they ended, relative to when they were needed; negative: late."""
    stall_ns: float
    """Stall, mean per rank and step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthRow:
    """Rates of all collectives of one (op, process group, dtype, payload), over steps and ranks."""

    op: str
    process_group: str | None
    mesh_dim: str | None
    group_size: int | None
    dtype: str | None
    payload_bytes: int
    count: int
    algbw_bytes_per_s: float
    """Algorithm bandwidth: median of payload over duration."""
    busbw_bytes_per_s: float | None
    """Bus bandwidth: median of wire bytes over transfer, without the wait for the last rank where ranks were
    compared."""
    best_busbw_bytes_per_s: float | None
    """Best bus bandwidth of a single collective of this row."""
    of_best_frac: float | None
    """The median over the best busbw of this op in this process group, at any size; null where waits are
    not known."""
    of_peak_frac: float | None = None
    """The median over the hardware's peak, where that and the waits are known."""
    ranks: list[int] = field(default_factory=list)
    """Ranks whose traces hold these collectives; they identify the group among those of a mesh dimension."""
    waits_known: bool = True
    """Whether the busbw is of collectives in which all ranks of the group were compared; else it is a lower
    bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """How much communication landed on a layer."""

    collectives: int
    attributed: int
    comm_ns: int
    """Sum of collective durations."""
    attributed_ns: int
    unattributed_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of collectives."""
