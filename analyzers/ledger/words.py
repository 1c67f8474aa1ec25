"""Sentences of a ledger: the bottleneck of the step, the first change to make, and limits of the
recording."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from fsdp2prof.analyzers.findings import wordings
from fsdp2prof.analyzers.layers import times
from fsdp2prof.analyzers.ledger.book import SLOWED, UNTRACED, Book
from fsdp2prof.analyzers.steps import are_unlike, differs_traced, kinds_of_steps, typical_ns
from fsdp2prof.results.ledger import NOTHING, Ledger, LedgerEntry
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.what_if import WhatIfChange
from fsdp2prof.units import format_frac, format_ns, plural

_REPLAY = "`fsdp2prof whatif` replays the step with other settings."
_MOST = 0.5
"""Fraction of a step from which one cause bounds it."""
BUSY = 0.1
"""Fraction of a step that ranks wait for a processor, from which on the host is called busy."""
_HIDING = 0.3
"""The same from which on losses that are smaller disappear in it."""
_UNEXPLAINED = ("queued", "unknown")
"""Causes that say that time is lost, and not to what."""
_MUCH = 0.1
"""Fraction of a step from which such a loss, or the second cause, is named."""
_TURNS = 4
"""Traced steps, at least, that show two kinds taking turns."""
_MUCH_MORE = 2
"""Times the time of the first change's cause from which a larger one without a change is named beside it."""
_NAMED = 3
"""Causes that one sentence names."""
_OPERATORS = 2
"""Lines or operators that the verdict names."""
_USUAL = re.compile("mm$|attention|conv|rnn|lstm|gru")
"""In names of operators that models consist of."""
_ROUNDING = 0.005
"""Fraction below which two sums of times are the same."""


def trace_verdict(analysis: TraceAnalysis) -> list[str]:
    """Return at most three sentences: the largest loss and the change to try, or that there is none; then
    the step time."""
    missing = _missing_records(analysis)
    if not analysis.totals.step_ns or any(rank.misses_records for rank in analysis.ranks):
        return missing
    if analysis.ledger is None:
        return [_rehearsal(analysis)] if analysis.rehearsed else missing
    ledger, head = analysis.ledger, _headline(analysis.ledger)
    first = next((one for one in ledger.entries if one.told), None)
    if first is None:
        lines = _unexplained(ledger, head) or [
            _nothing(analysis.what_if, ledger),
            f"{head} {ledger.bound}".strip(),
        ]
    else:
        lines = [f"{first.said} {head}{_larger(first, ledger)}", try_first(first, ledger)]
    return [*missing, *lines, *ledger.not_judged][:3]


def _unexplained(ledger: Ledger, head: str) -> list[str]:
    """Name the largest loss that this recording does not explain, if it takes much of the step."""
    lost = [
        one
        for one in ledger.entries
        if one.cause in _UNEXPLAINED or (one.confidence == "low" and one.cause != "tracing")
    ]
    worst = max(lost, key=lambda one: one.ns, default=None)
    if worst is None or worst.frac < _MUCH:
        return []
    then = "The recording does not show which change would avoid it."
    if worst.remedy is not None and worst.remedy.basis == "unknown":  # it asks for a recording that tells
        then = worst.remedy.change
    if any(one.ns > worst.ns for one in ledger.entries if _is_lost(one)):
        return [f"{head} {ledger.bound}", f"{worst.said} {then}"]
    return [f"{worst.said} {head}", then]


_UNKNOWN_CHANGE = "; the recording does not show how to avoid it"


def _larger(told: LedgerEntry, ledger: Ledger) -> str:
    """Name the largest cause without a known change, if it costs much more than the one that has one."""
    lost = [one for one in ledger.entries if _is_lost(one) and not one.told]
    worst = max(lost, key=lambda one: one.ns, default=None)
    if worst is None or worst.ns < _MUCH_MORE * told.ns or worst.frac < _MUCH:
        return ""
    cost = f"{format_ns(worst.ns)} ({format_frac(worst.frac)})"
    known = wordings("ledger").get(worst.id, {}).get("change")  # that may cost more than it gains here
    return f" A larger part, {cost}, is {worst.title}{'' if known else _UNKNOWN_CHANGE}."


def _is_lost(entry: LedgerEntry) -> bool:
    """Whether an entry is time lost in the training itself; a busy machine is reported beside it."""
    return entry.cause not in ("compute", "tracing", "starved")


def _nothing(tried: Sequence[WhatIfChange], ledger: Ledger) -> str:
    """Return the sentence for a ledger without a remedy, with the gains of replayed settings if there are
    any."""
    if not ledger.exact:
        return f"{NOTHING}."
    if not tried:
        return f"{NOTHING}; {_REPLAY}"
    best = next((row for row in tried if row.told), None)
    if best is None and ledger.not_judged:
        return f"{NOTHING}."
    if best is None or best.gained_ns is None:
        return f"{NOTHING}; in replays, no other setting gains enough to be worth changing."
    gain = f"{format_ns(best.gained_ns)} per step ({format_frac(best.gained_frac or 0.0)})"
    return f"{NOTHING}. Of the replayed settings, {best.change} gains most: {gain}."


