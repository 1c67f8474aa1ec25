"""Findings about ranks, hosts and shards: stragglers, a host that cannot keep up or stops, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp2prof.analyzers.findings.evidence import Evidence, cost_frac, finding
from fsdp2prof.analyzers.unrecorded import added_ns
from fsdp2prof.analyzers.wording import in_phase, named_layer, times
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo
from fsdp2prof.results import EvidenceValue, Finding, LateRank, LateRanks, Severity
from fsdp2prof.units import format_frac, format_ns

__all__ = ["find"]

_NAMED = 3
"""Late ranks in findings and in a sentence; the result lists more."""

_REMEDY = {
    "kernel": "Compare clocks, temperature and input sizes of rank {rank}'s device with the others'.",
    "operator": "Compare the input sizes of rank {rank}, and what else runs on its cores, with the others'.",
    "host": "Look at the data loader, CPU affinity and other processes on the host of rank {rank}.",
    "communication": "Look at the rank that rank {rank} waits for there, and at the links between them.",
    "unknown": "Record more steps to see what rank {rank} does before.",
}
"""What to change, by kind of work; ``operator`` is a kernel of a CPU."""

_SAME_SHARE = 0.01
"""Shares that differ by less are told as one."""


def find(evidence: Evidence) -> list[Finding]:
    """Return the findings about ranks, hosts and shards."""
    found = [*_stragglers(evidence), *_padding(evidence)]
    if evidence.on_device:
        found += _host_time(evidence)
    return found


def _stragglers(evidence: Evidence) -> list[Finding]:
    """Ranks that are late in most steps, each with its work; the rest is ranks waiting for one another."""
    cross = evidence.analysis.cross_rank
    felt = _felt_frac(evidence)
    found, explained = [], 0
    if cross.late is not None and cross.late.steady:
        for late in cross.late.ranks:
            share = _share(evidence, cross.late, late)
            if share * felt >= evidence.thresholds.straggler_frac:
                explained += cross.wait_caused_ns[str(late.rank)]
                found.append(_straggler(evidence, cross.late, late, share, share * felt))
    found.sort(key=lambda one: -cost_frac(one))
    rest = int((sum(cross.wait_ns.values()) - explained) * felt)
    if evidence.frac(rest) >= evidence.thresholds.straggler_frac:
        found = [*found[:_NAMED], *_for_one_another(evidence, rest, beside=bool(found))]
    return found


def _share(evidence: Evidence, among: LateRanks, late: LateRank) -> float:
    """What a rank outside waits for a late one, net of what that waits itself, of one rank's time."""
    net = late.wait_caused_ns / (among.compared - len(among.ranks)) - late.wait_ns
    return evidence.frac(net) * len(evidence.analysis.ranks)


