"""Result of ``analyze nccl``: communicators, their transports, speed of their collectives, and causes of
slowness."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown
from fsdp2prof.results.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclTransport:
    """Connections of a communicator over one transport."""

    transport: str
    """Transport as NCCL logs it, without device numbers: ``P2P/IPC``, ``SHM/direct``, ``NET/IB/GDRDMA``."""
    connections: int
    """Number of channels between pairs of ranks."""
    across_nodes: int | None
    """Number of channels between nodes; null if the log does not give the ranks' nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclCommunicator:
    """One communicator."""

    name: str
    """Name given by the training, otherwise mesh dimension or process group, otherwise NCCL's id."""
    id: str | None
    """NCCL's id, equal on all its ranks; null if not logged."""
    mesh_dim: str | None
    """Mesh dimension; null without a manifest."""
    size: int | None
    """Number of ranks."""
    nodes: int | None
    ranks_seen: int
    """Number of ranks whose files were read."""
    channels: int | None
    """Number of channels; null if not logged."""
    ring: list[int]
    """Ranks in the order of the first ring; empty if not logged."""
    trees: int | None
    nvls: bool | None
    """Whether it has trees through the switch (NVLS)."""
    path_types: list[str]
    """Connection between GPUs of a node: ``NVL``, ``PIX``, ``PXB``, ``PHB``, ``SYS``."""
    transports: list[NcclTransport]
    nics: list[str]
    """Network devices of its connections."""
    causes: list[str]
    """Ids of the findings about its slowness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclCollective:
    """Collectives of one kind, size and layer of one communicator."""

    communicator: str
    op: str
    fqn: str | None
    """Layer whose parameters it moves; null if unknown or not FSDP's."""
    phase: str | None
    layer_known: bool
    """Whether the layer is known; this needs a manifest."""
    message_bytes: int
    """NCCL's count times element size: the shard of an all-gather or reduce-scatter, otherwise the input."""
    payload_bytes: int | None
    """Payload as in ``analyze trace``: an all-gather's output, a reduce-scatter's input, otherwise the
    input."""
    algorithm: str | None
    protocol: str | None
    count: int
    """Number of collectives; counted on one rank if only a log has them."""
    mean_ns: int | None
    """Mean time after the last rank's arrival: the shortest time of any of its ranks; null if only a log
    counts them."""
    waiting_ns: int | None
    """Mean time that the first rank waited for the last; null if only one rank was logged."""
    bus_bytes_per_s: int | None
    """Bus bandwidth: wire bytes over that time, as in ``analyze trace``."""
    dtype: str | None = None
    """torch's name of the dtype, from a log; null if only the Inspector recorded it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclRank:
    """One process."""

    rank: int | None
    """Rank in the job; null if unknown."""
    host: str
    pid: int
    collectives: int
    """Number of collectives that NCCL Inspector wrote."""
    duration_ns: int
    """Time in these collectives."""
    came_last: int
    """Number of collectives at which it arrived last, among those logged by several ranks."""
    dropped: int
    """Number of collectives that NCCL Inspector dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclAnalysis(Shown):
    """Contents of a job's NCCL logs."""

    schema: str = "fsdp2prof.nccl/1"
    inspected: int
    """Number of processes with Inspector logs."""
    logged: int
    """Number of processes with NCCL_DEBUG lines."""
    communicators: list[NcclCommunicator]
    """Communicators: those with a cause of slowness first, then by bytes moved."""
    collectives: list[NcclCollective]
    """Collectives, most time first."""
    ranks: list[NcclRank]
    findings: list[Finding]
    verdict: list[str]
    warnings: list[str]
