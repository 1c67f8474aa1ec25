"""Result of ``bench``: measured rates of a cluster's links, devices and hosts."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCollective:
    """Measured times of one collective at one size."""

    op: str
    mesh_dim: str
    ranks: int
    payload_bytes: int
    """Payload: all-gather, whole output; reduce-scatter, whole input; all-reduce, the tensor."""
    count: int
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float
    busbw_bytes_per_s: float
    """Bus bandwidth at the median time, as nccl-tests defines it."""
    fitted_ns: float
    """Time predicted by the group's fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFit:
    """Fit of a collective's time in one group: ``latency + wire bytes / bandwidth``."""

    op: str
    mesh_dim: str
    ranks: int
    latency_ns: float
    busbw_bytes_per_s: float | None
    """Bus bandwidth of the fit; null if larger sizes took no longer."""
    residual_frac: float
    """Median relative error over the sizes."""
    worst_residual_frac: float
    half_payload_bytes: int | None
    """Payload at which latency is half of the time; smaller collectives are latency-bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRate:
    """Measured rate of one kind and size of work on one device."""

    kind: str
    dtype: str
    size: str
    count: int
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float
    per_s: float
    """Operations, bytes or operators per second, at the median time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPart:
    """Figures of this machine for ``estimate step``; the keys of a hardware file."""

    memory_mib: float
    achieved_memory_gb_per_s: float
    multiprocessors: int
    achieved_tflops: dict[str, float]
    attention_tflops: float
    host_link_gb_per_s: float
    kernel_floor_ns: int
    host_operator_ns: int
    overlap_slowdown_frac: float | None
    on_host: bool
    """Whether operators run on the host and collectives block it: a CPU."""
    collectives: dict[str, dict[str, list[list[int]]]]
    """Operation -> ranks within a node -> (payload in bytes, nanoseconds), ascending."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult(Shown):
    """Result of ``bench``; also a file for ``--hardware``."""

    schema: str = "fsdp2prof.bench/1"
    verdict: list[str]
    """At most three sentences."""
    device: str
    backend: str
    world_size: int
    ranks_per_node: int
    torch: str
    quick: bool
    seconds: float
    collectives: list[BenchCollective]
    fits: list[BenchFit]
    rates: list[BenchRate]
    overlap_slowdown_frac: float | None
    """Fraction by which matrix products take longer beside an all-gather; null if not measured."""
    accelerators: dict[str, MeasuredPart]
    """The measured accelerator by name, as read by ``--hardware``."""
    notes: list[str]
