"""Environment variables that take choices from NCCL, switch transports off, or are for debugging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdp2prof.analyzers.sharding.run_evidence import RunEvidence, finding, listed
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import Finding, Severity

_OVERRIDES = {
    "NCCL_ALGO": "the algorithm for every size",
    "NCCL_PROTO": "the protocol for every size",
    "NCCL_NTHREADS": "the threads of a channel",
    "NCCL_MIN_NCHANNELS": "the number of channels",
    "NCCL_MAX_NCHANNELS": "the number of channels",
    "NCCL_MIN_CTAS": "the number of channels",
    "NCCL_MAX_CTAS": "the number of channels",
    "NCCL_BUFFSIZE": "the size of a channel's buffer",
    "NCCL_CROSS_NIC": "which NICs a ring uses",
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
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before: nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by further ones"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels of all streams queue up behind each other"),
}


def find_in_variables(evidence: RunEvidence) -> Iterator[Finding]:
    """Variables that take a choice from NCCL, or make everything wait."""
    on_device = {rank: one for rank, one in evidence.manifests.items() if one.device.type != "cpu"}
    environment = next(iter((on_device or evidence.manifests).values()), RankManifest()).environment
    set_ones = {name: environment[name] for name in _OVERRIDES if name in environment}
    if set_ones:
        what = ", ".join(f"{name}={value} ({_OVERRIDES[name]})" for name, value in set_ones.items())
        problem = f"NCCL's tuning is overridden: {what}."
        change = "Unset them, measure, and set again only what is faster on this cluster and version."
        if not on_device:
            problem += " This run used no GPU, so they had no effect."
        severity: Severity = "low" if on_device else "info"
        yield finding("nccl_overridden", severity, problem, change, variables=set_ones)
    if not on_device:
        return
    off = {
        name: environment[name]
        for name in _DISABLING
        if name in environment and environment[name] == ("0" if name.endswith("ENABLE") else "1")
    }
    if off:
        what = ", ".join(f"{name}={value} ({_DISABLING[name]})" for name, value in off.items())
        problem = f"Transports are switched off: {what}."
        yield finding("transport_disabled", "medium", problem, "Unset them.", variables=off)
    slow = {
        name: environment[name]
        for name, (value, _) in _DEBUGGING.items()
        if environment.get(name, "").upper() == value
    }
    if slow:
        what = ", ".join(f"{name}={value} ({_DEBUGGING[name][1]})" for name, value in slow.items())
        yield finding(
            "debugging_variables", "medium", f"For debugging only: {what}.", "Unset them.", variables=slow
        )
    yield from _differing_variables({rank: one.environment for rank, one in on_device.items()})


def _differing_variables(environments: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    names = {*_OVERRIDES, *_DISABLING}
    differing = sorted(
        name for name in names if len({environment.get(name) for environment in environments.values()}) > 1
    )
    if differing:
        problem = (
            f"Ranks have different values of {listed(differing)}: NCCL may hang in the first collective."
        )
        change = "Export the same variables to every node."
        yield finding("variables_differ", "high", problem, change, variables=differing)
