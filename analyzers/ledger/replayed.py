"""Apply replays of a recording to the ledger's remedies: their gains, and the resulting order."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from fsdp2prof.analyzers.ledger.account import findings_of, in_order
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds, severity_of, worth_telling
from fsdp2prof.analyzers.ledger.words import trace_advice, trace_verdict
from fsdp2prof.results.ledger import Ledger, LedgerEntry, LedgerRemedy
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.what_if import WhatIfChange

_SETTINGS = frozenset({"reshard", "forward_prefetch", "backward_prefetch", "separate_reduce_scatter_group"})
"""Changes that leave the training's results as they are."""


def with_replays(
    analysis: TraceAnalysis, tried: Sequence[WhatIfChange], thresholds: FindingThresholds | None = None
) -> TraceAnalysis:
    """Return the analysis with replayed gains in place of stated bounds.

    A remedy whose replay gains almost nothing is not proposed: the ledger still contains the time. No gain
    exceeds the time of its entry: the rest of a replay's gain is charged to other causes.
    """
    ledger = analysis.ledger
    if ledger is None:
        return replace(analysis, what_if=list(tried))
    limits = thresholds or FindingThresholds()
    on_device = any(rank.device_type != "cpu" for rank in analysis.ranks)
    entries = in_order([_replayed(entry, tried, limits, on_device) for entry in ledger.entries])
    remedies = {one.remedy.what_if for one in entries if one.told and one.remedy is not None}
    rows = _proposed(tried, remedies, limits, on_device)
    return _changed(replace(analysis, what_if=rows), replace(ledger, entries=entries))


def _proposed(
    tried: Sequence[WhatIfChange], remedies: Set[str | None], limits: FindingThresholds, on_device: bool
) -> list[WhatIfChange]:
    """Return the replayed changes with proposals marked; ``tried`` is ordered by gain.

    For a CPU's collectives a replay shows the shape, not the time that a device would gain.
    """
    rows, named = [], set()
    for row in tried:
        name = row.change.partition("=")[0]
        safe = (on_device and name in _SETTINGS) or row.change in remedies
        gains = worth_telling(severity_of(row.gained_frac or 0.0, limits, on_device))
        told = safe and gains and name not in named
        rows.append(replace(row, told=told))
        named |= {name} if told else set()
    return rows


def with_room(analysis: TraceAnalysis, thresholds: FindingThresholds | None = None) -> TraceAnalysis:
    """Return the analysis of a run whose memory is known to be far from full: recomputation can be saved."""
    ledger = analysis.ledger
    if ledger is None:
        return analysis
    limits = thresholds or FindingThresholds()
    on_device = any(rank.device_type != "cpu" for rank in analysis.ranks)
    entries = in_order([_not_recomputed(entry, limits, on_device) for entry in ledger.entries])
    return _changed(analysis, replace(ledger, entries=entries))


def that_fit(analysis: TraceAnalysis, free_bytes: int) -> TraceAnalysis:
    """Return the analysis without proposals that need more memory than the fullest device has free."""
    ledger = analysis.ledger
    if ledger is None:
        return analysis
    rows = [replace(one, told=one.told and (one.memory_bytes or 0) <= free_bytes) for one in analysis.what_if]
    analysis = replace(analysis, what_if=rows)
    entries = [
        replace(one, told=False, severity="info") if _needs_more(one, free_bytes) else one
        for one in ledger.entries
    ]
    return _changed(analysis, replace(ledger, entries=in_order(entries)))


def _needs_more(entry: LedgerEntry, free_bytes: int) -> bool:
    needed = None if entry.remedy is None else entry.remedy.memory_bytes
    return entry.told and needed is not None and needed > free_bytes


def _not_recomputed(entry: LedgerEntry, limits: FindingThresholds, on_device: bool) -> LedgerEntry:
    if entry.id != "recomputation":
        return entry
    severity = severity_of(entry.frac, limits, on_device)
    remedy = LedgerRemedy(
        change="Checkpoint fewer blocks, or save the outputs of expensive operators (selective activation "
        "checkpointing): less than half of the device's memory is in use.",
        gain_ns=entry.ns,
        gain_frac=entry.frac,
        basis="bound",
        reason="all recomputed forwards",
    )
    return replace(entry, severity=severity, told=worth_telling(severity), remedy=remedy)


def _changed(analysis: TraceAnalysis, ledger: Ledger) -> TraceAnalysis:
    """Return the analysis with another ledger, and all its sentences recomputed."""
    own = {entry.id for entry in ledger.entries}
    beside = [one for one in analysis.findings if one.id not in own]
    changed = replace(analysis, ledger=ledger, findings=findings_of(ledger, beside))
    return replace(changed, verdict=trace_verdict(changed), advice=trace_advice(changed))


def _replayed(
    entry: LedgerEntry, tried: Sequence[WhatIfChange], limits: FindingThresholds, on_device: bool
) -> LedgerEntry:
    remedy = entry.remedy
    if remedy is None or remedy.what_if is None:
        return entry
    rows = [row for row in tried if answers(row.change, remedy.what_if) and row.gained_ns is not None]
    best = max(rows, key=lambda row: row.gained_ns or 0.0, default=None)
    if best is None:
        return entry
    gain = min(entry.ns, max(0.0, best.gained_ns or 0.0))
    part = min(entry.frac, max(0.0, best.gained_frac or 0.0))
    severity = "info" if entry.severity == "info" else severity_of(part, limits, on_device)
    return replace(
        entry,
        severity=severity,
        told=worth_telling(severity),
        remedy=replace(
            remedy,
            gain_ns=gain,
            gain_frac=part,
            basis="replay",
            reason=f"replay of this recording: {best.what}",
            memory_bytes=best.memory_bytes,
            what_if=best.change,
        ),
        evidence={
            **entry.evidence,
            "what_if": {
                "change": best.change,
                "gained_ns_per_step": best.gained_ns,
                "memory_bytes": best.memory_bytes,
            },
        },
    )


def answers(change: str, wanted: str) -> bool:
    """Whether a change that was tried is the one a remedy asks for; of a prefetch, any depth of its phase."""
    if wanted.startswith("without straggler:"):
        return change.startswith("without straggler:") and wanted.split(":")[1] in change.split(":")[1].split(
            ","
        )
    name, equals, _ = wanted.partition("=")
    if name.endswith("prefetch"):
        phase = name.removesuffix("prefetch").strip("_")
        return change.partition("=")[0].endswith("prefetch") and phase in change
    return change == wanted if equals or wanted.startswith("without") else change.startswith(wanted)
