"""Results saved as JSON: read again, and cut to some of their ranks and steps.

Checks of a saved analysis beyond its types: columns of equal length, numbers and words within range.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from fsdp2prof.analyzers.memory.analysis import merge_results as merge_memory
from fsdp2prof.analyzers.memory.analysis import summarise as summarise_memory
from fsdp2prof.analyzers.trace.analysis import References, merged_part
from fsdp2prof.analyzers.trace.analysis import merge_results as merge_traces
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.errors import InputError, RunDirectoryError, UsageError
from fsdp2prof.readers.run.documents import decode_known, newer_words
from fsdp2prof.results.comparison import BASELINE_SCHEMA, Baseline
from fsdp2prof.results.estimate import (
    COMM_ESTIMATE_SCHEMA,
    MEMORY_ESTIMATE_SCHEMA,
    STEP_ESTIMATE_SCHEMA,
    CommEstimate,
    MemoryEstimate,
    StepEstimate,
    decoding_hook,
)
from fsdp2prof.results.memory import MEMORY_SCHEMA, MemoryAnalysis
from fsdp2prof.results.run import RUN_ANALYSIS_SCHEMA, RunAnalysis, RunSummary
from fsdp2prof.results.step import StepTimeline, TimelineLane
from fsdp2prof.results.trace import TRACE_SCHEMA, TraceAnalysis
from fsdp2prof.vocabulary import LANES, PHASES
from fsdp2prof.workflows.job.job_files import JobFiles, require
from fsdp2prof.workflows.ranks.one_rank import TraceOptions

_DIGITS = re.compile(rb"\d+")
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""Numbers of so many digits may exceed 64 bits."""

_LONGEST_NS = 1 << 56
"""Two years; a lane may begin before its step."""


def check_numbers(content: bytes) -> None:
    """Raise ``ValueError`` for an integer of more than 64 bits: sums and means of it have no end."""
    if not any(len(number) > len(_LONG) or int(number) >> 63 for number in _long_numbers(content)):
        return
    left: list[Any] = [msgspec.json.decode(content)]
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) >> 63:
            raise ValueError("a number beyond 64 bits")
        if isinstance(value, (dict, list)):
            left.extend(value.values() if isinstance(value, dict) else value)


def _long_numbers(content: bytes) -> Iterator[bytes]:
    """Yield runs of many digits, in texts too; to search for zeros is ten times as fast as for digits."""
    zeros = content.translate(_AS_ZEROS)
    at = zeros.find(_LONG)
    while at >= 0 and (found := _DIGITS.match(content, at)):
        yield found[0]
        at = zeros.find(_LONG, found.end())


def check_timeline(timeline: StepTimeline) -> None:
    """Raise ``ValueError`` with the first value that no analysis writes."""
    if len(timeline.slice_phases) != len(timeline.compute_frac):
        raise ValueError("a timeline whose slices and phases differ in number")
    _within(timeline.duration_ns, timeline.resolution_ns)
    for rank in timeline.ranks:
        _within(rank.start_ns, rank.duration_ns)
        for stall in rank.stalls:
            _within(stall.start_ns, stall.end_ns, stall.needed_ns, stall.stall_ns)
        for lane in rank.lanes:
            _check_lane(lane, timeline)


def _check_lane(lane: TimelineLane, timeline: StepTimeline) -> None:
    spans = len(lane.start_ns)
    whole = (lane.duration_ns, lane.busy_ns, lane.count, lane.layer, lane.phase, lane.name)
    optional = (lane.payload_bytes, lane.peer_wait_ns)
    if any(len(column) != spans for column in whole) or any(len(one) not in (0, spans) for one in optional):
        raise ValueError("a timeline lane with columns of different lengths")
    _within(*lane.start_ns, *lane.duration_ns, *lane.busy_ns, *lane.count)
    _within(*(value for column in optional for value in column if value is not None))
    named = ((lane.layer, timeline.layers), (lane.phase, timeline.phases), (lane.name, timeline.names))
    for column, names in named:
        if any(not 0 <= index < len(names) for index in column):
            raise ValueError("a timeline lane with an index beyond its names")


def _within(*values: int) -> None:
    if any(abs(value) > _LONGEST_NS for value in values):
        raise ValueError("a timeline with an impossible time")


