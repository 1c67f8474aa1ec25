"""Results of ``estimate``: communication, checkpoints, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp2prof.results.memory import LayerPeak
from fsdp2prof.results.peak import LayerBytes
from fsdp2prof.results.shown import Shown

__all__ = [
    "CHECKPOINT_ESTIMATE_SCHEMA",
    "COMM_ESTIMATE_SCHEMA",
    "MEMORY_ESTIMATE_SCHEMA",
    "CheckpointEstimate",
    "CommEstimate",
    "CommRow",
    "CommTotals",
    "MemoryEstimate",
    "PredictedPeak",
    "PredictedStep",
]

COMM_ESTIMATE_SCHEMA = "fsdp2prof.estimate.comm/1"
CHECKPOINT_ESTIMATE_SCHEMA = "fsdp2prof.estimate.checkpoint/1"
MEMORY_ESTIMATE_SCHEMA = "fsdp2prof.estimate.memory/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRow:
    """Collectives of one (fqn, phase, op, mesh dimension, dtype) that one rank does in one training step.

    The keys it shares with :class:`GroupRow` mean the same, so that an estimate and a recording compare.
    """

    root: int
    """Index of the model: 0, or 1 for the extra one; of a recorded run, of the root module."""
    fqn: str | None
    """FSDP module; the empty string is the root, null belongs to no layer (gradient clipping)."""
    phase: str
    op: str
    process_group: str | None
    """Of a recorded run; null in a prediction from specifications."""
    mesh_dim: str | None
    dtype: str
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTotals:
    """One kind of collective summed over a step."""

    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommEstimate(Shown):
    """Result of ``estimate comm``: what one rank sends in a steady training step."""

    schema: str = COMM_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    groups: list[CommRow]
    per_step: dict[str, CommTotals]
    """Op -> sum over ``groups``."""
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEstimate(Shown):
    """Result of ``estimate checkpoint``: bytes of a distributed checkpoint and the time to write it."""

    schema: str = CHECKPOINT_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    writers: int
    """Ranks that write a shard file: those of one replica."""
    files: int
    """``__RANK_0.distcp`` of each writer plus ``.metadata``."""
    parameter_bytes: int
    """All parameters, once, in their original dtype."""
    optimizer_bytes: int
    """All optimizer state, once."""
    sharded_bytes: int
    """All shard files together: tensors only."""
    rank_bytes_max: int
    """Largest shard file's tensors."""
    rank_bytes_min: int
    full_parameter_bytes: int
    """A full state dict of the model gathered on one rank."""
    full_bytes: int
    """A full state dict of model and optimizer gathered on one rank."""
    sharded_seconds: float | None
    """Writing the largest shard at the given bandwidth per writer; null without one."""
    full_seconds: float | None
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPeak:
    """The most memory a predicted run holds on one device."""

    reserved_bytes: int
    """Most bytes the caching allocator takes from the device, like ``torch.cuda.max_memory_reserved``."""
    active_bytes: int
    """Most bytes allocated at one instant; the rest of the peak describes that instant."""
    step: int | None
    """1 is the first step, without optimizer state before its end; 0 the construction."""
    phase: str
    fqn: str | None
    categories: dict[str, int]
    """Sums exactly to ``active_bytes``."""
    by_layer: list[LayerBytes]
    """Sums exactly to ``active_bytes``."""
    streams: dict[str, int]
    """Reserved bytes of each stream's pool when the reserved peak is reached; sums to ``reserved_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Peaks of one predicted training step."""

    step: int
    reserved_bytes: int
    active_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(Shown):
    """Result of ``estimate memory``: what one rank's device will hold."""

    schema: str = MEMORY_ESTIMATE_SCHEMA
    model: dict[str, Any]
    mesh: dict[str, Any]
    policy: dict[str, Any]
    peak: PredictedPeak
    steps: list[PredictedStep]
    """The first step and a steady one."""
    layers: list[LayerPeak]
    host_bytes: int
    """Memory of the host that this rank's offloaded parameters, gradients and optimizer state take."""
    outside_allocator_bytes: dict[str, int]
    """``low`` and ``high``: context, kernels and communicators, which no allocator counts."""
    device_total_bytes: int | None
    """Memory of the device; null unless the hardware was given."""
    fits: bool | None
    """Null unless the hardware was given."""
    headroom_bytes: int | None
    """Device memory left above the reserved peak and the high end outside of it; negative: missing."""
    advice: list[str]
    """What to change, when it does not fit."""
    assumptions: list[str]
