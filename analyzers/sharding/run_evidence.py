"""What the checks of a run go by: its manifests, put together once.

Environment variables that take choices from NCCL, switch transports off, or are for debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

from fsdp2prof.analyzers import findings
from fsdp2prof.analyzers.sharding.recorded import RecordedGroup, recorded_groups
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo, ProcessGroupInfo, RankManifest, RunInfo
from fsdp2prof.results.check import CheckRow
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.units import dtype_bytes

finding = partial(findings.finding, "sharding")


@dataclass(frozen=True, slots=True)
class OwnCollectives:
    """Evidence from the script's own collectives in the traced steps about gradients that FSDP does not
    reduce."""

    all_reduces: Sequence[Sequence[int]]
    """Elements of each all-reduce, by traced step."""
    exchanges: bool = False
    """Whether there are all-to-alls: experts on several ranks get tokens, and gradients, from all of them."""


class RunEvidence:
    """A run as its ranks describe it."""

    def __init__(
        self,
        info: RunInfo,
        manifests: Mapping[int, RankManifest],
        own_collectives: Callable[[], OwnCollectives | None] = lambda: None,
    ) -> None:
        self.info = info
        self.manifests = manifests
        self._own_collectives = own_collectives
        self.sharded = {rank: one for rank, one in sorted(manifests.items()) if one.param_groups}

    @cached_property
    def groups(self) -> list[RecordedGroup]:
        """Parameter groups, each in the words of every rank that has it."""
        return recorded_groups(self.sharded)

    @cached_property
    def own_collectives(self) -> OwnCollectives | None:
        """Collectives that the script issued itself; None without a trace."""
        return self._own_collectives()

    @property
    def world_size(self) -> int:
        """Ranks of the run, as they say or as the launcher saw."""
        said = [manifest.world_size for manifest in self.manifests.values()]
        return max([*said, self.info.world_size or 0, *(rank + 1 for rank in self.manifests)], default=0)

    @property
    def first(self) -> RankManifest:
        """Of the lowest rank that has parameter groups, otherwise an empty one."""
        return next(iter(self.sharded.values()), RankManifest())

    @property
    def first_parameters(self) -> list[tuple[ParamGroupInfo, ParameterInfo]]:
        """Parameters of the lowest rank, each with its group."""
        return [(group, one) for group in self.first.param_groups for one in group.parameters]

    def process_group(self, rank: int, name: str | None) -> ProcessGroupInfo | None:
        """A process group of a rank by its name."""
        groups = self.sharded[rank].process_groups
        return next((one for one in groups if one.name == name), None)

    def nodes(self, ranks: Sequence[int]) -> int | None:
        """Hosts that some ranks are on; None where one of them left nothing."""
        if any(rank not in self.manifests for rank in ranks):
            return None
        return len({self.manifests[rank].host for rank in ranks})


Outcome: TypeAlias = "tuple[CheckRow, Finding | None]"
"""A check, and its findings."""


def ok(name: str, checked: int, said: str) -> Outcome:
    """Return a check that found nothing."""
    return CheckRow(name=name, state="ok", checked=checked, said=said), None


def unknown(name: str, said: str, checked: int = 0) -> Outcome:
    """Return a check that could not be made, or not for all."""
    return CheckRow(name=name, state="unknown", checked=checked, said=said), None


def failed(name: str, checked: int, found: Finding) -> Outcome:
    """Return a check that found something wrong."""
    return CheckRow(name=name, state="failed", checked=checked, said=f"see {found.id}"), found


_OVERRIDES = {
    "NCCL_ALGO": "the algorithm for every size",
    "NCCL_PROTO": "the protocol for every size",
    "NCCL_NTHREADS": "the threads of a channel",
    "NCCL_MIN_NCHANNELS": "the number of channels",
    "NCCL_MAX_NCHANNELS": "the number of channels",
    "NCCL_MIN_CTAS": "the number of channels",
    "NCCL_MAX_CTAS": "the number of channels",
    "NCCL_BUFFSIZE": "the size of a channel's buffer",
    "NCCL_CROSS_NIC": "the NICs of a ring",
    "NCCL_TOPO_FILE": "the topology",
    "NCCL_GRAPH_FILE": "the rings and trees",
}
"""Variables that take a choice away from NCCL's tuning; source: NCCL's documentation of its environment."""
_DISABLING = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe between GPUs",
    "NCCL_SHM_DISABLE": "shared memory between processes",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE",
    "NCCL_NVLS_ENABLE": "NVLink SHARP",
}
_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the previous one: nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "additional collectives check every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels of all streams share one queue"),
}

_OF_EVERY_BACKEND = ("TORCH_DISTRIBUTED_DEBUG",)
"""Those that slow gloo on a CPU, too."""


def find_in_variables(evidence: RunEvidence) -> Iterator[Finding]:
    """Variables that take a choice from NCCL, or make everything wait."""
    on_device = {rank: one for rank, one in evidence.manifests.items() if one.device.type != "cpu"}
    environment = next(iter((on_device or evidence.manifests).values()), RankManifest()).environment
    set_ones = {name: environment[name] for name in _OVERRIDES if name in environment}
    if set_ones:
        yield finding(
            "nccl_overridden",
            {"variables": set_ones},
            severity="low" if on_device else "info",
            what=_described(set_ones, _OVERRIDES),
            no_gpu="" if on_device else " This run used no GPU, so they had no effect.",
        )
    off = {
        name: environment[name]
        for name in _DISABLING
        if on_device and environment.get(name) == ("0" if name.endswith("ENABLE") else "1")
    }
    if off:
        yield finding("transport_disabled", {"variables": off}, what=_described(off, _DISABLING))
    slow = {
        name: environment[name]
        for name, (value, _) in _DEBUGGING.items()
        if environment.get(name, "").upper() == value and (on_device or name in _OF_EVERY_BACKEND)
    }
    if slow:
        meant = {name: what for name, (_, what) in _DEBUGGING.items()}
        yield finding("debugging_variables", {"variables": slow}, what=_described(slow, meant))
    yield from _differing_variables({rank: one.environment for rank, one in on_device.items()})


def _described(variables: Mapping[str, str], meaning: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value} ({meaning[name]})" for name, value in variables.items())


def _differing_variables(environments: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    names = {*_OVERRIDES, *_DISABLING}
    differing = sorted(
        name for name in names if len({environment.get(name) for environment in environments.values()}) > 1
    )
    if differing:
        yield finding("variables_differ", {"variables": differing})


def own_collectives_of(trace: TraceAnalysis) -> OwnCollectives:
    """Return those of the first rank; of alike all-reduces their mean."""
    if not trace.ranks:
        return OwnCollectives([])
    first = trace.ranks[0]
    exchanges = any(row.rank == first.rank and row.op == "all_to_all" for row in trace.groups)
    steps: dict[int, list[int]] = {step.step: [] for step in first.steps}
    for row in trace.groups:
        own = row.rank == first.rank and row.op == "all_reduce" and row.fqn is None
        if own and row.step in steps and row.count and row.payload_bytes:
            whole = row.payload_bytes // (dtype_bytes(row.dtype or "float32") or 4)
            each = whole // row.count
            steps[row.step] += [each] * (row.count - 1) + [whole - each * (row.count - 1)]
    return OwnCollectives(list(steps.values()), exchanges)
