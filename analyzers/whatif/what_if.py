"""``whatif``: a recorded run, run again with something changed, and what that would gain.

The recording's own times are kept; what follows from what is known from its labels, launches and waits, so
that a run replayed without a change takes exactly as long as it took
(:mod:`fsdp2prof.analyzers.whatif.run`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp2prof.analyzers.layers import numbered
from fsdp2prof.analyzers.ledger.replayed import with_replays
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.analyzers.trace.analysis import RankAnalysis, analyze_trace, merge
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.whatif.changes import (
    OTHER_HARDWARE,
    TOGETHER,
    Change,
    Changed,
    NotApplicableError,
    parse_change,
    parse_without,
    single_changes,
)
from fsdp2prof.analyzers.whatif.program import RankProgram
from fsdp2prof.analyzers.whatif.recorded import job_of
from fsdp2prof.analyzers.whatif.run import Pace, Ran, mean_step_ns, mean_steps_ns, prepare, run
from fsdp2prof.errors import InputError
from fsdp2prof.results.communication import CrossRank, LayerRow
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.what_if import WhatIf, WhatIfChange, WhatIfLayer
from fsdp2prof.units import format_ns
from fsdp2prof.vocabulary import layer_name, op_label
from fsdp2prof.worker_processes import no_garbage_collection

_ASSUMPTIONS = (
    "recorded durations are unchanged: kernels, host work, transfers from the arrival of the "
    "last rank; kernels beside a collective keep their recorded slowdown",
    "order and waits follow FSDP2; unexplained waits stay as recorded",
)

_WORTH_SAYING = 0.002
"""Gain, as a share of a step, below which a change is not reported as helpful."""

_MUCH = 0.1
"""Part of a gain from which a place is named."""

_CLEARLY_MORE = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRank:
    """One rank of a recorded run, as the analyses left it."""

    tables: RankTables
    program: RankProgram
    analysis: RankAnalysis


def replay_job(ranks: Sequence[tuple[RankProgram, RankSummary]], compared: CrossRank | None = None) -> Ran:
    """Return the recorded run, whose job is ready to be run again, any number of times.

    ``compared`` is the ranks' comparison, if it was made before.
    """
    return prepare(job_of([program for program, _ in ranks], [summary for _, summary in ranks], compared))


@no_garbage_collection()
def what_if(
    ranks: Sequence[RecordedRank],
    path: str,
    *,
    changes: Sequence[Change] = (),
    warnings: Sequence[str] = (),
) -> WhatIf:
    """Make changes together in a recorded run; without any, try each single one.

    Raises ``InputError`` where a given change does not apply.
    """
    manifests = [one.tables.manifest for one in ranks if one.tables.manifest is not None]
    before = merge([one.analysis for one in ranks], manifests=manifests)
    replayed = replay_job([(one.program, one.analysis.summary) for one in ranks], before.cross_rank)
    best: WhatIfChange | None
    cannot = _cannot_be_replayed(before)
    if changes:
        change = _together(changes)
        if cannot is not None:
            raise InputError(f"{path}: {change.text}: cannot be replayed: {cannot}")
        changed, tried = _try(replayed, change)
        if changed is None:
            raise InputError(f"{path}: {change.text}: {tried.reason}")
        rows, best = [tried], tried
    else:
        rows = try_each(replayed, single_changes(replayed.job, _stragglers(before)), cannot)
        rows = with_replays(before, rows).what_if
        best = _best(rows)
        changed = None
        if best is not None:
            changed, _ = _try(replayed, _parsed(best.change))
    after = None if changed is None else _after(ranks, changed)
    kept = None if changed is None else changed[0].pace.waits_for
    if kept is not None:  # what a change is compared with: the same ranks
        analyses = [one.analysis for one in ranks if one.program.rank in kept]
        before = merge(analyses, manifests=[one for one in manifests if one.rank in kept])
    totals = before.totals
    result = WhatIf(
        verdict=[],
        path=path,
        ranks=[program.rank for program in replayed.job if kept is None or program.rank in kept],
        steps=totals.windows,
        step_ns=totals.step_ns or 0.0,
        replayed_ns=(replayed_ns := mean_step_ns(replayed, kept)),
        replay_error_frac=replayed_ns / totals.step_ns - 1 if totals.step_ns else 0.0,
        tried=rows,
        shown=best.change if after is not None and best is not None else None,
        breakdown_before_ns=totals.breakdown_ns,
        breakdown_after_ns={} if after is None else after.totals.breakdown_ns,
        by_layer=[] if after is None else _layers(before.by_layer, after.by_layer),
        assumptions=list(_ASSUMPTIONS),
        warnings=list(warnings),
    )
    return replace(result, verdict=_verdict(result, best))


def _best(rows: Sequence[WhatIfChange]) -> WhatIfChange | None:
    """Return the change with the largest gain among those that a script can make; if none helps, the
    largest of all."""
    applied = [row for row in rows if row.step_ns is not None]
    own = [row for row in applied if not row.other_hardware and (row.gained_frac or 0) >= _WORTH_SAYING]
    return next(iter(own or applied), None)


def try_each(recorded: Ran, changes: Sequence[Change], cannot: str | None = None) -> list[WhatIfChange]:
    """Try single changes on a recorded run; the most gained first, then those that do not apply.

    Late ranks together are listed where they gain more than the latest of them alone. ``cannot`` is why no
    change can be tried.
    """
    if cannot is not None:
        return [_row(change, reason=cannot) for change in changes]
    rows = [_try(recorded, change)[1] for change in changes]
    alone = max((row.gained_ns or 0.0 for row in rows if _late_ranks(row) == 1), default=0.0)
    rows = [row for row in rows if _late_ranks(row) < 2 or (row.gained_ns or 0.0) > alone * _CLEARLY_MORE]
    return sorted(rows, key=lambda row: -row.gained_ns if row.gained_ns is not None else float("inf"))


def _late_ranks(row: WhatIfChange) -> int:
    """Count the late ranks that a change leaves out."""
    name, _, ranks = row.change.partition("straggler:")
    return len(ranks.split(",")) if name == "without " else 0


@no_garbage_collection()
def with_what_ifs(
    analysis: TraceAnalysis,
    ranks: Sequence[tuple[RankProgram, RankSummary]],
    thresholds: FindingThresholds | None = None,
) -> TraceAnalysis:
    """Return an analysis with every single change tried, and the ledger's remedies with their gains."""
    recorded = replay_job(ranks, analysis.cross_rank)
    changes = single_changes(recorded.job, _stragglers(analysis))
    tried = try_each(recorded, changes, _cannot_be_replayed(analysis))
    return with_replays(analysis, tried, thresholds)


