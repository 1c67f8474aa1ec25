"""Records that NCCL itself leaves of a job: the Inspector plugin's collectives and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp2prof.tables.columns import IntArray, Strings, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedCalls(Table):
    """Collectives that one process finished, as the Inspector wrote them."""

    communicator: Strings
    """Its ``id``, a hash that is equal on all its ranks."""
    op: Strings
    """One of ``fsdp2prof.vocabulary.OPS``."""
    seq: IntArray
    """Counts the collectives of this kind of the communicator, from 0."""
    message_bytes: IntArray
    """NCCL's count times its type: the shard of an all-gather or a reduce-scatter, otherwise the input."""
    duration_ns: IntArray
    algorithm: Strings
    protocol: Strings
    timing: Strings
    """``kernel_gpu``, ``kernel_cpu`` or ``collective_cpu``; null in older versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedCommunicator:
    """A communicator as one of its ranks sees it."""

    id: str
    name: str | None
    rank: int
    """In the communicator."""
    size: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedProcess:
    """The Inspector's records of one process."""

    source: str
    host: str
    pid: int
    communicators: Mapping[str, InspectedCommunicator]
    calls: InspectedCalls
    dropped: int
    """Collectives that had left its ring before they were written."""
    unread: int
    """Lines that are not valid records."""


@dataclass(frozen=True, order=True, slots=True)
class Connection:
    """From one rank of a communicator to another."""

    source: int
    target: int
    via: str
    """As NCCL says it: ``P2P/IPC``, ``SHM/direct``, ``NET/IB/0/GDRDMA``."""


@dataclass(frozen=True, order=True, slots=True)
class LoggedCall:
    """A kind of call."""

    op: str
    message_bytes: int
    algorithm: str | None = None
    protocol: str | None = None
    dtype: str | None = None
    """torch's name; null where the log does not say."""


@dataclass(kw_only=True, slots=True)
class LoggedCommunicator:
    """A communicator in the log of one of its ranks."""

    host: str
    pid: int
    id: str | None
    """``commId``, or that of the communicator it was split from; null if the log does not contain it."""
    rank: int | None
    size: int | None
    nodes: int | None = None
    channels: int | None = None
    ring: tuple[int, ...] = ()
    """Ranks in the order of its first ring, where its rank 0 logged it."""
    trees: int = 0
    nvls: bool = False
    path_types: set[str] = field(default_factory=set)
    """How far apart GPUs are in its rings and trees: ``NVL``, ``PIX``, ``PHB``, ``SYS``, ..."""
    connections: Counter[Connection] = field(default_factory=Counter)
    calls: Counter[LoggedCall] = field(default_factory=Counter)
    chosen: Counter[LoggedCall] = field(default_factory=Counter)
    """With the algorithm and protocol that were chosen, where ``TUNING`` was logged."""


@dataclass(kw_only=True, slots=True)
class LoggedProcess:
    """Facts about a process as a whole."""

    host: str
    pid: int
    version: str | None = None
    networks: set[str] = field(default_factory=set)
    set_by_plugin: set[str] = field(default_factory=set)
    """Variables that a network plugin has set, not the user."""
    """``Using network ...``."""
    nics: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Devices by network: ``IB``, ``Socket``."""
    no_device: set[str] = field(default_factory=set)
    """Networks that found none."""
    gdr_disabled: int = 0
    """Devices for which GPU Direct RDMA is disabled."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that NCCL said it took."""
    p2p_disabled: int = 0
    """Pairs of GPUs that are connected and not used so."""
    warnings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclLog:
    """Everything that some logs say."""

    communicators: Sequence[LoggedCommunicator]
    processes: Sequence[LoggedProcess]
    lines: int
    """Of NCCL's, that were read."""
