"""``--fail-on 'exposed_frac>0.2'``: conditions on a small documented set of metrics, for CI.

A condition is ``METRIC OPERATOR NUMBER`` with one of ``> >= < <= == !=``. Every metric is computed per rank,
and a condition fails the run as soon as it holds on one rank; the failure names the worst of them. A metric
that is undefined on every rank (no overlap without communication) is an error, because a gate that cannot
be evaluated must not pass.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.results.comparison import RankPeakChange, RunComparison, TimeChange
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import RankTrace, TraceAnalysis
from fsdp2prof.vocabulary import EXPOSED_PARTS

Analysis = TraceAnalysis | MemoryAnalysis | RunAnalysis | RunComparison
Kind: TypeAlias = Literal["trace", "memory", "run", "comparison"]
"""Of results that a condition may test."""
_PerRank = Mapping[int | None, float | None]
"""Rank -> value; None is the key of a value of all ranks together."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(
    r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|==|!=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
)
_GIB = 1 << 30
_KINDS: dict[str, type | tuple[type, ...]] = {
    "step": (RunAnalysis, TraceAnalysis),
    "trace": TraceAnalysis,
    "memory": MemoryAnalysis,
    "comparison": RunComparison,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, per rank if applicable, that a condition can test."""

    description: str
    source: str
    """Source of the number: ``step`` (of a run or a trace), ``trace``, ``memory`` or ``comparison``."""
    values: (
        Callable[[RunAnalysis | TraceAnalysis], _PerRank]
        | Callable[[TraceAnalysis], _PerRank]
        | Callable[[MemoryAnalysis], _PerRank]
        | Callable[[RunComparison], _PerRank]
    )
    timed: bool = False
    """Whether a busy machine changes it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition."""

    metric: str
    operator: str
    limit: float
    text: str
    """As the user wrote it."""

    def holds(self, value: float) -> bool:
        """Whether a value meets the condition."""
        return _OPERATORS[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A condition that was tested, with the worst value and its rank."""

    condition: Condition
    rank: int | None
    """None for a value of all ranks together."""
    value: float
    ranks: int
    """Ranks on which it held: the gate fails unless there are none."""
    excuse: str = ""
    """Why the gate does not fail although the condition held."""

    @property
    def failed(self) -> bool:
        """Whether the gate fails for it."""
        return self.ranks > 0 and not self.excuse

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        others = f" (it holds on {self.ranks} ranks)" if self.ranks > 1 else ""
        excuse = f"; does not fail: {self.excuse}" if self.excuse else ""
        return f"{self.condition.text}: {self.condition.metric} is {self.value:.4g}{where}{others}{excuse}"


def parse(text: str, of: Kind | None = None) -> Condition:
    """Parse one condition on a result ``of`` some kind, by default of any.

    Raises ``UsageError`` for a bad form and for a metric that such a result does not have.
    """
    known = [name for name, one in METRICS.items() if of is None or one.source in _SOURCES[of]]
    match = _CONDITION.fullmatch(text)
    if match is None:
        example = "exposed_frac" if "exposed_frac" in known else known[0]
        raise UsageError(
            f"not a condition: {text!r}; write for example '{example}>0.2'; here are {', '.join(known)}"
        )
    metric, symbol, number = match.groups()
    if metric not in known:
        of_others = f", which needs {_NEEDED[METRICS[metric].source]}" if metric in METRICS else ""
        raise UsageError(f"no metric {metric!r} here (in {text!r}){of_others}; here are {', '.join(known)}")
    return Condition(metric, symbol, float(number), text.strip())


def check(conditions: Sequence[Condition], analysis: Analysis) -> list[Outcome]:
    """Return the conditions that fail the gate, in the order given; raises what :func:`judge` does."""
    return [outcome for outcome in judge(conditions, analysis) if outcome.failed]


def judge(conditions: Sequence[Condition], analysis: Analysis) -> list[Outcome]:
    """Test every condition, in the order given.

    Raises ``UsageError`` if the analysis is not of the kind a metric needs, ``InputError`` if a metric is
    undefined on every rank.
    """
    return [_evaluate(condition, analysis) for condition in conditions]


def _evaluate(condition: Condition, analysis: Analysis) -> Outcome:
    values = {rank: v for rank, v in _values(condition, analysis).items() if v is not None}
    if not values:
        raise InputError(
            f"{condition.text}: {condition.metric} is undefined here, so the condition cannot be tested"
        )
    held = {rank: value for rank, value in values.items() if condition.holds(value)}
    among = held or values
    worst = (
        min(among, key=among.__getitem__) if "<" in condition.operator else max(among, key=among.__getitem__)
    )
    return Outcome(condition, worst, among[worst], len(held), _excuse(condition, analysis) if held else "")


def _excuse(condition: Condition, analysis: Analysis) -> str:
    """Return why a comparison does not show the program's own time; empty if it does."""
    if isinstance(analysis, RunComparison) and METRICS[condition.metric].timed:
        return analysis.machine_changed or ""
    return ""


def _values(condition: Condition, analysis: Analysis) -> _PerRank:
    metric = METRICS[condition.metric]
    part: Analysis | None = analysis
    if isinstance(analysis, RunAnalysis) and metric.source in ("trace", "memory"):
        part = analysis.trace if metric.source == "trace" else analysis.memory
    if not isinstance(part, _KINDS[metric.source]):
        raise UsageError(f"{condition.text}: {condition.metric} needs {_NEEDED[metric.source]}")
    return metric.values(part)  # type: ignore[arg-type]


_SOURCES: dict[Kind, tuple[str, ...]] = {
    "trace": ("step", "trace"),
    "memory": ("memory",),
    "run": ("step", "trace", "memory"),
    "comparison": ("comparison",),
}
_NEEDED = {
    "step": "a run or a trace analysis",
    "trace": "a trace analysis",
    "memory": "a memory analysis",
    "comparison": "`fsdp2prof compare`",
}


def _of_steps(part: Callable[[RankTrace], int]) -> Callable[[TraceAnalysis], _PerRank]:
    """Fraction of a rank's steps that ``part`` takes."""

    def values(analysis: TraceAnalysis) -> _PerRank:
        result: dict[int | None, float | None] = {}
        for rank in analysis.ranks:
            total = sum(step.duration_ns for step in rank.steps)
            result[rank.rank] = part(rank) / total if total else None
        return result

    return values


def _exposed_ns(rank: RankTrace) -> int:
    return sum(getattr(step.breakdown_ns, part) for step in rank.steps for part in EXPOSED_PARTS)


def _traced_ms(pick: Callable[[Sequence[int]], float]) -> Callable[[TraceAnalysis], _PerRank]:
    def values(analysis: TraceAnalysis) -> _PerRank:
        return {
            rank.rank: pick([step.duration_ns for step in rank.steps]) / 1e6 if rank.steps else None
            for rank in analysis.ranks
        }

    return values


def _step_ms(
    unrecorded: Callable[[UnrecordedStep], float], traced: Callable[[TraceAnalysis], _PerRank]
) -> Callable[[RunAnalysis | TraceAnalysis], _PerRank]:
    """Value of the unrecorded steps if any rank has some, otherwise of the traced ones."""

    def values(analysis: RunAnalysis | TraceAnalysis) -> _PerRank:
        ranks = analysis.run.ranks if isinstance(analysis, RunAnalysis) else analysis.ranks
        known = {rank.rank: rank.unrecorded_step for rank in ranks}
        if any(known.values()):
            return {rank: unrecorded(step) / 1e6 if step else None for rank, step in known.items()}
        trace = analysis.trace if isinstance(analysis, RunAnalysis) else analysis
        return traced(trace) if trace else {}

    return values


def _mean_of(durations: Sequence[int]) -> float:
    return sum(durations) / len(durations)


_TRACED_MEAN, _TRACED_MAX = _traced_ms(_mean_of), _traced_ms(max)


def _wait_frac(analysis: TraceAnalysis) -> _PerRank:
    waits = analysis.cross_rank.wait_ns
    return {
        rank.rank: waits[str(rank.rank)] / total
        for rank in analysis.ranks
        if str(rank.rank) in waits and (total := sum(step.duration_ns for step in rank.steps))
    }


def _attributed_frac(analysis: TraceAnalysis) -> _PerRank:
    counted = analysis.attribution
    value = counted.attributed_ns / counted.comm_ns if counted.comm_ns else None
    return {rank.rank: value for rank in analysis.ranks}


def _high_findings(analysis: TraceAnalysis) -> _PerRank:
    count = sum(finding.severity == "high" for finding in analysis.findings)
    return {rank.rank: count for rank in analysis.ranks}


def _of_memory(value: Callable[[RankMemory], float | None]) -> Callable[[MemoryAnalysis], _PerRank]:
    return lambda analysis: {rank.rank: value(rank) for rank in analysis.ranks}


def _reserved_gib(rank: RankMemory) -> float | None:
    return None if rank.peak.reserved_bytes is None else rank.peak.reserved_bytes / _GIB


def _unattributed_frac(rank: RankMemory) -> float | None:
    total = rank.peak.allocated_bytes
    return rank.peak.categories.get("unattributed", 0) / total if total else None


def _of_whole(value: Callable[[RunComparison], float | None]) -> Callable[[RunComparison], _PerRank]:
    return lambda comparison: {None: value(comparison)}


def _of_peaks(value: Callable[[RankPeakChange], float | None]) -> Callable[[RunComparison], _PerRank]:
    return lambda comparison: {row.after_rank: value(row) for row in comparison.peaks}


def _frac(change: TimeChange | None) -> float | None:
    return change.delta_frac if change else None


def _delta_ms(change: TimeChange | None) -> float | None:
    return change.delta_ns / 1e6 if change else None


def _wire_frac(comparison: RunComparison) -> float | None:
    """Over the ops whose wire bytes are defined; unknown where only one side knows those of a row."""
    sums = [0.0, 0.0]
    for row in comparison.communication:
        sizes = [side.wire_bytes for side in (row.before, row.after) if side is not None]
        if None in sizes and sizes != [None] * len(sizes):
            return None
        for when, side in enumerate((row.before, row.after)):
            sums[when] += (side.wire_bytes or 0) if side is not None else 0
    return sums[1] / sums[0] - 1 if sums[0] else None


def _unequal(comparison: RunComparison) -> float | None:
    if comparison.communication_equal is None:
        return None
    return sum(not row.equal for row in comparison.communication)


def _reserved_frac(row: RankPeakChange) -> float | None:
    if row.delta_reserved_bytes is None or not row.before_reserved_bytes:
        return None
    return row.delta_reserved_bytes / row.before_reserved_bytes


def _change(
    name: str, what: str, change: Callable[[RunComparison], TimeChange | None], else_of: str = ""
) -> dict[str, Metric]:
    """Return the metrics of a changed time: as a fraction of before, and in milliseconds."""
    kinds = {
        "frac": ("relative to before", _of_whole(lambda comparison: _frac(change(comparison)))),
        "delta_ms": ("in milliseconds", _of_whole(lambda comparison: _delta_ms(change(comparison)))),
    }
    return {
        f"{name}_{kind}": Metric(f"change of {what} {unit}{else_of}", "comparison", values, timed=True)
        for kind, (unit, values) in kinds.items()
    }


METRICS: dict[str, Metric] = {
    "exposed_frac": Metric(
        "exposed communication as a fraction of step time", "trace", _of_steps(_exposed_ns)
    ),
    "overlap_frac": Metric(
        "fraction of communication hidden behind compute or FSDP copies",
        "trace",
        lambda analysis: {rank.rank: rank.communication.overlap_frac for rank in analysis.ranks},
    ),
    "compute_frac": Metric(
        "compute as a fraction of step time",
        "trace",
        _of_steps(lambda rank: sum(s.breakdown_ns.compute for s in rank.steps)),
    ),
    "idle_frac": Metric(
        "device idle time as a fraction of step time",
        "trace",
        _of_steps(lambda rank: sum(s.breakdown_ns.idle for s in rank.steps)),
    ),
    "step_time_ms": Metric(
        "median unrecorded step in milliseconds; if unknown, the mean traced step",
        "step",
        _step_ms(lambda step: step.median_ns, _TRACED_MEAN),
    ),
    "step_time_max_ms": Metric(
        "longest unrecorded step in milliseconds; if unknown, the longest traced step",
        "step",
        _step_ms(lambda step: step.max_ns, _TRACED_MAX),
    ),
    "traced_step_time_ms": Metric("mean traced step in milliseconds", "trace", _TRACED_MEAN),
    "traced_step_time_max_ms": Metric("longest traced step in milliseconds", "trace", _TRACED_MAX),
    "wait_frac": Metric(
        "waiting for other ranks in collectives as a fraction of step time", "trace", _wait_frac
    ),
    "attributed_frac": Metric("fraction of collective time attributed to a layer", "trace", _attributed_frac),
    "high_findings": Metric("findings of high severity", "trace", _high_findings),
    "peak_allocated_gib": Metric(
        "peak allocated memory in GiB", "memory", _of_memory(lambda rank: rank.peak.allocated_bytes / _GIB)
    ),
    "peak_reserved_gib": Metric("reserved memory at the peak in GiB", "memory", _of_memory(_reserved_gib)),
    "unattributed_frac": Metric(
        "memory without a known role as a fraction of the peak", "memory", _of_memory(_unattributed_frac)
    ),
    **_change(
        "step_time",
        "the median unrecorded step",
        lambda comparison: comparison.unrecorded_step or comparison.step,
        "; if unknown, of the mean traced step",
    ),
    **_change("traced_step_time", "the mean traced step", lambda comparison: comparison.step),
    "unrecorded_step_frac": Metric(
        "change of the median unrecorded step relative to before",
        "comparison",
        _of_whole(lambda comparison: _frac(comparison.unrecorded_step)),
        timed=True,
    ),
    **_change("exposed_time", "exposed communication in a mean step", lambda comparison: comparison.exposed),
    "wire_bytes_frac": Metric(
        "change of the bytes that a rank sends per step relative to before",
        "comparison",
        _of_whole(_wire_frac),
    ),
    "unequal_collectives": Metric(
        "rows (layer, phase, op) whose count or bytes are not exactly equal",
        "comparison",
        _of_whole(_unequal),
    ),
    "peak_allocated_frac": Metric(
        "change of peak allocated memory relative to before",
        "comparison",
        _of_peaks(
            lambda row: (
                row.delta_allocated_bytes / row.before_allocated_bytes if row.before_allocated_bytes else None
            )
        ),
    ),
    "peak_reserved_frac": Metric(
        "change of reserved memory at the peak relative to before", "comparison", _of_peaks(_reserved_frac)
    ),
}
"""Every metric a condition may name."""
