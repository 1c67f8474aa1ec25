"""Compare two paths: runs, estimates, traces, recordings, or saved JSON of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import msgspec

from fsdp2prof.analyzers.compare import memory_peaks, sides
from fsdp2prof.analyzers.compare.baseline import Side, baseline_of
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.errors import InputError, SnapshotError, UsageError
from fsdp2prof.files import replacing
from fsdp2prof.results.comparison import Baseline, MemoryComparison, RunComparison
from fsdp2prof.results.estimate import CommEstimate, MemoryEstimate, StepEstimate
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import Peak
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.run_directory import COMMUNICATION_FILE
from fsdp2prof.units import format_ns
from fsdp2prof.workflows.analyze import analyze_any
from fsdp2prof.workflows.job.job_files import JobFiles, open_job
from fsdp2prof.workflows.ranks.kept import Kept, cut, is_kept, read_baseline, read_kept
from fsdp2prof.workflows.ranks.one_rank import read_recordings

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Chosen(TypedDict, total=False):
    """Parts of both sides to compare; by default everything of the newest iteration."""

    ranks: Collection[int] | None
    steps: Collection[int] | None
    iteration: int | None
    cluster: str | None
    """As in :class:`~fsdp2prof.workflows.analyze.TraceOptions`."""


def compare(before: Path, after: Path, **chosen: Unpack[Chosen]) -> RunComparison:
    """Compare two paths in everything that they share; analyse recordings first.

    Raises ``InputError`` or a subclass for unreadable input or if the two share nothing, and
    ``UsageError`` for a selection that applies to neither side.
    """
    _refuse_cluster_for_kept(chosen, before, after)
    if (baseline := read_baseline(before)) is not None:
        return sides.compare_with_baseline(str(before), baseline, read_side(after, **chosen))
    pair = read_side(before, **chosen), read_side(after, **chosen)
    if chosen.get("steps") is not None and not any(side.trace for side in pair):
        raise UsageError(f"--steps would have no effect: neither {before} nor {after} has a trace")
    if chosen.get("ranks") is not None and all(side.kind == "estimate" for side in pair):
        raise UsageError("--ranks would have no effect: an estimate is the same for all ranks")
    return sides.compare(*pair)


def write_baseline(path: Path, run: Path, **chosen: Unpack[Chosen]) -> Baseline:
    """Write a baseline of ``run`` to ``path``, replacing an older one.

    Raises the errors of :func:`compare`, and ``InputError`` if the path is another kind of file or cannot
    be written.
    """
    if path.exists() and read_baseline(path) is None:
        raise InputError(f"{path}: exists and is not a baseline; choose another name")
    _refuse_cluster_for_kept(chosen, run)
    baseline = baseline_of(read_side(run, **chosen))
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1) + b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    return baseline


def _refuse_cluster_for_kept(chosen: Chosen, *paths: Path) -> None:
    if chosen.get("cluster") is not None and all(map(is_kept, paths)):
        names = " and ".join(map(str, paths))
        raise UsageError(f"--cluster would have no effect: {names}: analysed already, no rank is read")


def compare_memory(before: JobFiles, after: JobFiles) -> MemoryComparison:
    """Compare the peaks of one rank's first device in two recordings: of the lowest rank of each.

    Raises ``SnapshotError`` for unreadable input.
    """
    compared = memory_peaks.compare_memory(_prepared(before), _prepared(after))
    return replace(compared, before_path=str(before.path), after_path=str(after.path))


def _prepared(job: JobFiles) -> PreparedRecording:
    if not job.recordings.files:
        raise SnapshotError(job.recordings.absent)
    first = job.recordings.files[0]
    return prepare(read_recordings(first)[0], job.manifests.get(first.rank))


def read_side(path: Path, **chosen: Unpack[Chosen]) -> Side:
    """Read a saved analysis, or analyse the recordings at ``path``. Raises ``InputError`` or a subclass
    for unreadable input."""
    ranks, steps, iteration = chosen.get("ranks"), chosen.get("steps"), chosen.get("iteration")
    kept = read_kept(path)
    if kept is None:
        job = open_job(path, ranks=ranks, iteration=iteration)
        result: Kept = analyze_any(job, steps=steps, cluster=chosen.get("cluster"), what_if=False)
    elif iteration is not None:
        raise InputError(f"{path}: an analysis has no iterations: leave out --iteration")
    else:
        result = cut(kept, path, ranks, steps)
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
    if isinstance(result, StepEstimate):
        return _of_step(path, result)
    return Side(path=str(path), kind="estimate", peaks={0: _predicted_peak(result)}, world_size=world_size)


def _of_step(path: Path, estimate: StepEstimate) -> Side:
    warnings = list(estimate.trace.warnings)
    if estimate.bubble_ns:
        bubble = format_ns(estimate.bubble_ns)
        warnings.append(
            f"its step is that of one pipeline stage: {bubble} of waiting for the others come on top"
        )
    return Side(
        path=str(path),
        kind="estimate",
        trace=estimate.trace,
        world_size=estimate.mesh.world_size,
        warnings=warnings,
    )


def _of_run(path: Path, analysis: RunAnalysis) -> Side:
    memory = analysis.memory.ranks if analysis.memory else []
    predicted = read_kept(path / COMMUNICATION_FILE)
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
