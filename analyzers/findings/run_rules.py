"""Findings about ranks, hosts and shards: stragglers, a host that cannot keep up or stops, padding."""

from __future__ import annotations

import math
from collections import defaultdict

from fsdp2prof.analyzers.findings.evidence import Evidence, layer_name
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo
from fsdp2prof.results import Finding, Severity, Straggler
from fsdp2prof.units import format_frac

__all__ = ["find"]

_NAMED = 3
"""Findings about late ranks; the result lists more."""

_REMEDY = {
    "kernel": "Compare its clocks, temperature and input sizes with the others'",
    "host": "Look at its data loader, CPU affinity and other processes on its host",
    "communication": "Look at the links of its other process groups",
    "unknown": "Record more steps to see what it does before",
}


def find(evidence: Evidence) -> list[Finding]:
    """Return the findings about ranks, hosts and shards."""
    found = [*_stragglers(evidence), *_padding(evidence)]
    if evidence.on_device:
        found += [*_host_bound(evidence), *_host_syncs(evidence)]
    return found


def _stragglers(evidence: Evidence) -> list[Finding]:
    """Ranks that the others wait for more than they wait themselves; the rest is ranks taking turns."""
    cross = evidence.analysis.cross_rank
    causes: dict[int, list[Straggler]] = defaultdict(list)
    for straggler in cross.stragglers:
        causes[straggler.rank].append(straggler)
    peers = max(len(cross.wait_ns) - 1, 1)
    felt = _felt_frac(evidence)
    found, explained = [], 0
    for rank, its in causes.items():
        caused = cross.wait_caused_ns.get(str(rank), 0)
        net = caused - cross.wait_ns.get(str(rank), 0) * peers
        share = evidence.frac(net) * len(evidence.analysis.ranks) / peers
        if share * felt < evidence.thresholds.straggler_frac:
            continue
        explained += caused
        found.append(_straggler(evidence, rank, its[0], share, share * felt, caused))
    found.sort(key=lambda one: -float(one.evidence["cost_frac"]))
    rest = int((sum(cross.wait_ns.values()) - explained) * felt)
    if evidence.frac(rest) >= evidence.thresholds.straggler_frac:
        message = (
            f"Ranks take turns in coming late and wait {evidence.per_step(rest)} for one another; no single "
            "one is to blame. Even out their inputs (sequence lengths), and keep other work off their "
            "hosts."
        )
        calm: Severity | None = None if evidence.on_device else "info"
        found += evidence.finding("ranks_take_turns", None, rest, message, severity=calm)
    return found[:_NAMED]


def _felt_frac(evidence: Evidence) -> float:
    """Part of the waiting inside collectives that held a rank up: the rest ran beside its compute.

    By the verdicts where collectives are known to be waited for, else what can be: no more than is exposed.
    """
    waited = sum(evidence.analysis.cross_rank.wait_ns.values())
    if not waited:
        return 0.0
    if evidence.analysis.prefetch:
        felt = sum(row.late_ns.get("peer", 0) for row in evidence.analysis.prefetch)
    else:
        felt = sum(rank.communication.exposed_ns for rank in evidence.analysis.ranks)
    return min(felt / waited, 1.0)


def _straggler(
    evidence: Evidence, rank: int, worst: Straggler, share: float, cost: float, caused: int
) -> Finding:
    where = "" if worst.fqn is None else f", at {layer_name(worst.fqn)}"
    message = (
        f"Waiting in collectives for rank {rank} takes the others {format_frac(share)} of their time, "
        f"{format_frac(cost)} with nothing else to do. Mostly: {worst.cause}{where}. "
        f"{_REMEDY[worst.kind or 'unknown']}."
    )
    return Finding(
        id="straggler",
        severity=evidence.severity(cost),
        fqn=worst.fqn,
        message=message,
        evidence={
            "cost_frac": cost,
            "wait_frac": share,
            "rank": rank,
            "wait_caused_ns": caused,
            "kind": worst.kind,
            "cause": worst.cause,
        },
    )


def _host_bound(evidence: Evidence) -> list[Finding]:
    cost = _idle(evidence, "host_bound")
    if evidence.frac(cost) < evidence.thresholds.host_bound_frac:
        return []
    message = (
        f"The device runs dry because the host does not launch in time: {evidence.per_step(cost)} idle. "
        "Launch less (torch.compile, CUDA graphs, fused optimizer), give each launch more work (larger "
        "batch), and look at the data loader."
    )
    return evidence.finding("host_bound", None, cost, message)


def _host_syncs(evidence: Evidence) -> list[Finding]:
    cost = _idle(evidence, "device_sync") + _idle(evidence, "memcpy")
    calls = evidence.analysis.host_syncs
    if not calls:
        return []
    worst = max(calls, key=lambda row: row.blocked_ns)
    count = sum(row.count for row in calls) / evidence.rank_steps
    where = "" if worst.phase == "other" else f" in {worst.phase}"
    where += "" if worst.fqn is None else f" of {layer_name(worst.fqn)}"
    message = (
        f"The host stops for the device {count:.3g} times a step, longest in "
        f"{worst.operator or worst.call}{where}; afterwards the device idles {evidence.per_step(cost)} "
        "until work arrives again. Move .item(), .cpu(), full_tensor() and synchronize out of the step, or "
        "do them every few steps."
    )
    return evidence.finding(
        "host_sync",
        worst.fqn,
        cost,
        message,
        calls_per_step=count,
        operator=worst.operator,
        call=worst.call,
        phase=worst.phase,
    )


def _idle(evidence: Evidence, cause: str) -> int:
    return sum(step.idle_ns.get(cause, 0) for rank in evidence.analysis.ranks for step in rank.steps)


def _padding(evidence: Evidence) -> list[Finding]:
    """Padding is equal on all ranks: the first manifest with parameter groups says it all."""
    groups = next((m.param_groups for m in evidence.manifests if m.param_groups), [])
    held = sum(_padded(group, p) for group in groups for p in group.parameters)
    padding = {
        f"{group.fqn or 'root'}: {p.fqn}": _padded(group, p) - math.prod(p.global_shape)
        for group in groups
        for p in group.parameters
    }
    share = sum(padding.values()) / held if held else 0.0
    if share < evidence.thresholds.padding_frac:
        return []
    worst = max(padding, key=padding.__getitem__)
    message = (
        f"{format_frac(share)} of the sharded parameters is padding, gathered and reduced for nothing: "
        f"dimension 0 of {len([p for p in padding.values() if p])} parameters does not divide by the ranks "
        f"(worst: {worst}). Choose sizes that do, shard on another dimension (shard_placement_fn), or shard "
        "over fewer ranks."
    )
    return [
        Finding(
            id="uneven_shards",
            severity="medium" if share >= evidence.thresholds.high_cost_frac else "low",
            fqn=worst.split(":")[0] if worst.split(":")[0] != "root" else "",
            message=message,
            evidence={"padding_frac": share, "parameter": worst, "padding_elements": padding[worst]},
        )
    ]


def _padded(group: ParamGroupInfo, parameter: ParameterInfo) -> int:
    return math.prod(parameter.padded_local_shape) * group.shard_world_size
