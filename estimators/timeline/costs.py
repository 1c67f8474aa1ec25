"""Costs of a program's commands on a cluster: kernels, collectives, and the host that issues them.

How long collectives take on a topology: NCCL's own model of latency and bandwidth by protocol and size.

A ring of n ranks passes n-1 steps for an all-gather or a reduce-scatter and twice as many for an all-reduce.
Its time is a base latency, a latency per step that depends on the link the step crosses, and the bytes over
the bandwidth that the protocol leaves: LL half, LL128 120/128, Simple all of it. NCCL takes the fastest; so
does this. Where NVLink SHARP reduces in the switch, an all-reduce may beat the ring. Source of the constants:
NCCL's tuning model, src/graph/tuning.cc.

Collectives of a captured step that no formula counts, attributed as a trace's are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil, comb

import numpy as np

from fsdp2prof.analyzers.phases import build_phases, find_rows
from fsdp2prof.estimators.config.cluster import Cluster, Placement
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.shares import CONTENTION_FRACS, HOST_CORE_GB_PER_S, HOST_OPERATOR_NS
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    HostWait,
    Kernel,
    Leave,
    Program,
    Record,
    Wait,
    Work,
    labelled,
)
from fsdp2prof.estimators.traffic import Ledger
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.schedule import Axis
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import LabelTable, StepTable


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPace:
    """How fast the host issues, in nanoseconds a command."""

    operator_ns: int = HOST_OPERATOR_NS[1]
    collective_ns: int = 30_000
    """With this and the next three chosen, not published."""
    label_ns: int = 10_000
    """Entering a labelled range: FSDP2's own Python around it."""
    event_ns: int = 1_500
    launch_latency_ns: int = 4_000
    """From the launch of a kernel on an idle stream to its start."""
    memory_gb_per_s: float = HOST_CORE_GB_PER_S
    """Traffic of an optimizer on the host; of one core, since torchrun gives a rank one thread."""

    def work_ns(self, kernel: Kernel) -> int:
        """Time of the host's own computation, by the bytes that it moves; 0 for the device's work."""
        on_host = kernel.work is not None and kernel.work.kind == "host"
        return round(kernel.work.bytes / self.memory_gb_per_s) if kernel.work is not None and on_host else 0


@dataclass(kw_only=True)
class ClusterCosts:
    """Costs on a cluster; collectives by their mesh dimension."""

    cluster: Cluster
    mesh: MeshSpec
    host: HostPace = field(default_factory=HostPace)
    contention_frac: float = CONTENTION_FRACS[1]
    """How much longer a computing kernel takes while a collective is in flight."""

    compute_frac: float = 1.0
    """Rate of products and attention over the hardware's own."""
    memory_frac: float = 1.0
    """Rate at which kernels move memory over the hardware's own."""

    def __post_init__(self) -> None:
        self.launch_latency_ns = self.host.launch_latency_ns
        self._kernels: dict[Work, int] = {}
        self._transfers: dict[tuple[str, int, str, int, tuple[int, int] | None], Transfer] = {}

    def kernel_ns(self, kernel: Kernel) -> int:
        """Time of a kernel alone; 0 for commands that launch nothing."""
        work = kernel.work
        if work is None or not work.bytes or work.kind == "host":
            return 0
        known = self._kernels.get(work)
        if known is None:
            known = self._kernels[work] = kernel_ns(
                work,
                self.cluster.hardware,
                compute_frac=self.compute_frac,
                memory_frac=self.memory_frac,
            )
        return known

    def collective_ns(self, collective: Collective) -> int:
        """Time of a collective for which no rank is late."""
        return self.transfer(collective).ns

    def link(self, collective: Collective) -> str:
        """Name of the link a collective fills."""
        return self.transfer(collective).link

    def transfer(self, collective: Collective) -> Transfer:
        """Return time, link and bandwidth of a collective."""
        key = (
            collective.op,
            collective.payload_bytes,
            collective.mesh_dim,
            collective.group_size,
            collective.chosen,
        )
        known = self._transfers.get(key)
        if known is None:
            place = self.placement(collective)
            known = transfer(collective.op, collective.payload_bytes, place, self.cluster, collective.chosen)
            self._transfers[key] = known
        return known

    def placement(self, collective: Collective) -> Placement:
        """Where the ranks of a collective's group are."""
        dimension = {"dp_shard": "fsdp", "cp": "fsdp", "dp_shard_cp": "fsdp"}.get(
            collective.mesh_dim, collective.mesh_dim
        )
        if dimension in ("tp", "fsdp", "dp_replicate", "ep", "efsdp"):
            return self.cluster.placement(self.mesh, dimension)
        return self.cluster.place(collective.group_size, self.mesh.tp)  # a part of the shard dimension

    def slowdown(self, kernel: Kernel) -> float:
        """How much longer a kernel takes beside a collective."""
        return self.contention_frac

    def disturbs(self, collective: Collective) -> bool:
        """Whether a collective takes multiprocessors: copy engines' all-gathers of parameters do not."""
        shards = collective.mesh_dim in ("fsdp", "dp_shard", "cp", "dp_shard_cp", "efsdp")
        return not (self.cluster.copy_engine_gathers and shards and collective.op == "all_gather")

    def host_ns(self, command: Command) -> int:
        """Time the host needs to issue a command."""
        host = self.host
        if isinstance(command, Kernel):
            return host.operator_ns + host.work_ns(command)
        if isinstance(command, Collective):
            return host.collective_ns
        if isinstance(command, Enter):
            return host.label_ns
        return host.event_ns if isinstance(command, (Record, Wait, HostWait)) else 0