def _for_one_another(evidence: Evidence, cost: int, *, beside: bool) -> list[Finding]:
    """Waiting that no rank is to blame for, or for which there are too few steps to blame one."""
    late = evidence.analysis.cross_rank.late
    calm: Severity | None = None if evidence.on_device else "info"
    waited = f"anks wait {evidence.per_step(cost)} for one another"
    even = "Even out their inputs (sequence lengths), and keep other work off their hosts."
    if beside:
        problem = f"Beside that, r{waited}; no other rank stands out."
        return evidence.finding("ranks_take_turns", None, cost, problem, even, calm)
    if late is None:
        problem = f"R{waited}; none is waited for clearly longer than it waits itself."
        return evidence.finding("ranks_take_turns", None, cost, problem, even, calm)
    names = _ranks([one.rank for one in late.ranks])
    facts: dict[str, EvidenceValue] = {
        "ranks": [one.rank for one in late.ranks],
        "late_steps": late.late_steps,
        "steps": late.steps,
        "explained_frac": late.explained_frac,
        "chance": late.chance,
    }
    mostly = f"Ranks wait {evidence.per_step(cost)} in collectives, {format_frac(late.explained_frac)} of it for {names}"
    if late.steps < late.steps_needed:
        problem = (
            f"{mostly}, late in {late.late_steps} of {_steps(late.steps)}: too few to tell a slow rank from "
            "chance."
        )
        change = f"Trace at least {late.steps_needed} steps (fsdp2prof record --active {late.steps_needed})."
        return evidence.finding("late_rank_unclear", None, cost, problem, change, calm, **facts)
    often = "late in" if late.steady else "but late in only"
    problem = f"{mostly}, {often} {late.late_steps} of {_steps(late.steps)}."
    return evidence.finding("ranks_take_turns", None, cost, problem, even, calm, **facts)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3 and 5``, ``ranks 3, 5, 6 and 4 more``."""
    shown = [str(number) for number in numbers[:_NAMED]]
    if len(numbers) > _NAMED:
        shown.append(f"{len(numbers) - _NAMED} more")
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


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


def _straggler(evidence: Evidence, among: LateRanks, late: LateRank, share: float, cost: float) -> Finding:
    cross, rank = evidence.analysis.cross_rank, late.rank
    worst = next((one for one in cross.stragglers if one.rank == rank), None)
    fqn, cause = (None, None) if worst is None else (worst.fqn, worst.cause)
    kind = (worst.kind if worst else None) or "unknown"
    waited = format_frac(cost)
    if share - cost >= _SAME_SHARE:
        waited = f"{format_frac(share)} of their time ({waited} with no other work to do meanwhile)"
    else:
        waited += " of their time"
    problem = (
        f"The other ranks wait in collectives for rank {rank}: {waited}, net of its own waiting, in "
        f"{late.late_steps} of {_steps(among.steps)}."
    )
    if len(among.ranks) > 1:
        names = _ranks([one.rank for one in among.ranks if one is not late])
        problem += f" With {names} it causes {format_frac(among.explained_frac)} of all waiting."
    problem += f" Mostly: {cause or 'unknown'}{'' if fqn is None else f', at {named_layer(fqn)}'}."
    if kind == "host" and evidence.on_device:
        problem += " (The profiler was running, which slows hosts down.)"
    remedy = _REMEDY["operator" if kind == "kernel" and not evidence.on_device else kind]
    facts: dict[str, EvidenceValue] = {
        "cost_frac": cost,
        "wait_frac": share,
        "rank": rank,
        "ranks": [one.rank for one in among.ranks],
        "wait_caused_ns": cross.wait_caused_ns[str(rank)],
        "late_steps": late.late_steps,
        "steps": among.steps,
        "explained_frac": among.explained_frac,
        "chance": among.chance,
        "kind": kind,
        "cause": cause,
    }
    return finding("straggler", evidence.severity(cost), fqn, problem, remedy.format(rank=rank), facts)


def _host_time(evidence: Evidence) -> list[Finding]:
    """Time lost to the host; what tracing itself added to the steps says nothing of the training."""
    added = added_ns(evidence.analysis.unrecorded_step) * evidence.rank_steps
    launching = _idle(evidence, "host_bound")
    waiting = _idle(evidence, "device_sync") + _idle(evidence, "memcpy")
    late = max(0, launching - added)
    stops = max(0, waiting - max(0, added - launching))
    return [
        *_slowed_by_tracing(evidence, launching + waiting, min(added, launching + waiting)),
        *_host_bound(evidence, launching, late),
        *_host_syncs(evidence, waiting, stops),
    ]


def _slowed_by_tracing(evidence: Evidence, lost: float, explained: float) -> list[Finding]:
    step = evidence.analysis.unrecorded_step
    if step is None or step.traced_median_ns is None or step.slowdown is None or not explained:
        return []
    if step.slowdown < evidence.thresholds.slowdown:
        return []
    problem = (
        f"Tracing makes a step {times(step.slowdown)} as long ({format_ns(step.traced_median_ns)} against "
        f"{format_ns(step.median_ns)} where nothing is recorded). That accounts for "
        f"{evidence.per_step(explained)} of the {evidence.per_step(lost)} that the device lost to the host: "
        "judge the host by the unrecorded step."
    )
    return evidence.finding("slowed_by_tracing", None, explained, problem, severity="info")


def _host_bound(evidence: Evidence, idle: float, cost: float) -> list[Finding]:
    """``cost`` is the part of ``idle`` that tracing does not account for."""
    if evidence.frac(cost) < evidence.thresholds.host_bound_frac:
        return []
    problem = (
        f"The device runs dry because the host does not launch in time: {evidence.per_step(idle)} idle"
        f"{_profiled(evidence, idle, cost)}."
    )
    change = (
        "Launch less (torch.compile, CUDA graphs, fused optimizer), give each launch more work (larger "
        "batch), and look at the data loader."
    )
    return evidence.finding("host_bound", None, cost, problem, change)


def _host_syncs(evidence: Evidence, idle: float, cost: float) -> list[Finding]:
    """``cost`` is the part of ``idle`` that tracing does not account for."""
    calls = evidence.analysis.host_syncs
    if not calls:
        return []
    worst = max(calls, key=lambda row: row.blocked_ns)
    count = sum(row.count for row in calls) / evidence.rank_steps
    where = "" if worst.phase == "other" else f" {in_phase(worst.phase)}"
    where += "" if worst.fqn is None else f" of {named_layer(worst.fqn)}"
    problem = (
        f"The host stops for the device {count:.3g} times a step, longest in "
        f"{worst.operator or worst.call}{where}; afterwards the device idles {evidence.per_step(idle)} "
        f"until work arrives again{_profiled(evidence, idle, cost)}."
    )
    change = (
        "Move .item(), .cpu(), full_tensor() and synchronize out of the step, or do them every few steps."
    )
    return evidence.finding(
        "host_sync",
        worst.fqn,
        cost,
        problem,
        change,
        calls_per_step=count,
        operator=worst.operator,
        call=worst.call,
        phase=worst.phase,
    )


def _profiled(evidence: Evidence, idle: float, cost: float) -> str:
    """Say what the profiler has to do with time that the host lost."""
    step = evidence.analysis.unrecorded_step
    if step is None or step.slowdown is None:
        return "; the profiler was running and adds to this, how much is not known"
    return f", {evidence.per_step(idle - cost)} of it added by tracing" if idle > cost else ""


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
    uneven = sum(elements > 0 for elements in padding.values())
    problem = (
        f"{format_frac(share)} of the sharded parameters is padding, gathered and reduced for nothing: "
        f"dimension 0 of {uneven} parameters does not divide by the ranks (worst: {worst})."
    )
    change = (
        "Choose sizes that divide, shard on another dimension (shard_placement_fn), or shard over fewer "
        "ranks."
    )
    severity: Severity = "medium" if share >= evidence.thresholds.high_cost_frac else "low"
    fqn = "" if worst.startswith("root: ") else worst.split(":")[0]
    facts: dict[str, EvidenceValue] = {
        "padding_frac": share,
        "parameter": worst,
        "padding_elements": padding[worst],
    }
    return [finding("uneven_shards", severity, fqn, problem, change, facts)]


def _padded(group: ParamGroupInfo, parameter: ParameterInfo) -> int:
    return math.prod(parameter.padded_local_shape) * group.shard_world_size
