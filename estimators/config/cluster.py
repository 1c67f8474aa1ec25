"""Placement of ranks: nodes, the links between them, and the ranks of each mesh dimension."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec

_DIMENSIONS = ("tp", "fsdp", "dp_replicate", "pp")
"""From the innermost, whose ranks are neighbours, outwards; fsdp is dp_shard x cp."""
_EXPERTS = ("ep", "efsdp")
"""The same of the ranks of fsdp x tp as the experts regroup them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The ranks of one process group."""

    ranks: int
    nodes: int
    """Nodes that they are on."""
    per_node: int
    """Its ranks on one node."""
    groups_per_node: int
    """Groups of the same dimension that use one node's network at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster of equal nodes with one kind of accelerator.

    Raises ``ModelError`` if several nodes are needed and no network is given, and for hardware without a
    memory bandwidth, which every step needs.
    """

    hardware: HardwareSpec
    gpus_per_node: int = 8
    network: NetworkSpec | None = None
    nics_per_node: int | None = None
    """One a GPU by default."""
    copy_engine_gathers: bool = False
    """Whether copy engines, not kernels, gather parameters within a node."""
    behind_a_switch: bool = False
    """Whether the GPUs of a node have a switch between them where a board of their number has none."""
    node_frac: float = 1.0
    """Rate of collectives inside a node over the hardware's own."""
    small_frac: float = 1.0
    """The same of those of less than 256 MiB."""
    network_frac: float = 1.0
    """Rate of collectives between nodes over the network's own."""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or (self.nics_per_node is not None and self.nics_per_node < 1):
            raise ModelError("gpus_per_node and nics_per_node must be at least 1")
        _ = self.hardware.achieved_memory_bytes_per_s

    def with_attention_of(self, policy: PolicySpec) -> Cluster:
        """Return the same cluster with the attention kernel that a policy runs on it."""
        stated = self.hardware.attention_tflops
        kernel = attention_on(stated if isinstance(stated, dict) else (), policy)
        hardware = self.hardware.with_attention(kernel)
        if kernel != policy.attention:
            why = f"; attention: {kernel}, which torch {policy.rules.version} chooses on this part"
            hardware = msgspec.structs.replace(hardware, source=hardware.source + why)
        return replace(self, hardware=hardware)

    def check_copy_engines(self, mesh: MeshSpec) -> None:
        """Raise ``ModelError`` where copy engines cannot gather this mesh's parameters."""
        if not self.copy_engine_gathers:
            return
        if mesh.fsdp_size == 1:
            raise ModelError(f"copy-engine all-gathers: mesh {mesh} gathers no parameters")
        if self.node_link != "nvlink":
            raise ModelError(
                f"copy-engine all-gathers write over NVLink, which {self.hardware.name} does not have"
            )
        if self.placement(mesh, "fsdp").nodes > 1:
            raise ModelError("copy-engine all-gathers stay within a node; here a shard group spans several")

    @property
    def node_link(self) -> str:
        """``nvlink``, ``pcie``, or ``gloo`` between CPUs."""
        if self.hardware.on_host:
            return "gloo"
        return "pcie" if self.hardware.link_gb_per_s is None else "nvlink"

    @property
    def is_direct(self) -> bool:
        """Whether links go from GPU to GPU, without a switch."""
        return self.hardware.direct_gpus == self.gpus_per_node and not self.behind_a_switch

    def nvls_bytes_per_s(self, ranks: int) -> float | None:
        """Bus bandwidth of an all-reduce in the switch; None if no switch reduces for so few ranks."""
        rate = self.hardware.nvls_gb_per_s
        if rate is None or self.is_direct or ranks < self.hardware.nvls_ranks:
            return None
        return rate * 1e9 * self.node_frac

    def placement(self, mesh: MeshSpec, dimension: str) -> Placement:
        """Where the groups of a mesh dimension are: ranks are numbered with tp innermost, then fsdp."""
        if dimension in _EXPERTS:
            apart = dimension == "efsdp"
            return self.place(mesh.expert_fsdp_size if apart else mesh.ep, mesh.ep if apart else 1)
        sizes = {"tp": mesh.tp, "fsdp": mesh.fsdp_size, "dp_replicate": mesh.dp_replicate, "pp": mesh.pp}
        stride = 1
        for name in _DIMENSIONS:
            if name == dimension:
                break
            stride *= sizes[name]
        return self.place(sizes[dimension], stride)

    def check_network(self, mesh: MeshSpec) -> None:
        """Raise ``ModelError`` where a mesh needs a network between nodes and none is given."""
        sizes = {"tp": mesh.tp, "fsdp": mesh.fsdp_size, "dp_replicate": mesh.dp_replicate, "pp": mesh.pp}
        for dimension, size in sizes.items():
            if size > 1:
                self.placement(mesh, dimension)

    def place(self, ranks: int, stride: int) -> Placement:
        """Where groups are whose ranks are ``stride`` apart."""
        span = ranks * stride
        if span <= self.gpus_per_node:
            return Placement(ranks=ranks, nodes=1, per_node=ranks, groups_per_node=1)
        if self.network is None:
            raise ModelError(
                f"{span} ranks are more than one node of {self.gpus_per_node} GPUs: name the network "
                "between nodes (--network 400gb-ib), or set a larger node (--gpus-per-node: GPUs that NVLink "
                "joins, 72 in an NVL72 rack)"
            )
        per_node = max(1, self.gpus_per_node // stride)
        return Placement(
            ranks=ranks,
            nodes=ceil(ranks / per_node),
            per_node=min(per_node, ranks),
            groups_per_node=min(stride, self.gpus_per_node),
        )

    def bus_bytes_per_s(self, placement: Placement) -> float:
        """Bus bandwidth of a large collective: the slower of the node's links and its network share."""
        inside = self.node_bytes_per_s(placement)
        return inside if placement.nodes == 1 else min(inside, self.network_bytes_per_s(placement))

    def node_bytes_per_s(self, placement: Placement) -> float:
        """Bus bandwidth of a group's ranks on one node; infinite for one rank."""
        if placement.per_node == 1:
            return float("inf")
        ranks = min(placement.per_node, placement.ranks)
        return self.node_frac * self.hardware.node_bus_bytes_per_s(ranks, direct=self.is_direct)

    def network_bytes_per_s(self, placement: Placement) -> float:
        """The share of a node's network that one group gets."""
        assert self.network is not None
        nics = self.nics_per_node or self.gpus_per_node
        network = nics * self.network.gb_per_s * self.network.achieved_frac * self.network_frac * 1e9
        return network / placement.groups_per_node


def attention_on(kernels: Collection[str], policy: PolicySpec) -> str:
    """Return the attention that a policy runs on a part with known rates for some ``kernels``.

    Rates of cuDNN are stated for the parts on which torch may choose it automatically.
    """
    chooses = policy.torch is not None and policy.rules.prefers_cudnn_attention and "cudnn" in kernels
    unstated = policy.attention == "flash" and not policy.attention_is_stated
    return "cudnn" if chooses and unstated else policy.attention