_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.55))
"""Rows and columns of a tile, and the share of the achieved rate that tiles of this size reach."""

_INNER = 128
"""Inner dimension at which prologue and epilogue take as long as the products between them."""


_UNALIGNED = 0.17
"""Share of the rate that products of half-precision matrices keep whose rows 16 bytes do not divide: 97 to
141 TFLOP/s for a vocabulary of 50,257 on an H100, torch 2.11."""


def kernel_ns(
    work: Work, hardware: HardwareSpec, *, compute_frac: float = 1.0, memory_frac: float = 1.0
) -> int:
    """Nanoseconds of a kernel that nothing disturbs, at a share of the rates of computing and of memory.

    The larger of its arithmetic and its memory traffic, and never less than an empty kernel. The
    multiprocessors compute the tiles of a matrix product in waves, of which the last is seldom full (tile and
    wave quantisation, NVIDIA "Matrix Multiplication Background"); a long inner dimension hides each tile's
    prologue and epilogue; matrices whose rows 16 bytes do not divide run other kernels. Attention follows its
    own measured curve over the sequence length. Raises ``ModelError`` for an element type whose matrix rate
    the accelerator does not state.
    """
    if work.kind in ("host_to_device", "device_to_host"):
        seconds = work.bytes / hardware.host_link_bytes_per_s
    else:
        seconds = work.bytes / (memory_frac * hardware.achieved_memory_bytes_per_s)
    if work.kind == "matmul":
        seconds = max(seconds, work.flops / (compute_frac * _matmul_rate(work, hardware)))
    elif work.kind == "attention":
        seconds = max(seconds, work.flops / (compute_frac * _attention_rate(work, hardware)))
    return hardware.kernel_floor_ns + round(1e9 * seconds)


def _matmul_rate(work: Work, hardware: HardwareSpec) -> float:
    batch, m, n, k = work.shape
    units = hardware.units
    used = 0.0
    for rows, columns, share in _TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        filled = batch * m * n / (tiles * rows * columns)
        used = max(used, share * filled * tiles / (units * ceil(tiles / units)))
    rate = hardware.achieved_flops(work.dtype) * used * k / (k + _INNER)
    return rate * _UNALIGNED if work.unaligned and work.dtype in ("bfloat16", "float16") else rate


