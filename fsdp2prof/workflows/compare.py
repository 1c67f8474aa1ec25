"""From two paths to what changed: runs, estimates, traces, recordings, or JSON that was saved of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import msgspec

from fsdp2prof.analyzers.compare import memory_peaks, sides
from fsdp2prof.analyzers.compare.sides import Side
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.analyzers.trace.summary import summarise
from fsdp2prof.errors import InputError, SnapshotError
from fsdp2prof.manifest import COMMUNICATION_FILE
from fsdp2prof.results import (
    COMM_ESTIMATE_SCHEMA,
    MEMORY_ESTIMATE_SCHEMA,
    MEMORY_SCHEMA,
    RUN_ANALYSIS_SCHEMA,
    TRACE_SCHEMA,
    CommEstimate,
    MemoryAnalysis,
    MemoryComparison,
    MemoryEstimate,
    Peak,
    RankMemory,
    RunAnalysis,
    RunComparison,
    TraceAnalysis,
)
from fsdp2prof.workflows.analyze import analyze_any, read_recordings
from fsdp2prof.workflows.job_files import JobFiles, open_job

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Chosen", "compare", "compare_memory", "read_side"]

_Result: TypeAlias = "RunAnalysis | TraceAnalysis | MemoryAnalysis | MemoryEstimate | CommEstimate"

_DOCUMENTS: dict[str, type[_Result]] = {
    RUN_ANALYSIS_SCHEMA: RunAnalysis,
    TRACE_SCHEMA: TraceAnalysis,
    MEMORY_SCHEMA: MemoryAnalysis,
    MEMORY_ESTIMATE_SCHEMA: MemoryEstimate,
    COMM_ESTIMATE_SCHEMA: CommEstimate,
}
_SCHEMA = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"(fsdp2prof\.[\w./]+)"')
_HEAD_BYTES = 256


class Chosen(TypedDict, total=False):
    """What of both sides is compared; by default all of the newest iteration."""

    ranks: Collection[int] | None
    steps: Collection[int] | None
    iteration: int | None
    cache: bool
    """As in :class:`~fsdp2prof.workflows.analyze.TraceOptions`."""


def compare(before: Path, after: Path, **chosen: Unpack[Chosen]) -> RunComparison:
    """Compare whatever is at two paths in all they share, analysing what is not analysed yet.

    Raises ``InputError`` (or one of its kinds) for what cannot be read, and if the two share nothing.
    """
    return sides.compare(read_side(before, **chosen), read_side(after, **chosen))


def compare_memory(before: JobFiles, after: JobFiles) -> MemoryComparison:
    """Compare the peaks of one rank's first device in two recordings: of the lowest rank of each.

    Raises ``SnapshotError`` for what cannot be read.
    """
    return memory_peaks.compare_memory(_prepared(before), _prepared(after))


def _prepared(job: JobFiles) -> PreparedRecording:
    if not job.recordings.files:
        raise SnapshotError(job.recordings.absent)
    first = job.recordings.files[0]
    return prepare(read_recordings(first.path)[0], job.manifests.get(first.rank))


def read_side(path: Path, **chosen: Unpack[Chosen]) -> Side:
    """Read whatever is at ``path``, analysing what is not analysed yet.

    Raises ``InputError`` (or one of its kinds) for what cannot be read.
    """
    ranks, steps, iteration = chosen.get("ranks"), chosen.get("steps"), chosen.get("iteration")
    document = _read_document(path)
    if document is None:
        job = open_job(path, ranks=ranks, iteration=iteration)
        result: _Result = analyze_any(job, steps=steps, cache=chosen.get("cache", False))
    elif iteration is not None:
        raise InputError(f"{path}: an analysis has no iterations: leave out --iteration")
    else:
        result = _cut_to(document, ranks, steps)
        if isinstance(result, (TraceAnalysis, MemoryAnalysis)) and not result.ranks:
            raise InputError(f"{path}: none of the chosen ranks is in it")
    if isinstance(result, RunAnalysis):
        return _of_run(path, result)
    if isinstance(result, TraceAnalysis):
        worlds = [rank.world_size for rank in result.ranks if rank.world_size is not None]
        world_size = max(worlds, default=None)
        return Side(
            path=str(path), kind="trace", trace=result, world_size=world_size, warnings=result.warnings
        )
    if isinstance(result, MemoryAnalysis):
        return Side(path=str(path), kind="memory", peaks=_fullest(result.ranks), warnings=result.warnings)
    world_size = result.mesh.world_size
    if isinstance(result, CommEstimate):
        return Side(path=str(path), kind="estimate", communication=result, world_size=world_size)
    return Side(path=str(path), kind="estimate", peaks={0: _predicted_peak(result)}, world_size=world_size)


def _of_run(path: Path, analysis: RunAnalysis) -> Side:
    memory = analysis.memory.ranks if analysis.memory else []
    predicted = _read_document(path / COMMUNICATION_FILE)
    estimate = predicted if isinstance(predicted, CommEstimate) else None
    parts = [part for part in (analysis.trace, analysis.memory, analysis) if part is not None]
    return Side(
        path=str(path),
        kind="estimate" if estimate else "run",
        trace=analysis.trace,
        communication=estimate,
        peaks=_fullest(memory),
        run=None if estimate else analysis.run,
        world_size=estimate.mesh.world_size if estimate else analysis.run.world_size,
        warnings=[*analysis.run.messages, *(line for part in parts for line in part.warnings)],
    )


def _read_document(path: Path) -> _Result | None:
    """Decode a JSON document that this package wrote; None for anything else."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = _SCHEMA.match(file.read(_HEAD_BYTES))
    if head is None:
        return None
    schema = head[1].decode()
    kind = _DOCUMENTS.get(schema)
    if kind is None:
        raise InputError(f"{path}: a {schema} document cannot be compared; known: {', '.join(_DOCUMENTS)}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a {schema} document ({error}); write it again") from error


