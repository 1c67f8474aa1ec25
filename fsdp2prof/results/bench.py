"""Result of ``bench``: how fast a cluster's links, devices and hosts are."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCollective:
    """One collective of one size."""

    op: str
    mesh_dim: str
    ranks: int
    payload_bytes: int
    """all-gather: whole output; reduce-scatter: whole input; all-reduce: the tensor."""
    count: int
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float
    busbw_bytes_per_s: float
    """Bus bandwidth of the median time, as nccl-tests defines it."""
    fitted_ns: float
    """Time by the group's fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFit:
    """A collective's time in one group as ``latency + wire bytes / bandwidth``."""

    op: str
    mesh_dim: str
    ranks: int
    latency_ns: float
    busbw_bytes_per_s: float | None
    """Bus bandwidth of the fit; null where larger sizes took no longer."""
    residual_frac: float
    """Median of the sizes' relative errors."""
    worst_residual_frac: float
    half_payload_bytes: int | None
    """Payload at which latency is half of the time; below it a collective is latency-bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRate:
    """Work of one kind and size on one device."""

    kind: str
    dtype: str
    size: str
    count: int
    median_ns: float
    lower_quartile_ns: float
    upper_quartile_ns: float
    per_s: float
    """Operations, bytes or operators a second, by the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPart:
    """The figures by which ``estimate step`` knows this machine; the keys of a hardware file."""

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
    """Whether operators run on the host itself and collectives block it: a CPU."""
    collectives: dict[str, dict[str, list[list[int]]]]
    """Operation -> ranks of one node -> (payload in bytes, nanoseconds), ascending."""
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
    """Fraction by which products take longer beside an all-gather; null where it was not measured."""
    accelerators: dict[str, MeasuredPart]
    """The measured accelerator by name: the part that ``--hardware`` reads."""
    notes: list[str]
