"""Build the ledger of a trace analysis: rules enter every charge once; reported entries come first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fsdp2prof.analyzers.findings import declared
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.fsdp_rules import enter_fsdp, enter_links
from fsdp2prof.analyzers.ledger.host_rules import (
    enter_host,
    enter_new_iterators,
    enter_offloaded_update,
    enter_optimizer,
    enter_tracing,
)
from fsdp2prof.analyzers.ledger.machine_rules import enter_starved, enter_waiting
from fsdp2prof.analyzers.ledger.notes import notes
from fsdp2prof.analyzers.ledger.other_rules import enter_other_communication, enter_saving
from fsdp2prof.analyzers.ledger.rank_rules import enter_waits
from fsdp2prof.analyzers.ledger.script_rules import enter_script, join_places
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds, cost_frac
from fsdp2prof.analyzers.ledger.words import BUSY, bound, collectives, not_judged
from fsdp2prof.analyzers.ledger.work_rules import (
    enter_kernels,
    enter_repeated_forward,
    enter_repeated_update,
    enter_untrained,
    enter_work,
)
from fsdp2prof.analyzers.steps import mean, typical_ns
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import SEVERITIES, EvidenceValue, Finding
from fsdp2prof.results.ledger import Ledger, LedgerEntry, LedgerRest, LedgerStep
from fsdp2prof.results.step import StepBreakdown
from fsdp2prof.results.trace import TraceAnalysis

_IDLE = {
    "host_bound": "host",
    "data_loader": "data_loader",
    "device_sync": "sync",
    "memcpy": "sync",
    "queued": "queued",
    "profiler": "tracing",
    "communication": "communication",
}


def with_ledger(
    analysis: TraceAnalysis,
    charges: Iterable[Charge] | None = None,
    manifests: Sequence[RankManifest] = (),
    thresholds: FindingThresholds | None = None,
    additional_ns: Mapping[int, int] | None = None,
) -> TraceAnalysis:
    """Return the analysis with its ledger and the findings made from it.

    ``additional_ns`` is the time of a rank's kernels or operators beyond those of other ranks. Without
    ``charges`` of its ranks, the ledger follows from the breakdown and the rows by layer; then waiting for
    other ranks is not separated from communication, nor evaluation from training.
    """
    book = Book(
        analysis,
        charges_of(analysis) if charges is None else charges,
        manifests,
        thresholds or FindingThresholds(),
        additional_ns or {},
    )
    if not book.total_ns or any(rank.misses_records for rank in analysis.ranks):
        return replace(analysis, ledger=None, findings=[])
    for rule in (
        enter_starved,
        enter_saving,
        enter_new_iterators,
        enter_script,
        enter_optimizer,
        enter_repeated_update,
        enter_offloaded_update,
        enter_tracing,
        enter_untrained,
        enter_repeated_forward,
        enter_links,
        enter_waits,
        enter_other_communication,
        enter_fsdp,
        enter_host,
        enter_kernels,
        enter_work,
        enter_waiting,
    ):
        rule(book)
    join_places(book)
    ledger = replace(_ledger(book), exact=charges is not None)
    beside = notes(book)
    return replace(analysis, ledger=ledger, findings=findings_of(ledger, beside))


def findings_of(ledger: Ledger, beside: Sequence[Finding] = ()) -> list[Finding]:
    """Return the reported entries as findings, in their order, among others by severity."""
    found = [*map(_finding, _worth_noting(ledger)), *beside]
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), -cost_frac(one)))


def _worth_noting(ledger: Ledger) -> list[LedgerEntry]:
    """Reported entries, and those that explain why a loss cannot be judged or changed."""
    noted = declared("ledger", "noted")
    return [one for one in ledger.entries if one.told or (one.id in noted and one.frac >= 0.01)]


def _finding(entry: LedgerEntry) -> Finding:
    remedy = entry.remedy
    change = "" if remedy is None else remedy.change
    gain: dict[str, EvidenceValue] = {}
    if remedy is not None:
        gain = {"gain_ns_per_step": remedy.gain_ns, "gain_basis": remedy.basis}
    return Finding(
        id=entry.id,
        severity=entry.severity,
        fqn=entry.fqn,
        message=f"{entry.said} {change}" if change else entry.said,
        change=change,
        evidence=dict(entry.evidence) | gain,
        place=entry.place,
    )


def _estimated(book: Book) -> list[LedgerEntry]:
    """Return the entries, on a busy host with estimates for bounds: the waiting for cores and for other ranks
    that some work causes goes with it."""
    starved = sum(charge.ns for cause, charge in book.booked if cause == "starved")
    if book.frac(starved) < BUSY:
        return book.entries
    return [
        replace(one, remedy=replace(one.remedy, basis="estimate"))
        if one.remedy is not None and one.remedy.basis == "bound" and one.cause != "starved"
        else one
        for one in book.entries
    ]


def _ledger(book: Book) -> Ledger:
    step = book.analysis.unrecorded_step
    entries = in_order(_estimated(book))
    causes: dict[str, int] = defaultdict(int)
    windows: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for cause, charge in book.booked:
        causes[cause] += charge.ns
        if charge.ns:
            windows[charge.rank, charge.step][cause] += charge.ns
    ledger = Ledger(
        windows=book.rank_steps,
        total_ns=book.total_ns,
        step_ns=mean(book.total_ns, max(1, book.rank_steps)),
        unrecorded_step_ns=None if step is None else typical_ns(step),
        entries=entries,
        rest=_rest(entries, book.total_ns, book.rank_steps),
        steps=[
            LedgerStep(
                rank=rank.rank,
                step=one.step,
                duration_ns=one.duration_ns,
                causes_ns=dict(windows[rank.rank, one.step]),
            )
            for rank in book.analysis.ranks
            for one in rank.steps
        ],
        causes_ns={
            cause: mean(ns, max(1, book.rank_steps))
            for cause, ns in sorted(causes.items(), key=lambda item: -item[1])
        },
    )
    return replace(
        ledger,
        bound=bound(ledger, book.analysis),
        collectives=collectives(book),
        not_judged=not_judged(book),
    )


_LISTED = 8
"""Entries that a short table lists."""
_WORTH_A_ROW = 0.01
"""Fraction of a step from which lost time has its own row."""


def _rest(entries: Sequence[LedgerEntry], total_ns: int, windows: int) -> LedgerRest | None:
    """Sum up the last entries, which a short table does not list; None of at most one."""
    listed = [one.told or one.frac >= _WORTH_A_ROW for one in entries[:_LISTED]]
    small = entries[listed.index(False) if False in listed else len(listed) :]
    if len(small) < 2:
        return None
    ns = sum(one.total_ns for one in small)
    return LedgerRest(entries=len(small), ns=mean(ns, max(1, windows)), frac=ns / total_ns)


_CAUTION = 0.5
"""Factor for the gain of a remedy with care when entries are ordered, relative to changes that keep
results."""


def in_order(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Return the reported entries by the gains of their remedies, then the others by time."""

    with_care = declared("ledger", "with_care")

    def key(entry: LedgerEntry) -> tuple[bool, float]:
        gain = entry.remedy.gain_ns if entry.remedy is not None else None
        worth = gain if entry.told and gain is not None else entry.ns
        return not entry.told, -(worth * _CAUTION if entry.told and entry.id in with_care else worth)

    return sorted(entries, key=key)


