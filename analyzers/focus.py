"""Filter a result by layers, ranks or steps, after the whole was analysed.

Ranks stay compared with hidden ranks. Means over ranks and steps are recomputed from the remaining rows;
figures that cannot be split by rank or step are omitted with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

from fsdp2prof.analyzers.memory import analysis as memory_analysis
from fsdp2prof.analyzers.memory.peak import fold_layers
from fsdp2prof.analyzers.steps import window_count
from fsdp2prof.analyzers.trace.by_layer import arrivals, fold, late_rows
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.analyzers.trace.timeline import compute_slices
from fsdp2prof.errors import UsageError
from fsdp2prof.results.communication import Attribution, GroupRow
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.step import Focus, StepTimeline
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import layer_name

Focused = TypeVar("Focused", TraceAnalysis, MemoryAnalysis, RunAnalysis)
_Row = TypeVar("_Row")
_Keep: TypeAlias = Callable[[str | None], bool]

_NAMED = 12
"""Layers that a refusal lists."""


def focus_on(result: Focused, focus: Focus) -> Focused:
    """Return a result filtered by layers, ranks and steps. Raises ``UsageError`` for unknown ones."""
    keep = _checked(result, focus)
    if isinstance(result, TraceAnalysis):
        return _trace(result, focus, keep)
    if isinstance(result, MemoryAnalysis):
        return _memory(result, focus, keep)
    return replace(
        result,
        trace=None if result.trace is None else _trace(result.trace, focus, keep),
        memory=None if result.memory is None else _memory(result.memory, focus, keep),
        findings=_of_layers(result.findings, keep) if focus.layers else result.findings,
    )


def _checked(result: TraceAnalysis | MemoryAnalysis | RunAnalysis, focus: Focus) -> _Keep:
    """Return which layers are wanted, after a look at whether everything is there."""
    parts: list[TraceAnalysis | MemoryAnalysis]
    if isinstance(result, RunAnalysis):
        parts = [part for part in (result.trace, result.memory) if part is not None]
    else:
        parts = [result]
    steps = [
        step.step
        for part in parts
        if isinstance(part, TraceAnalysis)
        for rank in part.ranks
        for step in rank.steps
    ]
    _require("rank", focus.ranks, [rank.rank for part in parts for rank in part.ranks])
    _require("step", focus.steps, steps)
    return _keep(focus.layers, [name for part in parts for name in _layers(part)])


def _require(what: str, chosen: Collection[int] | None, here: Iterable[int]) -> None:
    absent = sorted(set(chosen or ()) - (found := set(here)))
    if absent:
        there = ", ".join(map(str, sorted(found)[:_NAMED])) + (", ..." if len(found) > _NAMED else "")
        raise UsageError(f"no {what} {absent[0]} was analysed; there is {there or 'none'}")


def _layers(part: TraceAnalysis | MemoryAnalysis) -> list[str | None]:
    if isinstance(part, TraceAnalysis):
        return [*dict.fromkeys(row.fqn for row in part.groups)]
    return [*dict.fromkeys(row.fqn for rank in part.ranks for row in rank.peak.by_layer)]


def _keep(patterns: Sequence[str] | None, here: Sequence[str | None]) -> _Keep:
    """Return whether a layer is wanted; raises ``UsageError`` for patterns that no layer matches."""
    if patterns is None:
        return lambda fqn: True
    names = list(dict.fromkeys(map(layer_name, here)))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            raise UsageError(f"--layer {pattern}: no layer has such a name; there is {there or 'none'}")
    return lambda fqn: any(fnmatchcase(layer_name(fqn), pattern) for pattern in patterns)


def _of_layers(rows: Sequence[_Row], keep: _Keep) -> list[_Row]:
    def fqn(row: Any) -> str | None:
        name: str | None = row.fqn
        return name

    return [row for row in rows if keep(fqn(row))]


# A trace: first the ranks and steps, of which the means are made anew; then the layers.


def _trace(analysis: TraceAnalysis, focus: Focus, keep: _Keep) -> TraceAnalysis:
    if focus.ranks is not None or focus.steps is not None:
        analysis = _ranks_and_steps(analysis, focus)
    if focus.layers is not None:
        analysis = _layers_of_trace(analysis, keep)
    return replace(analysis, focus=focus)


def _ranks_and_steps(analysis: TraceAnalysis, focus: Focus) -> TraceAnalysis:
    def wanted(rank: int, step: int | None = None) -> bool:
        if focus.ranks is not None and rank not in focus.ranks:
            return False
        return focus.steps is None or step is None or step in focus.steps

    ranks = [
        replace(rank, steps=[step for step in rank.steps if wanted(rank.rank, step.step)])
        for rank in analysis.ranks
        if wanted(rank.rank)
    ]
    groups = [row for row in analysis.groups if wanted(row.rank, row.step)]
    gone = ["bandwidth", "kernels", "replayed changes"]
    if focus.steps is not None:
        gone.append("host synchronizations")
    narrowed = of_part(
        replace(
            analysis,
            ranks=ranks,
            groups=groups,
            attribution=_attribution(groups),
            prefetch=[row for row in analysis.prefetch if wanted(row.rank, row.step)],
            host_syncs=[row for row in analysis.host_syncs if wanted(row.rank) and focus.steps is None],
            bandwidth=[],
            kernels=[],
            operators=[],
            what_if=[],
            timeline=_timeline(analysis.timeline, focus),
            warnings=[
                *analysis.warnings,
                f"shown: {replace(focus, layers=None)}; left out, because they cover the whole run: "
                + ", ".join(gone),
            ],
        )
    )
    return replace(narrowed, cross_rank=analysis.cross_rank)


def _attribution(groups: Sequence[GroupRow]) -> Attribution:
    lost = sum(row.count for row in groups if row.fqn is None)
    return Attribution(
        collectives=sum(row.count for row in groups),
        attributed=sum(row.count for row in groups if row.fqn is not None),
        comm_ns=sum(row.total_ns for row in groups),
        attributed_ns=sum(row.total_ns for row in groups if row.fqn is not None),
        unattributed_reasons={"see the unfiltered analysis for the reasons": lost} if lost else {},
    )


def _timeline(timeline: StepTimeline | None, focus: Focus) -> StepTimeline | None:
    if timeline is None or (focus.steps is not None and timeline.step not in focus.steps):
        return None
    ranks = [rank for rank in timeline.ranks if focus.ranks is None or rank.rank in focus.ranks]
    if not ranks:
        return None
    fractions, phases = compute_slices(ranks, timeline.duration_ns, timeline.phases)
    left_out = timeline.ranks_left_out + len(timeline.ranks) - len(ranks)
    return replace(
        timeline, ranks=ranks, ranks_left_out=left_out, compute_frac=fractions, slice_phases=phases
    )


def _layers_of_trace(analysis: TraceAnalysis, keep: _Keep) -> TraceAnalysis:
    windows, cross = window_count(analysis.ranks), analysis.cross_rank
    by_layer = _of_layers(analysis.by_layer, keep)
    prefetch = _of_layers(analysis.prefetch, keep)
    timeline = analysis.timeline
    if timeline is not None:
        ranks = [replace(rank, stalls=_of_layers(rank.stalls, keep)) for rank in timeline.ranks]
        timeline = replace(timeline, ranks=ranks)
    return replace(
        analysis,
        groups=_of_layers(analysis.groups, keep),
        by_layer=by_layer,
        by_layer_folded=fold(by_layer),
        layers=_of_layers(analysis.layers, keep),
        prefetch=prefetch,
        late=_of_layers(analysis.late, keep),
        late_folded=late_rows(prefetch, windows, folded=True),
        arrivals=arrivals(prefetch, windows) if windows else [],
        layer_waits=_of_layers(analysis.layer_waits, keep),
        host_syncs=_of_layers(analysis.host_syncs, keep),
        host_sync_places=_of_layers(analysis.host_sync_places, keep),
        findings=_of_layers(analysis.findings, keep),
        cross_rank=replace(
            cross,
            stragglers=_of_layers(cross.stragglers, keep),
            groups=_of_layers(cross.groups, keep),
        ),
        timeline=timeline,
    )


# Memory.


def _memory(analysis: MemoryAnalysis, focus: Focus, keep: _Keep) -> MemoryAnalysis:
    if focus.ranks is not None:
        ranks = [rank for rank in analysis.ranks if rank.rank in focus.ranks]
        analysis = memory_analysis.summarise(replace(analysis, ranks=ranks))
    if focus.layers is not None:
        analysis = replace(
            analysis,
            ranks=[_layers_of_rank(rank, keep) for rank in analysis.ranks],
            findings=_of_layers(analysis.findings, keep),
        )
    return replace(analysis, focus=focus)


def _layers_of_rank(rank: RankMemory, keep: _Keep) -> RankMemory:
    peak = rank.peak
    layers = [row for row in peak.layers if any(map(keep, row.fqns))]
    return replace(
        rank,
        layers=_of_layers(rank.layers, keep),
        peak=replace(
            peak,
            by_layer=_of_layers(peak.by_layer, keep),
            largest_blocks=_of_layers(peak.largest_blocks, keep),
            others=_of_layers(peak.others, keep),
            layers=layers,
            layers_folded=fold_layers(layers),
        ),
    )
