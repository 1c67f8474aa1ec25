"""``analyze run``: a run's set-up, its trace and its memory together, what matters most first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp2prof.analyzers.ledger.replayed import that_fit, with_room
from fsdp2prof.analyzers.ledger.thresholds import cost_frac
from fsdp2prof.analyzers.ledger.words import NOTHING, unrecorded_sentence
from fsdp2prof.results.finding import SEVERITIES, Finding
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.run import RunAnalysis, RunSummary
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.trial import TrialResult
from fsdp2prof.units import format_frac, format_ns

_SENTENCES = 4
"""Of a verdict."""
_TIGHT = 0.85
"""Part of its device from which on a peak makes memory worth advice."""
_ROOM = 0.5
"""Part of its device up to which a peak leaves room for activations that are recomputed now."""
_ALWAYS = frozenset({"leak", "out_of_memory"})
"""Findings about memory that hold however much of it is free."""
_SAID_BY_LEDGER = {"root_only": "wrapping_too_coarse"}
"""Setup findings that the ledger reports with their cost."""
_MEASURED = frozenset({"wrapping_too_fine", "root_holds_most"})
"""Setup findings whose cost the ledger measures; it reports them itself unless the cost is too small."""
_NOT_HERE = frozenset({"nothing_sharded", "ranks_missing"})
"""Findings of ``check`` about a recording that is not complete, which the ranks' table shows."""


def combine(
    run: RunSummary,
    trace: TraceAnalysis | None,
    memory: MemoryAnalysis | None,
    warnings: Sequence[str] = (),
    setup: Sequence[Finding] = (),
) -> RunAnalysis:
    """Put a run and its analyses together, each null where nothing was captured.

    ``setup`` is what ``check`` finds. Memory is advised on where it is tight, or leaks.
    """
    tight = memory is not None and _is_tight(memory)
    if trace is not None and _has_room(memory):
        trace = with_room(trace)
    if trace is not None and (free := _free_bytes(memory)) is not None:
        trace = that_fit(trace, free)
    told = {one.id for one in trace.findings} if trace else set()
    if trace is not None and trace.ledger is not None:
        setup = [one for one in setup if one.id not in _MEASURED]
    findings = [
        *(one for one in setup if _belongs(one, told)),
        *(trace.findings if trace else ()),
        *(one for one in (memory.findings if memory else ()) if tight or trace is None or one.id in _ALWAYS),
    ]
    findings.sort(key=lambda one: (SEVERITIES.index(one.severity), -cost_frac(one)))
    unseen = unrecorded_sentence(run.unrecorded_step) if trace is None else []
    return RunAnalysis(
        verdict=_verdict(trace, memory, findings, tight=tight) or unseen,
        run=run,
        trace=trace,
        memory=memory,
        findings=findings,
        advice=[
            *unseen,
            *(trace.advice if trace else ()),
            *(memory.advice if memory and (tight or trace is None) else ()),
        ],
        warnings=list(warnings),
    )


def with_trial(analysis: RunAnalysis, trial: TrialResult | None) -> RunAnalysis:
    """Add what was tried in the running job; a measured gain is said first, before any prediction."""
    best = trial.tried[0] if trial is not None and trial.tried else None
    verdict = analysis.verdict
    if best is not None and best.outcome == "faster" and best.gained_ns and best.low_ns and best.high_ns:
        interval = f"95 % interval {format_ns(best.low_ns)} to {format_ns(best.high_ns)}"
        gain = f"{format_ns(best.gained_ns)} off a step ({format_frac(best.gained_frac or 0.0)}; {interval})"
        said = f"Measured in this job: {best.change} takes {gain}."
        verdict = [said, *(line for line in verdict if not line.startswith(NOTHING))][:_SENTENCES]
    return replace(analysis, verdict=verdict, trial=trial)


def _belongs(one: Finding, told: set[str]) -> bool:
    return one.severity != "info" and one.id not in _NOT_HERE and _SAID_BY_LEDGER.get(one.id) not in told


def _is_tight(memory: MemoryAnalysis) -> bool:
    """Whether a request failed, or the peak takes most of its device."""
    figures = memory.key_figures
    full = figures is not None and figures.device_frac is not None and figures.device_frac >= _TIGHT
    return full or any(rank.oom is not None for rank in memory.ranks)


def _has_room(memory: MemoryAnalysis | None) -> bool:
    """Whether less than half of the device is known to be in use at the peak."""
    figures = None if memory is None else memory.key_figures
    return figures is not None and figures.device_frac is not None and figures.device_frac < _ROOM


def _free_bytes(memory: MemoryAnalysis | None) -> int | None:
    """Return what the fullest device has left at its peak; None where its size is unknown."""
    figures = None if memory is None else memory.key_figures
    if figures is None or figures.device_total_bytes is None:
        return None
    return figures.device_total_bytes - (figures.reserved_bytes or figures.allocated_bytes)


def _verdict(
    trace: TraceAnalysis | None, memory: MemoryAnalysis | None, findings: Sequence[Finding], *, tight: bool
) -> list[str]:
    """Say what goes wrong first, then what the step loses, then how high the peak is."""
    if trace is None or not trace.verdict:
        grave = [] if memory is None else memory.verdict
        return [*_grave(findings), *grave][:_SENTENCES]
    peak = [] if memory is None else memory.verdict[:1]
    if memory is not None and any(rank.oom is not None for rank in memory.ranks):
        return [*peak, *trace.verdict[:1], *memory.verdict[-1:]]
    about_memory = {one.id for one in memory.findings} if memory is not None else set()
    first = _grave(findings)
    quiet = trace.ledger is None or not any(one.told for one in trace.ledger.entries)
    if not first and quiet:
        first = _setup([one for one in findings if one.id not in about_memory])
    rest = trace.verdict
    if memory is not None and tight:
        peak += memory.verdict[2:]
        if quiet and not first:
            first, peak = peak, []
    if first or tight:
        rest = [line for line in rest if not line.startswith(NOTHING)]
    return [*first, *rest[: _SENTENCES - len(first) - len(peak)], *peak]


def _grave(findings: Sequence[Finding]) -> list[str]:
    """Return the gravest finding that costs no time, but correctness or memory."""
    grave = (one for one in findings if one.severity == "high" and not cost_frac(one))
    return [one.message for one in grave][:1]


def _setup(findings: Sequence[Finding]) -> list[str]:
    """Return the first finding about the set-up of medium severity, where no loss comes before it."""
    medium = (one for one in findings if one.severity == "medium" and one.change and not cost_frac(one))
    return [one.message for one in medium][:1]