def charges_of(analysis: TraceAnalysis) -> list[Charge]:
    """Return charges from the breakdown and the rows by layer, if the ranks' own charges are not
    available."""
    found: list[Charge] = []
    exposed: dict[tuple[int, int], int] = defaultdict(int)
    for row in analysis.groups:
        cause = "other_communication" if row.fqn is None else "communication"
        exposed[row.rank, row.step] += row.exposed_ns
        found.append(
            Charge(
                rank=row.rank,
                step=row.step,
                cause=cause,
                ns=row.exposed_ns,
                fqn=row.fqn,
                phase=row.phase,
                op=row.op,
                dtype=row.dtype,
                group=row.process_group,
                count=row.count,
                bytes=row.payload_bytes or 0,
            )
        )
    for rank in analysis.ranks:
        for step in rank.steps:
            found += _of_step(rank.rank, step, exposed[rank.rank, step.step])
    return found


def _of_step(rank: int, step: StepBreakdown, exposed: int) -> Iterable[Charge]:
    parts = step.breakdown_ns
    communication = (
        parts.exposed_all_gather
        + parts.exposed_reduce_scatter
        + parts.exposed_all_reduce
        + parts.exposed_other_comm
    )
    idle: Mapping[str, int] = step.idle_ns
    causes = {_IDLE.get(cause, "unknown"): 0 for cause in idle}
    for cause, ns in idle.items():
        causes[_IDLE.get(cause, "unknown")] += ns
    amounts = {
        "compute": parts.compute,
        "fsdp_copy": parts.fsdp_copy,
        "offload": parts.exposed_memcpy,
        **causes,
    }
    amounts["unknown"] = amounts.get("unknown", 0) + parts.idle - sum(idle.values())
    amounts["other_communication"] = communication - exposed
    for cause, ns in amounts.items():
        if ns:
            yield Charge(rank=rank, step=step.step, cause=cause, ns=ns)
