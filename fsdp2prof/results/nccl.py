"""Result of ``analyze nccl``: communicators, what connects them, how fast their collectives were, and why."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclTransport:
    """What some of a communicator's connections go through."""

    transport: str
    """As NCCL says it, without numbers of devices: ``P2P/IPC``, ``SHM/direct``, ``NET/IB/GDRDMA``."""
    connections: int
    """Channels from one rank to another."""
    across_nodes: int | None
    """Of them, those between nodes; null where the log does not say which node a rank is on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclCommunicator:
    """One communicator."""

    name: str
    """As the training named it, else its mesh dimension or process group, else NCCL's number of it."""
    id: str | None
    """NCCL's, equal on all its ranks; null where the log does not say."""
    mesh_dim: str | None
    """Null without a manifest."""
    size: int | None
    """Ranks."""
    nodes: int | None
    ranks_seen: int
    """Ranks whose files were read."""
    channels: int | None
    """Null where no log says."""
    ring: list[int]
    """Its ranks in the order of the first ring; empty where no log says."""
    trees: int | None
    nvls: bool | None
    """Whether it has trees through the switch."""
    path_types: list[str]
    """How GPUs of a node reach each other: ``NVL``, ``PIX``, ``PXB``, ``PHB``, ``SYS``."""
    transports: list[NcclTransport]
    nics: list[str]
    """Network devices that its connections use."""
    causes: list[str]
    """Ids of the findings that say why it is slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclCollective:
    """The collectives of one kind, size and layer of one communicator."""

    communicator: str
    op: str
    fqn: str | None
    """Layer whose parameters it moves; null where unknown or where it is not FSDP's."""
    phase: str | None
    layer_known: bool
    """Whether the layer is known; needs a manifest."""
    message_bytes: int
    """NCCL's count times its type: the shard of an all-gather or reduce-scatter, else the input."""
    payload_bytes: int | None
    """As in ``analyze trace``: an all-gather's output, a reduce-scatter's input, else the input."""
    algorithm: str | None
    protocol: str | None
    count: int
    """Collectives; where only a log counts them, of one rank."""
    mean_ns: int | None
    """From the moment the last rank had come: the shortest time that one of its ranks was in it; null where
    only a log counts them."""
    waiting_ns: int | None
    """Mean of what the first rank waited for the last; null where one rank alone was seen."""
    bus_bytes_per_s: int | None
    """Wire bytes by that time, as in ``analyze trace``."""
    dtype: str | None = None
    """torch's name, as a log says it; null where only the Inspector saw them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclRank:
    """One process."""

    rank: int | None
    """Of the job; null where nothing says it."""
    host: str
    pid: int
    collectives: int
    """That NCCL Inspector wrote."""
    duration_ns: int
    """In them."""
    came_last: int
    """Of those that several ranks wrote."""
    dropped: int
    """That NCCL Inspector had no room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclAnalysis(Shown):
    """What the files of NCCL say of a job."""

    schema: str = "fsdp2prof.nccl/1"
    inspected: int
    """Processes whose Inspector logs were read."""
    logged: int
    """Processes whose NCCL_DEBUG lines were read."""
    communicators: list[NcclCommunicator]
    """The slowest first: those with causes, then by bytes moved."""
    collectives: list[NcclCollective]
    """Those that took most time first."""
    ranks: list[NcclRank]
    findings: list[Finding]
    verdict: list[str]
    warnings: list[str]
