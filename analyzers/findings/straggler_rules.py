"""Findings about ranks that come late, in every step or in turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from fsdp2prof.analyzers.findings.evidence import Evidence, cost_frac, finding
from fsdp2prof.analyzers.ranks.stragglers import LATE_FROM_THE_START
from fsdp2prof.analyzers.wording import named_layer
from fsdp2prof.results import SEVERITIES, CrossRank, EvidenceValue, Finding, Severity, Straggler
from fsdp2prof.units import format_frac

__all__ = ["find"]

_NAMED = 3
"""Findings about late ranks; the result lists more."""

_FAIR_SHARES = 2
"""A rank that causes so many times its fair share of all waiting is late by itself, whoever else is late."""

_EVERY_STEP = 1.25
"""Fair shares of a step's waiting that a late rank causes in every step: ranks that take turns do not."""

_SURE_STEPS = 3
"""Steps from which on coming late in each of them is more than chance."""

_SAME_SHARE = 0.01
"""Shares that differ by less are told as one."""

_REMEDY = {
    "kernel": "Compare clocks, temperature and input sizes of rank {rank}'s device with the others'.",
    "operator": "Compare the input sizes of rank {rank}, and what else runs on its cores, with the others'.",
    "host": "Look at the data loader, CPU affinity and other processes on the host of rank {rank}.",
    "communication": "Look at the links of rank {rank}'s other process groups.",
    "unknown": "Record more steps to see what rank {rank} does before.",
}
"""What to change, by kind of work; ``operator`` is a kernel of a CPU."""


def find(evidence: Evidence) -> list[Finding]:
    """Return the findings about late ranks; waiting that no rank is to blame for is ranks taking turns."""
    cross = evidence.analysis.cross_rank
    causes: dict[int, list[Straggler]] = defaultdict(list)
    for straggler in cross.stragglers:
        if straggler.cause != LATE_FROM_THE_START:
            causes[straggler.rank].append(straggler)
    peers, felt = max(len(cross.wait_ns) - 1, 1), _felt_frac(evidence)
    concentrated = {rank for rank in causes if _share(cross, rank) * len(cross.wait_ns) >= _FAIR_SHARES}
    found, explained = [], 0
    for rank, its in causes.items():
        net = _net_ns(cross, rank, concentrated)
        share = evidence.frac(net) * len(evidence.analysis.ranks) / peers
        if share * felt < evidence.thresholds.straggler_frac or not _in_every_step(cross, rank):
            continue
        explained += _caused_ns(cross, rank)
        found.append(_straggler(evidence, rank, its[0], share, share * felt))
    found.sort(key=lambda one: -cost_frac(one))
    before = _before_ns(cross)
    rest = sum(cross.wait_ns.values()) - explained - before
    return [
        *found[:_NAMED],
        *_in_turns(evidence, rest * felt),
        *_late_from_the_start(evidence, before * felt),
    ]


def _late_from_the_start(evidence: Evidence, cost: float) -> list[Finding]:
    if evidence.frac(cost) < evidence.thresholds.straggler_frac:
        return []
    problem = (
        f"Ranks wait {evidence.per_step(cost)} for others that were late when the recording began: what made "
        "them so is not in the trace, and may be the start of the recording itself."
    )
    change = "Trace more steps to see whether they stay late."
    return evidence.finding("late_from_the_start", None, cost, problem, change, severity="info")


def _in_turns(evidence: Evidence, rest: float) -> list[Finding]:
    if evidence.frac(rest) < evidence.thresholds.straggler_frac:
        return []
    problem = (
        f"Ranks take turns in coming late and wait {evidence.per_step(rest)} for one another; no single "
        "one is to blame."
    )
    change = "Even out their inputs (sequence lengths), and keep other work off their hosts."
    calm: Severity | None = None if evidence.on_device else "info"
    return evidence.finding("ranks_take_turns", None, rest, problem, change, calm)


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