def _cut_to(result: _Result, ranks: Collection[int] | None, steps: Collection[int] | None) -> _Result:
    """Cut an analysis that was kept to some ranks and steps; an estimate stands for all of them."""
    if isinstance(result, RunAnalysis):
        trace = result.trace and _chosen_trace(result.trace, ranks, steps)
        memory = result.memory and _chosen_memory(result.memory, ranks)
        return replace(
            result,
            trace=trace if trace and trace.ranks else None,
            memory=memory if memory and memory.ranks else None,
        )
    if isinstance(result, TraceAnalysis):
        return _chosen_trace(result, ranks, steps)
    return _chosen_memory(result, ranks) if isinstance(result, MemoryAnalysis) else result


def _chosen_trace(
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
    return summarise(replace(trace, ranks=kept, groups=groups))


def _chosen_memory(memory: MemoryAnalysis, ranks: Collection[int] | None) -> MemoryAnalysis:
    return replace(memory, ranks=[rank for rank in memory.ranks if ranks is None or rank.rank in ranks])


def _fullest(ranks: Iterable[RankMemory]) -> dict[int, Peak]:
    """Each rank's highest peak, of whichever of its devices and recordings."""
    peaks: dict[int, Peak] = {}
    for one in ranks:
        known = peaks.get(one.rank)
        if known is None or one.peak.allocated_bytes > known.allocated_bytes:
            peaks[one.rank] = one.peak
    return peaks


def _predicted_peak(estimate: MemoryEstimate) -> Peak:
    peak = estimate.peak
    return Peak(
        allocated_bytes=peak.active_bytes,
        reserved_bytes=peak.reserved_bytes,
        step=peak.step,
        phase=peak.phase,
        fqn=peak.fqn,
        categories=peak.categories,
        by_layer=peak.by_layer,
    )
