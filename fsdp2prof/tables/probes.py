"""Measurements of the processes that `check env` and `check parity` start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor that an operator got or made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """torch's, without the module."""


Value = TensorValue | tuple[TensorValue, ...] | bool | int | None
"""An argument's identity: tensors, the relevant part of other values, None for everything else."""


@dataclass(frozen=True, slots=True)
class ExecutionNode:
    """An operator or a labelled range."""

    id: int
    """Counts in the order in which they began."""
    parent: int
    name: str
    schema: str
    """Of the operator, as torch writes it; empty for a range."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionTrace:
    """One rank's file."""

    source: str
    version: str
    nodes: Sequence[ExecutionNode]
    """In the order in which they began."""


class DimensionSum(msgspec.Struct, kw_only=True):
    """An all-reduce of the ranks' numbers over one mesh dimension."""

    dimension: str
    ranks: list[int]
    """Of the group."""
    total: int
    """Each rank gave its own number plus one."""


class GatherTime(msgspec.Struct, kw_only=True):
    """All-gathers of one size over all ranks."""

    payload_bytes: int
    """Gathered by each rank."""
    median_ns: int
    repeats: int


class RankProbe(msgspec.Struct, kw_only=True):
    """One rank."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    device: str
    """``cpu``, or the device's name."""
    device_index: int | None = None
    device_uuid: str | None = None
    """The driver's: with a visible device each, ranks have the same index."""
    backend: str
    variables: dict[str, str]
    """Those that rendezvous goes by, and that change collectives."""
    versions: dict[str, str]
    started_ns: int
    """``time.time_ns`` when the process group was there."""
    init_ns: int
    """That making the process group took."""
    sums: list[DimensionSum] = []
    gathers: list[GatherTime] = []
    clock_offset_ns: int | None = None
    """Of this rank's clock against rank 0's; null on rank 0."""
    clock_round_trip_ns: int | None = None
    """Of the fastest exchange: the offset is known to half of it."""
    disk_free_bytes: int | None = None
    disk_write_bytes_per_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One tensor on one rank beside the plain one."""

    step: int
    """-1 is before the first."""
    kind: str
    name: str
    position: int
    """In the order of the model."""
    dtype: str
    """The lowest precision that it passed through."""
    error: float
    """Norm of the difference."""
    norm: float
    """Of the plain one."""
    product: float
    """Inner product of both: over the squared norm it is their ratio."""
    missing: bool = False
    """Whether only one side has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityMeasurements:
    """Of all ranks."""

    model: str
    mesh: str
    world_size: int
    steps: int
    micro_batches: int
    by_rank: tuple[tuple[Measured, ...], ...]
    plain_losses: tuple[float, ...]
    """Mean of each step."""
    sharded_losses: tuple[float, ...]