_MORE = 1.1
"""Times its entry's own time that a replayed change gains, from which on all of that is named."""


def try_first(entry: LedgerEntry, ledger: Ledger) -> str:
    """Return the change, its gain, and the basis of the gain."""
    remedy = entry.remedy
    assert remedy is not None
    change = f"Try this first: {remedy.change[0].lower()}{remedy.change[1:]}"
    if remedy.gain_ns is None or remedy.gain_frac is None or remedy.gain_frac <= 0:
        return change
    if remedy.reason == UNTRACED and ledger.unrecorded_step_ns:
        part = format_frac(remedy.gain_ns / ledger.unrecorded_step_ns)
        return f"{change} This saves at most {format_ns(remedy.gain_ns)} ({part}) of a step: {UNTRACED}."
    amount = f"{format_ns(remedy.gain_ns)} ({format_frac(remedy.gain_frac)}) {of_step(ledger)}"
    if remedy.basis == "replay":
        tried = entry.evidence.get("what_if")
        whole = tried.get("gained_ns_per_step") if isinstance(tried, dict) else None
        if isinstance(whole, float) and whole > _MORE * remedy.gain_ns:  # ranks wait less for each other, too
            amount = f"{format_ns(whole)} ({format_frac(whole / ledger.step_ns)}) {of_step(ledger)}"
        return f"{change} In a replay of this recording, this saves {amount}."
    untraced = ledger.unrecorded_step_ns
    if untraced and ledger.step_ns >= SLOWED * untraced:
        amount += f", or {format_ns(remedy.gain_frac * untraced)} of a step if tracing slows all of it alike"
    much = "about" if remedy.basis == "estimate" else "at most"
    return f"{change} This saves {much} {amount}: {remedy.reason}."


def of_step(ledger: Ledger) -> str:
    """Return the kind of step that an amount refers to, because tracing makes steps longer."""
    return "of a traced step" if differs_traced(ledger.step_ns, ledger.unrecorded_step_ns) else "per step"


def bound(ledger: Ledger, analysis: TraceAnalysis) -> str:
    """Report the cause that takes most of the step, and the next one if it takes much as well; of compute
    also the lines that ask for most of it."""
    if not ledger.entries or not ledger.step_ns:
        return ""
    first, *others = sorted(ledger.entries, key=lambda entry: -entry.ns)
    of = "traced step" if differs_traced(ledger.step_ns, ledger.unrecorded_step_ns) else "step"
    part = "Most" if first.frac >= _MOST else "The largest part"
    second = next((one for one in others if first.frac < _MOST or one.cause != "tracing"), None)
    if second is None or (first.frac >= _MOST and second.frac < _MUCH):
        then = ""
    else:
        then = f", then {second.title} ({format_ns(second.ns)})"
    computes = next((one for one in (first, second) if one is not None and one.cause != "starved"), first)
    beside = _costly(analysis) if computes.cause == "compute" else ""
    if first.cause == "allocation" and not first.told:
        beside = " A first step does that: record later ones to see what repeats."
    said = f"{format_ns(first.ns)} ({format_frac(first.frac)}){then}"
    return f"{part} of the {of} is {first.title}: {said}.{beside}"


def _costly(analysis: TraceAnalysis) -> str:
    """Name the lines that compute much of the step; without lines, a CPU's operators that do and are not
    what a model usually computes most."""
    lines = [row for row in analysis.lines if row.step_frac >= _MUCH]
    if lines:
        named = [f"{row.line} ({format_frac(row.step_frac)})" for row in lines[:_OPERATORS]]
        verb = "line is" if len(named) == 1 else "lines are"
        return f" The costliest {verb} {' and '.join(named)}, backward included."
    costly = [
        f"{format_ns(row.total_ns)} in {row.name}"
        for row in analysis.kernels
        if row.kind == "compute" and row.name and row.name.startswith("aten::")
        if (row.step_frac or 0.0) >= _MUCH and not _USUAL.search(row.name)
    ]
    return f" Of that, {' and '.join(costly[:_OPERATORS])}." if costly else ""


def collectives(book: Book) -> str:
    """Say which entries hold the exposed time of the rows by layer, where more than one does."""
    windows = max(1, book.rank_steps)
    named = [(title, ns / windows) for title, ns in book.collective_ns.most_common() if ns]
    exposed = sum(row.exposed_ns for row in book.analysis.groups) / windows
    blocked = sum(ns for _, ns in named) - exposed
    few = max(1.0, _ROUNDING * exposed)
    if len(named) < 2 and abs(blocked) <= few:
        return ""
    said = f"Collectives are exposed for {format_ns(exposed)}"
    if blocked > few:
        said += f", and block their callers for another {format_ns(blocked)}"
    counted = [f"{format_ns(ns)} {title}" for title, ns in named[:_NAMED]]
    other = sum(ns for _, ns in named[_NAMED:])
    if other > few:
        counted.append(f"{format_ns(other)} other causes")
    return f"{said}; by cause: {', '.join(counted)}."