def _cannot_be_replayed(analysis: TraceAnalysis) -> str | None:
    """Return why a replay cannot describe a job: its ranks share a device."""
    entries = [] if analysis.ledger is None else analysis.ledger.entries
    shared = next((one.evidence.get("ranks") for one in entries if one.id == "sharing_a_device"), None)
    if not isinstance(shared, list):
        return None
    ranks = numbered("rank", [int(str(rank)) for rank in shared])
    return f"{ranks} share a device, where their kernels take turns"


def _parsed(text: str) -> Change:
    return parse_without(text.removeprefix("without ")) if text.startswith("without ") else parse_change(text)


def _together(changes: Sequence[Change]) -> Change:
    if len(changes) == 1:
        return changes[0]

    def apply(changed: Changed) -> Changed:
        for change in changes:
            changed = change.apply(changed)
        return changed

    return Change(
        TOGETHER, ", ".join(one.text for one in changes), " and ".join(one.what for one in changes), apply
    )


def _try(before: Ran, change: Change) -> tuple[tuple[Changed, Ran] | None, WhatIfChange]:
    """Make a change in a run."""
    try:
        changed = change.apply(Changed(job=before.job, pace=Pace(), memory_bytes=0))
    except NotApplicableError as reason:
        return None, _row(change, reason=str(reason))
    ran = run(changed.job, changed.pace)
    kept = changed.pace.waits_for
    row = _row(change, before=mean_step_ns(before, kept), after=mean_step_ns(ran, kept), changed=changed)
    now, was = mean_steps_ns(ran, kept), mean_steps_ns(before, kept)
    gains = [was[step] - now[step] for step in was]
    if len(gains) > 1:
        row = replace(row, least_gained_ns=min(gains), most_gained_ns=max(gains))
    return (changed, ran), row