_NOT_REPLAYED = (
    "Summaries hold no trace to replay with other settings: record again without --summary to see what each "
    "gains."
)

Kept: TypeAlias = (
    "RunAnalysis | TraceAnalysis | MemoryAnalysis | MemoryEstimate | CommEstimate | StepEstimate"
)
"""Results that can be compared."""

_DOCUMENTS: dict[str, type[Kept]] = {
    RUN_ANALYSIS_SCHEMA: RunAnalysis,
    TRACE_SCHEMA: TraceAnalysis,
    MEMORY_SCHEMA: MemoryAnalysis,
    MEMORY_ESTIMATE_SCHEMA: MemoryEstimate,
    COMM_ESTIMATE_SCHEMA: CommEstimate,
    STEP_ESTIMATE_SCHEMA: StepEstimate,
}
_SCHEMA = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"(fsdp2prof\.[\w./]+)"')
_HEAD_BYTES = 256
_MOST_RANKS = 1 << 17
"""As a run directory may have; they are listed one by one."""


def is_kept(path: Path) -> bool:
    """Whether a path holds a JSON document that this package wrote, not recordings."""
    return _schema_of(path) is not None


def read_kept(path: Path) -> Kept | None:
    """Decode a JSON document of this package; None for anything else.

    Raises ``InputError`` for a damaged document or one that cannot be compared.
    """
    schema = _schema_of(path)
    if schema is None:
        return None
    kind = _DOCUMENTS.get(schema)
    if kind is None and schema == BASELINE_SCHEMA:
        raise InputError(f"{path}: a baseline comes first: fsdp2prof compare {path} RUN")
    if kind is None:
        raise InputError(f"{path}: a document of {schema} cannot be compared; known: {', '.join(_DOCUMENTS)}")
    try:
        content = path.read_bytes()
        check_numbers(content)
        result, _, newer = decode_known(content, kind, decoding_hook)
        result = _checked(result if newer is None else _told(result, newer))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not a {schema} document ({error}); write it again") from error
    if focus := next((part.focus for part in _parts(result) if part is not None and part.focus), None):
        raise InputError(f"{path}: holds only {focus}: write it again without --layer, --rank and --step")
    return result


def _told(result: Kept, warning: str) -> Kept:
    """Return a result with an added warning."""
    if isinstance(result, (TraceAnalysis, MemoryAnalysis)):
        return replace(result, warnings=[*result.warnings, warning])
    if isinstance(result, RunAnalysis):
        return replace(result, run=replace(result.run, messages=[*result.run.messages, warning]))
    return replace(result, assumptions=[*result.assumptions, warning])


def _checked(result: Kept) -> Kept:
    """Return a result whose timeline can be drawn; raise ``ValueError`` for one that no analysis writes."""
    trace, _ = _parts(result)
    timeline = None if trace is None else trace.timeline
    if trace is None or timeline is None:
        return result
    newer = {*timeline.phases, *timeline.slice_phases} - PHASES.keys()
    newer |= {lane.lane for rank in timeline.ranks for lane in rank.lanes} - LANES.keys()
    newer |= {stall.lane for rank in timeline.ranks for stall in rank.stalls} - LANES.keys()
    if not newer:
        check_timeline(timeline)
        return result
    warning = newer_words(f"{word!r} in a timeline" for word in newer)
    trace = replace(trace, timeline=None, warnings=[*trace.warnings, warning])
    return replace(result, trace=trace) if isinstance(result, (RunAnalysis, StepEstimate)) else trace


def read_baseline(path: Path) -> Baseline | None:
    """Decode a baseline; None for anything else. Raises ``InputError`` for a damaged one."""
    if _schema_of(path) != BASELINE_SCHEMA:
        return None
    try:
        content = path.read_bytes()
        check_numbers(content)
        baseline, *_ = decode_known(content, Baseline)
        if baseline.windows < 1 and (baseline.step_ns is not None or baseline.collectives is not None):
            raise ValueError("it covers no steps")
        if not 0 <= baseline.traced_ranks <= _MOST_RANKS:
            raise ValueError("it has an impossible number of ranks")
        return baseline
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not a baseline ({error}); write it again with --write-baseline") from error