def not_judged(book: Book) -> list[str]:
    """Return the limits of this recording."""
    found = in_turns(book)
    starved = book.frac(book.starved_ns)
    rows = [one for one in book.entries if one.cause == "starved"]
    if starved >= BUSY and not any(one.told for one in rows):
        said = f"The host was busy: ranks waited {format_frac(starved)} of a step for a CPU core"
        if starved - sum(one.frac for one in rows) >= _ROUNDING:
            said += ", partly in the work of other rows"
        hidden = starved >= _HIDING
        found.append(
            f"{said}. {'This hides smaller losses' if hidden else 'Times on an idle machine may differ'}."
        )
    if not book.on_device:
        found.append(
            "A CPU run does not show a GPU's overlap or kernel times; it does show collectives, FSDP units, "
            "extra forwards, data loading and uneven work between ranks."
        )
    if not book.waits_known:
        found.append(f"Part of communication may be waiting for other ranks. {book.missing_traces}")
    return found


def in_turns(book: Book) -> list[str]:
    """Say so if two models are updated in turns, each update a step: means are over both kinds of steps."""
    roots = max((len(one.roots) for one in book.manifests), default=0)
    seen = kinds_of_steps(book.analysis.groups, book.analysis.ranks) if roots > 1 else None
    if seen is None:
        return []
    kinds = seen.reduced if len(seen.reduced) > 1 else seen.gathered
    kind_of = {step: at for at, steps in enumerate(kinds.values()) for step in steps}
    order = [kind_of[step] for step in sorted(kind_of)]
    if len(kinds) != 2 or len(order) < _TURNS or any(one == other for one, other in pairwise(order)):
        return []
    took = [step.duration_ns for one in book.analysis.ranks if one.rank == seen.rank for step in one.steps]
    both = format_ns(2 * sum(took) / len(took))
    needless = " Each computes gradients of both models: detach() the output of the one that is not updated."
    return [
        f"Two kinds of steps take turns, as where two optimizers do (a GAN): one of each takes {both}, and "
        f"means are over both.{needless if len(seen.reduced) == 1 else ''}"
    ]


def trace_advice(analysis: TraceAnalysis) -> list[str]:
    """Return the unrecorded step time, and the limits of this recording."""
    if analysis.ledger is None or any(rank.misses_records for rank in analysis.ranks):
        return []
    tried = [] if analysis.what_if or not analysis.ledger.exact else [_REPLAY]
    return [*unrecorded_sentence(analysis.unrecorded_step), *analysis.ledger.not_judged, *tried]


def unrecorded_sentence(step: UnrecordedStep | None) -> list[str]:
    """Return the unrecorded step time and its spread."""
    if step is None:
        return []
    low, high = format_ns(step.lower_quartile_ns), format_ns(step.upper_quartile_ns)
    average, typical = "mean" if are_unlike(step) else "median", typical_ns(step)
    spread = f"quartiles {low} to {high}"
    if are_unlike(step):
        spread = f"median {format_ns(step.median_ns)}, {spread}"
    measured = f"{average} of {step.steps}, {spread}" if step.steps > 1 else "one such step"
    line = f"A step takes {format_ns(typical)} without recording ({measured})."
    if step.slowdown is not None and step.slowdown > 1:
        traced = format_ns(step.slowdown * typical)
        line += f" The {average} traced step takes {traced}, {times(step.slowdown)} as long."
    return [line]


def _missing_records(analysis: TraceAnalysis) -> list[str]:
    """Say which ranks and steps miss records of the device, and that they are not analysed."""
    ranks = [rank for rank in analysis.ranks if rank.incomplete_steps]
    if not ranks:
        return []
    first = ranks[0].incomplete_steps
    launches, missing = (sum(getattr(one, name) for one in first) for name in ("launches", "missing"))
    lost = f": {missing:,} of {launches:,} launches have none" if launches else ""
    where = f"step {first[0].step}" if len(first) == 1 else f"{len(first)} steps"
    fate = "they are not analysed" if ranks[0].misses_records else "these steps are left out"
    return [
        f"Device records are missing on {len(ranks)} of {plural(len(analysis.ranks), 'rank')} "
        f"(rank {ranks[0].rank}, {where}{lost}); {fate}."
    ]


def _headline(ledger: Ledger) -> str:
    """Return the step time, and the traced step time that all other times refer to."""
    traced, step = ledger.step_ns, ledger.unrecorded_step_ns
    if step is None:
        return f"A traced step takes {format_ns(traced)}."
    if not differs_traced(traced, step):
        return f"A step takes {format_ns(step)}."
    slowed = ", slowed mostly on the host" if traced >= SLOWED * step else ""
    varied = "; steps of this run vary as much" if traced < step else ""
    return f"A step takes {format_ns(step)}, a traced one {format_ns(traced)}{slowed}{varied}."


def _rehearsal(analysis: TraceAnalysis) -> str:
    rank = analysis.ranks[0]
    return (
        f"Rehearsed as rank {rank.rank} of {rank.world_size}: memory, counts and bytes are that rank's; "
        "durations of collectives are meaningless, and step times exclude communication."
    )