def _row(
    change: Change,
    *,
    reason: str | None = None,
    before: float | None = None,
    after: float | None = None,
    changed: Changed | None = None,
) -> WhatIfChange:
    gained = None if before is None or after is None else before - after
    return WhatIfChange(
        change=change.text,
        what=change.what,
        step_ns=after,
        gained_ns=gained,
        gained_frac=None if gained is None or not before else gained / before,
        memory_bytes=None if changed is None else changed.memory_bytes,
        reason=reason,
        other_hardware=change.name in OTHER_HARDWARE,
        assumptions=[] if changed is None else list(changed.assumptions),
    )


def _after(ranks: Sequence[RecordedRank], made: tuple[Changed, Ran]) -> TraceAnalysis:
    from fsdp2prof.analyzers.whatif.warp import replayed_trace  # of the one change that is shown by layer

    changed, ran = made
    kept = changed.pace.waits_for
    by_rank = {one.program.rank: one for one in ran.ranks}
    return analyze_trace(
        (replayed_trace(one.tables.trace, by_rank[one.program.rank]), one.tables.manifest)
        for one in ranks
        if kept is None or one.program.rank in kept
    )


def _stragglers(analysis: TraceAnalysis) -> list[int]:
    """Return the ranks that findings call slow: nothing rids a run of a rank that was late by chance."""
    ranks = (finding.evidence.get("rank") for finding in analysis.findings if finding.id == "straggler")
    return [rank for rank in dict.fromkeys(ranks) if isinstance(rank, int)]


def _layers(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> list[WhatIfLayer]:
    def summed(rows: Sequence[LayerRow]) -> Mapping[tuple[str | None, str, str], tuple[float, float, float]]:
        sums: dict[tuple[str | None, str, str], tuple[float, float, float]] = {}
        for row in rows:
            key = row.fqn, row.phase, row.op
            count, total, exposed = sums.get(key, (0.0, 0.0, 0.0))
            sums[key] = count + row.count, total + row.total_ns, exposed + row.exposed_ns
        return sums

    old, new = summed(before), summed(after)
    rows = []
    for key in dict.fromkeys([*old, *new]):
        count, total, exposed = old.get(key, (0.0, 0.0, 0.0))
        count_after, total_after, exposed_after = new.get(key, (0.0, 0.0, 0.0))
        fqn, phase, op = key
        rows.append(
            WhatIfLayer(
                fqn=fqn,
                phase=phase,
                op=op,
                count_before=count,
                count_after=count_after,
                total_before_ns=total,
                total_after_ns=total_after,
                exposed_before_ns=exposed,
                exposed_after_ns=exposed_after,
                gained_ns=exposed - exposed_after,
            )
        )
    return sorted(rows, key=lambda row: -abs(row.gained_ns))


def _verdict(result: WhatIf, best: WhatIfChange | None) -> list[str]:
    if best is None:
        return ["No change that can be tried applies to this recording."]
    text = best.sentence()
    now = best.step_ns or 0.0
    was = format_ns(now + (best.gained_ns or 0.0))
    lines = [f"{text[0].upper()}{text[1:]}. A step of {was} takes {format_ns(now)}."]
    if len(result.tried) > 1 and (best.gained_frac or 0) < _WORTH_SAYING:
        lines = ["None of the single changes tried makes a step faster."]
    elif len(result.tried) > 1 and best.other_hardware:
        lines.insert(0, "None of the settings tried makes a step faster.")
    worst = result.by_layer[0] if result.by_layer else None
    if worst is not None and worst.gained_ns > _MUCH * abs(best.gained_ns or 0.0) > 0:
        lines.append(
            f"The largest part is the {op_label(worst.op)} of {layer_name(worst.fqn)} in {worst.phase}: "
            f"{format_ns(worst.exposed_before_ns)} exposed before, {format_ns(worst.exposed_after_ns)} after."
        )
    return lines