def _schema_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = _SCHEMA.match(file.read(_HEAD_BYTES))
    return None if head is None else head[1].decode()


def cut(result: Kept, path: Path, ranks: Collection[int] | None, steps: Collection[int] | None) -> Kept:
    """Cut an analysis to some ranks and steps; an estimate is the same for all.

    Raises ``InputError`` for those it does not have.
    """
    if isinstance(result, (MemoryEstimate, CommEstimate, StepEstimate)):
        return result
    trace, memory = _parts(result)
    traced = [] if trace is None else trace.ranks
    recorded = [] if memory is None else memory.ranks
    require(path, "rank", ranks, {rank.rank for rank in traced} | {rank.rank for rank in recorded})
    if traced:
        require(path, "step", steps, {step.step for rank in traced for step in rank.steps})
    trace = trace and _cut_trace(trace, ranks, steps)
    memory = memory and _cut_memory(memory, ranks)
    if isinstance(result, RunAnalysis):
        return replace(
            result,
            trace=trace if trace and trace.ranks else None,
            memory=memory if memory and memory.ranks else None,
        )
    return trace or memory or result


def _parts(result: Kept) -> tuple[TraceAnalysis | None, MemoryAnalysis | None]:
    if isinstance(result, RunAnalysis):
        return result.trace, result.memory
    trace = result.trace if isinstance(result, StepEstimate) else result
    return (
        trace if isinstance(trace, TraceAnalysis) else None,
        result if isinstance(result, MemoryAnalysis) else None,
    )


def _cut_trace(
    trace: TraceAnalysis, ranks: Collection[int] | None, steps: Collection[int] | None
) -> TraceAnalysis:
    kept = [
        replace(rank, steps=[one for one in rank.steps if steps is None or one.step in steps])
        for rank in trace.ranks
        if ranks is None or rank.rank in ranks
    ]
    groups = [
        row
        for row in trace.groups
        if (ranks is None or row.rank in ranks) and (steps is None or row.step in steps)
    ]
    return of_part(replace(trace, ranks=kept, groups=groups))


def _cut_memory(memory: MemoryAnalysis, ranks: Collection[int] | None) -> MemoryAnalysis:
    kept = [rank for rank in memory.ranks if ranks is None or rank.rank in ranks]
    return summarise_memory(replace(memory, ranks=kept))


def analysis_of_summaries(job: JobFiles, options: TraceOptions) -> RunAnalysis:
    """Put the summaries of a run's ranks together; the run itself is that of the lowest rank.

    Raises ``UsageError`` for options that need the traces, ``RunDirectoryError`` if no summary can be read.
    """
    references = options.get("references") or References()
    if options.get("steps") is not None or options.get("window", "steps") != "steps":
        raise UsageError(f"{job.path}: recorded as summaries: --steps and --window need the traces")
    if references.of_accelerator or references.tokens_per_step is not None:
        raise UsageError(f"{job.path}: recorded as summaries: --hardware and --tokens need the traces")
    if options.get("cluster") is not None:
        raise UsageError(f"{job.path}: recorded as summaries: --cluster would have no effect")
    runs: list[RunSummary] = []
    traces: list[TraceAnalysis] = []
    memories: list[MemoryAnalysis] = []
    unreadable: list[str] = []
    for file in job.summaries.files:
        try:
            one = _read(file.path)
        except InputError as error:
            unreadable.append(str(error))
            continue
        runs = runs or [one.run]
        if one.trace is not None and one.trace.ranks:
            traces.append(merged_part(one.trace) if traces else one.trace)
        if one.memory is not None and one.memory.ranks:
            memories.append(one.memory)
    if not runs:
        raise RunDirectoryError(unreadable[0])
    manifests = list(job.manifests.values())
    trace = merge_traces(traces, manifests, references.thresholds) if traces else None
    return RunAnalysis(
        run=runs[0],
        trace=None if trace is None else replace(trace, advice=[*trace.advice, _NOT_REPLAYED]),
        memory=merge_memory(memories) if memories else None,
        warnings=[*job.summaries.warnings, *unreadable],
    )


def _read(path: Path) -> RunAnalysis:
    result = read_kept(path)
    if not isinstance(result, RunAnalysis):
        raise InputError(f"{path}: not a rank's summary; record the run again")
    return result