def _attention_rate(work: Work, hardware: HardwareSpec) -> float:
    _, _, queries, keys, depth, *_ = work.shape
    return hardware.attention_flops(work.dtype, depth, min(queries, keys), backward=work.backward)


_BASE_US = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}
_STEP_US = {
    "nvlink": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
    "pcie": {"LL": 1.0, "LL128": 1.9, "Simple": 5.7},
    "gloo": {"LL": 60.0, "LL128": 60.0, "Simple": 60.0},
    "network": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
}
"""Microseconds per step; gloo's is a round trip through sockets of one machine, for groups that were not
measured."""
_SHARE = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
_LL_BYTES_PER_S = 39e9
"""LL is bound by its flags: NCCL's ``llMaxBws`` for one node."""

_NVLS_BASE_US = 25.0
_SMALL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective's time, and the link it uses."""

    ns: int
    link: str
    """``nvlink``, ``pcie`` or ``network``: the slowest it crosses."""
    bytes_per_s: float
    """Bus bandwidth once under way."""


def transfer(
    op: str,
    payload_bytes: int,
    placement: Placement,
    cluster: Cluster,
    chosen: tuple[int, int] | None = None,
) -> Transfer:
    """Return the time of one collective over ``placement``'s ranks. One rank takes none.

    ``chosen`` is that of a ``Collective``.
    """
    n = placement.ranks
    if n == 1:
        return Transfer(0, "", 0.0)
    measured = cluster.hardware.measured_ns(op, n, payload_bytes) if placement.nodes == 1 else None
    if measured is not None:
        return Transfer(measured, cluster.node_link, payload_bytes * 1e9 / measured)
    passes = 2 if op == "all_reduce" else 1
    moved = payload_bytes * (1.0 if op in ("send_recv", "broadcast") else passes * (n - 1) / n)
    moved *= _sent_once(n, chosen)
    link = "network" if placement.nodes > 1 else cluster.node_link
    slowed = _slowed(payload_bytes, placement, cluster)
    bandwidth = slowed * cluster.bus_bytes_per_s(placement)
    if op == "all_to_all" and placement.nodes > 1:
        moved, bandwidth = _exchanged(payload_bytes, placement, cluster, chosen)
    steps = 1 if op in ("send_recv",) else passes * (n - 1)
    across = 0 if placement.nodes == 1 else min(steps, passes * placement.nodes)
    times = {}
    for protocol, base in _BASE_US.items():
        share = bandwidth * _SHARE[protocol]
        if protocol == "LL":
            share = min(share, _LL_BYTES_PER_S)
        latency = base + (steps - across) * _STEP_US[cluster.node_link][protocol]
        latency += across * _STEP_US["network"][protocol]
        times[protocol] = latency * 1e-6 + moved / share
    seconds = min(times.values())
    in_switch = cluster.nvls_bytes_per_s(n) if op == "all_reduce" and placement.nodes == 1 else None
    if in_switch is not None:
        seconds = min(seconds, _NVLS_BASE_US * 1e-6 + moved / (slowed * in_switch))
    return Transfer(round(1e9 * seconds), link, bandwidth)


def _slowed(payload_bytes: int, placement: Placement, cluster: Cluster) -> float:
    """Rate of a small collective inside a node over a large one's, as the cluster has them vary."""
    small = placement.nodes == 1 and payload_bytes < _SMALL_BYTES
    return cluster.small_frac / cluster.node_frac if small else 1.0