def _before_ns(cross: CrossRank, rank: int | None = None) -> int:
    """Waiting for what was late when the recording began, of one rank or of all."""
    causes = [one for one in cross.stragglers if one.cause == LATE_FROM_THE_START]
    return sum(one.wait_caused_ns for one in causes if rank is None or one.rank == rank)


def _caused_ns(cross: CrossRank, rank: int) -> int:
    """Waiting that a rank caused by what it did in the recording."""
    return cross.wait_caused_ns.get(str(rank), 0) - _before_ns(cross, rank)


def _share(cross: CrossRank, rank: int) -> float:
    """Part of that waiting that one rank caused."""
    total = sum(cross.wait_ns.values()) - _before_ns(cross)
    return _caused_ns(cross, rank) / total if total else 0.0


def _net_ns(cross: CrossRank, rank: int, concentrated: Collection[int]) -> float:
    """Return the waiting a rank caused beyond what it waited itself, on the others' account.

    Waiting for a rank that is late by itself excuses nothing.
    """
    caused = _caused_ns(cross, rank)
    own = cross.wait_ns.get(str(rank), 0) * max(len(cross.wait_ns) - 1, 1)
    by_others = sum(cross.wait_caused_ns.values()) - cross.wait_caused_ns.get(str(rank), 0)
    by_late = sum(cross.wait_caused_ns.get(str(late), 0) for late in concentrated if late != rank)
    return caused - own * (1 - by_late / by_others if by_others else 1.0)


def _in_every_step(cross: CrossRank, rank: int) -> bool:
    """Whether a rank causes more than its fair share of the waiting in every step that has any."""
    steps = list(zip(*cross.wait_caused_in_steps_ns.values(), strict=True))
    mine = cross.wait_caused_in_steps_ns.get(str(rank), [])
    fair = _EVERY_STEP / max(len(cross.wait_ns), 1)
    return all(own >= fair * sum(step) for own, step in zip(mine, steps, strict=True))


def _straggler(evidence: Evidence, rank: int, worst: Straggler, share: float, cost: float) -> Finding:
    cross = evidence.analysis.cross_rank
    steps = len(cross.wait_caused_in_steps_ns.get(str(rank), []))
    where = "" if worst.fqn is None else f", at {named_layer(worst.fqn)}"
    waited = format_frac(cost)
    if share - cost >= _SAME_SHARE:
        waited = f"{format_frac(share)} of their time, {waited} of it with no other work to do meanwhile"
    else:
        waited += " of their time"
    when = {0: "T", 1: "In the one traced step t"}.get(steps, f"In each of {steps} steps t")
    problem = (
        f"{when}he other ranks wait in collectives for rank {rank}: {waited}. Mostly: "
        f"{worst.cause or 'unknown'}{where}."
    )
    kind = worst.kind or "unknown"
    if kind == "host" and evidence.on_device:
        problem += " (The profiler was running, which slows hosts down.)"
    remedy = _REMEDY["operator" if kind == "kernel" and not evidence.on_device else kind]
    facts: dict[str, EvidenceValue] = {
        "cost_frac": cost,
        "wait_frac": share,
        "rank": rank,
        "wait_caused_ns": cross.wait_caused_ns.get(str(rank), 0),
        "kind": worst.kind,
        "cause": worst.cause,
    }
    severity = _no_more_than("medium" if _unsure(evidence, steps) else "high", evidence.severity(cost))
    return finding("straggler", severity, worst.fqn, problem, remedy.format(rank=rank), facts)


def _unsure(evidence: Evidence, steps: int) -> bool:
    """Whether lateness may be chance: few steps, or ranks that share the cores of one machine."""
    return 0 < steps < _SURE_STEPS or not evidence.on_device


def _no_more_than(limit: Severity, severity: Severity) -> Severity:
    return max(limit, severity, key=SEVERITIES.index)