def _sent_once(places: int, chosen: tuple[int, int] | None) -> float:
    """Part of an all-to-all's bytes if a token goes once to each of ``places`` that has any of its experts.

    With the experts of a token drawn evenly from all, and as many of them in each place.
    """
    if chosen is None:
        return 1.0
    top_k, experts = chosen
    missed = comb(experts - experts // places, top_k) / comb(experts, top_k)
    return places * (1 - missed) / top_k


def _exchanged(
    payload_bytes: int, placement: Placement, cluster: Cluster, chosen: tuple[int, int] | None
) -> tuple[float, float]:
    """Bytes of an all-to-all over the slower of the node's links and its network, and that one's bandwidth.

    Every rank of a node sends its own bytes to other nodes, where a ring passes the same ones on.
    """
    n, here = placement.ranks, placement.per_node
    inside = payload_bytes * (n - 1) / n * _sent_once(n, chosen), cluster.node_bytes_per_s(placement)
    between = here * payload_bytes * (n - here) / n * _sent_once(placement.nodes, chosen)
    across = between, cluster.network_bytes_per_s(placement)
    return max(inside, across, key=lambda part: part[0] / part[1])


Place = tuple[str, str]
"""(layer with its numbers left out, phase)."""


def family_of(fqn: str | None, phase: str | None) -> Place:
    """Return the place of a layer: alike layers share one."""
    return re.sub(r"\d+", "*", "-" if fqn is None else fqn), phase or "other"


def places_of(program: Program) -> list[Place]:
    """Return the place of every command."""
    return [family_of(fqn, phase) for fqn, phase in layers_of(program)]


def layers_of(program: Program) -> list[tuple[str | None, str | None]]:
    """Return the layer and phase of every command; its position serves as host time."""
    size = len(program.commands)
    ranges: list[tuple[int, int, str]] = []
    opened: list[tuple[int, str]] = []
    for position, command in enumerate(program.commands):
        if isinstance(command, Enter):
            name = AUTOGRAD_NODE if command.name.startswith(AUTOGRAD_NODE) else command.name
            opened.append((position, name))
        elif isinstance(command, Leave) and opened:
            begin, name = opened.pop()
            ranges.append((begin, position, name))
    ranges.sort(key=lambda one: (one[0], -one[1]))
    labels = LabelTable(
        thread=np.zeros(len(ranges), dtype=np.int64),
        start_ns=np.array([2 * begin for begin, _, _ in ranges], dtype=np.int64),
        end_ns=np.array([2 * end + 1 for _, end, _ in ranges], dtype=np.int64),
        name=Strings.intern(name for _, _, name in ranges),
    )
    step = StepTable(
        step=np.ones(1, dtype=np.int64),
        start_ns=np.zeros(1, dtype=np.int64),
        end_ns=np.full(1, 2 * size + 2, dtype=np.int64),
    )
    phases = build_phases(labels, step)
    rows = find_rows(phases, np.zeros(size, dtype=np.int64), 2 * np.arange(size, dtype=np.int64))
    return list(zip(phases.fqn.lookup(rows).to_list(), phases.phase.lookup(rows).to_list(), strict=True))


_FSDP = "FSDP::"


def add_executed(ledger: Ledger, program: Program) -> None:
    """Add the collectives that FSDP does not make: tensor parallelism's, and those of clipping.

    Each belongs to the layer and phase that the labels around it say.
    """
    inside, last = _by_fsdp(program)
    layers = layers_of(program)
    for at, command in enumerate(program.commands):
        if isinstance(command, Collective) and at not in inside:
            fqn, phase = (None, "optimizer") if at > last else layers[at]
            ledger.add(
                root=0,
                fqn=fqn,
                phase=phase or "other",
                op=command.op,
                axis=Axis(size=command.group_size, mesh_dim=command.mesh_dim),
                dtype=command.dtype,
                payload_bytes=command.payload_bytes,
            )


def _by_fsdp(program: Program) -> tuple[frozenset[int], int]:
    """Positions of FSDP's own collectives, and where the last of its labels ends."""
    inside: set[int] = set()
    last = 0
    for at, (command, names) in enumerate(labelled(program.commands)):
        if isinstance(command, Leave) and names[-1].startswith((_FSDP, AUTOGRAD_NODE)):
            last = at
        elif isinstance(command, Collective) and command.mesh_dim != "tp":
            inside.update([at] if any(name.startswith(_FSDP) for name in names) else [])
    return frozenset(inside), last
