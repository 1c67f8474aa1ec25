"""Analyse the files of a job: read them, analyse them, merge ranks.

A rank whose file cannot be read does not stop the others: it becomes a warning. Large traces are analysed
in separate processes, one rank each; the result is the same. Every file is decoded once. The analyses of
traces and of memory are imported by the functions that need them, because each has its own readers and
rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2prof.by_key import grouped
from fsdp2prof.errors import Fsdp2ProfError, RunDirectoryError, SnapshotError, TraceError, UsageError
from fsdp2prof.files import counted
from fsdp2prof.worker_processes import no_garbage_collection
from fsdp2prof.workflows.job.job_files import JobFiles, require, was_tried
from fsdp2prof.workflows.job.one_job import Found, RankFile
from fsdp2prof.workflows.ranks.one_rank import (
    RankWork,
    Reduced,
    TraceOptions,
    place_of,
    read_rank_trace,
    reduce_rank,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fsdp2prof.analyzers.trace.analysis import RankAnalysis
    from fsdp2prof.analyzers.trace.rank_tables import RankTables
    from fsdp2prof.results.finding import Finding
    from fsdp2prof.results.hta import CriticalPath, IdleCauses, LaunchStatistics, TraceDiff
    from fsdp2prof.results.memory import AtPeak, MemoryAnalysis
    from fsdp2prof.results.run import RunAnalysis, RunSummary
    from fsdp2prof.results.trace import TraceAnalysis
    from fsdp2prof.results.trial import TrialResult
    from fsdp2prof.tables.trace import Trace


def analyze_trace(job: JobFiles, **options: Unpack[TraceOptions]) -> TraceAnalysis:
    """Analyse the traces of a job.

    Raises ``TraceError`` when no trace can be read, and ``InputError`` for steps that are not in them.
    """
    if job.summaries.files:
        kept = _of_summaries(job, options)
        if kept.trace is None:
            raise TraceError(f"{job.path}: its summaries hold no trace: record with --active 1 or more")
        return replace(kept.trace, warnings=[*job.messages, *kept.warnings, *kept.trace.warnings])
    result, _ = analyze_ranks(job, **options)
    return result


def analyze_ranks(
    job: JobFiles, tables_in: Path | None = None, **options: Unpack[TraceOptions]
) -> tuple[TraceAnalysis, list[RankAnalysis]]:
    """Analyse the traces of a job as :func:`analyze_trace` does; also return each rank's own analysis.

    ``tables_in`` is a folder in which the joined tables of each rank are stored.
    """
    if not job.traces.files:
        raise TraceError(job.traces.absent)
    with place_of(options) as place:
        works = [replace(work, tables_in=tables_in) for work in _works(job, job.traces.files, (), options)]
        reduced = list(counted(place.map(reduce_rank, works), works))
    result = _merged_traces(job, reduced, options)
    ranks = [one.trace.analysis for one in reduced if one.trace is not None]
    return replace(result, warnings=[*job.messages, *result.warnings]), ranks


def read_tables(job: JobFiles, **options: Unpack[TraceOptions]) -> Iterator[tuple[RankFile, RankTables]]:
    """Read the ranks of a job one after the other, each with its tables joined up; skip unreadable ones."""
    from fsdp2prof.analyzers.trace.rank_tables import rank_tables

    manifests = job.manifests
    for file in job.traces.files:
        try:
            trace = read_rank_trace(file, workers=options.get("workers"))
        except TraceError:
            continue
        window, chosen = options.get("window", "steps"), options.get("steps")
        yield file, rank_tables(trace, manifests.get(file.rank), window, chosen)


def view_trace(
    job: JobFiles, view: str, *, step: int | None = None
) -> CriticalPath | LaunchStatistics | IdleCauses:
    """Compute one of HolisticTraceAnalysis's views of the trace of a job's lowest rank.

    ``view`` is ``critical-path``, the only one that looks at a ``step``, ``launch-statistics`` or
    ``idle-causes``. Raises ``TraceError`` for a trace that cannot be read or analysed.
    """
    from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics

    trace = _lowest_trace(job)
    if view == "critical-path":
        return critical_path(trace, step)
    return launch_statistics(trace) if view == "launch-statistics" else idle_causes(trace)


def diff_traces(control: JobFiles, test: JobFiles, *, step: int | None = None) -> TraceDiff:
    """Compare a step of two jobs' lowest ranks, by default the middle step of each.

    Raises the errors of :func:`view_trace`.
    """
    from fsdp2prof.analyzers.hta.views import trace_diff

    return trace_diff(_lowest_trace(control), _lowest_trace(test), control_step=step, test_step=step)


def _lowest_trace(job: JobFiles) -> Trace:
    if not job.traces.files:
        raise TraceError(job.traces.absent)
    return read_rank_trace(job.traces.files[0])


def analyze_memory(job: JobFiles, *, cluster: str | None = None) -> MemoryAnalysis:
    """Analyse the memory recordings of a job, or the memory events in its traces if it has none.

    The highest peak is looked up in its rank's trace; ``cluster`` is that of :class:`TraceOptions`. Raises
    ``SnapshotError`` when no recording can be read.
    """
    if job.summaries.files:
        kept = _of_summaries(job, {"cluster": cluster})
        if kept.memory is None:
            raise SnapshotError(f"{job.path}: its summaries hold no memory: record without --no-memory")
        return replace(kept.memory, warnings=[*job.messages, *kept.warnings, *kept.memory.warnings])
    found = job.recordings
    if not found.files:
        raise SnapshotError(found.absent)
    options: TraceOptions = {"workers": None if cluster else 1, "cluster": cluster}
    traces = {} if found is job.traces else {file.rank: file for file in job.traces.files}
    with place_of(options) as place:
        works = _works(job, (), found.files, options)
        reduced: list[Reduced] = []
        fullest: tuple[RankWork, Reduced] | None = None
        for work, one in zip(works, counted(place.map(reduce_rank, works), works), strict=True):
            if one.peak_bytes > (fullest[1].peak_bytes if fullest else -1):
                fullest = work, one
            reduced.append(replace(one, fullest=None))
        result = _merged_memory(found, reduced)
        trace = None if fullest is None else traces.get(result.ranks[0].rank)
        if fullest is not None and trace is not None:
            work, one = fullest
            looked_up = place.look_up(replace(work, trace=trace), one.fullest)
            if isinstance(looked_up, str):
                result = replace(result, warnings=[*result.warnings, looked_up])
            else:
                result = _with_peak(result, looked_up)
    return replace(result, warnings=[*job.messages, *result.warnings])


def analyze_run(job: JobFiles, **options: Unpack[TraceOptions]) -> RunAnalysis:
    """Summarize a run and analyse its traces and memory; parts that were not captured are None.

    Without a recorder's manifests, files of both kinds also form a run. Raises ``RunDirectoryError`` for
    anything else and for a run without recordings, and the errors of :func:`analyze_trace`.
    """
    from fsdp2prof.analyzers.run_summary import with_trial
    from fsdp2prof.analyzers.sharding.recorded import mesh_of_run, shards_of_run

    analysis = replace(
        _analyze_run(job, options),
        sharding=shards_of_run(str(job.path), job.manifests),
        mesh=mesh_of_run(job.manifests),
    )
    return with_trial(analysis, _trial(job))


def _trial(job: JobFiles) -> TrialResult | None:
    """Return the trial of settings in the running job, if there was one."""
    if job.run is None or not was_tried(job.path):
        return None
    from fsdp2prof.workflows.trial import trial_of_run  # it analyses the candidates' recordings

    return trial_of_run(job.path)


def _analyze_run(job: JobFiles, options: TraceOptions) -> RunAnalysis:
    from fsdp2prof.analyzers.run_summary import combine

    summary = _summary(job)
    if job.summaries.files:
        kept = _of_summaries(job, options)
        setup = _setup(job, kept.trace)
        return combine(summary, kept.trace, kept.memory, kept.warnings, setup, _ending(job, summary))
    with place_of(options) as place:
        works = _works(job, job.traces.files, job.memory.files, options)
        reduced = list(counted(place.map(reduce_rank, works), works))
    memory: MemoryAnalysis | None = None
    trace: TraceAnalysis | None = None
    warnings: list[str] = []
    if job.memory.files:
        try:
            fullest = max(reduced, key=lambda one: one.peak_bytes)
            memory = _with_peak(_merged_memory(job.memory, reduced), fullest.at_peak)
        except SnapshotError as error:
            warnings.append(str(error))
    if job.traces.files:
        try:
            trace = _merged_traces(job, reduced, options)
        except TraceError as error:
            warnings.append(str(error))
    return combine(summary, trace, memory, warnings, _setup(job, trace), _ending(job, summary))


def _ending(job: JobFiles, run: RunSummary) -> list[str]:
    """Return why ranks of a crashed run wait or differ, as far as dumps and stacks in its folder show."""
    if job.run is None or run.state != "crashed":
        return []
    from fsdp2prof.analyzers.hang.wording import why
    from fsdp2prof.workflows.hang import analyze_hang

    try:
        return why(analyze_hang(job.path))
    except Fsdp2ProfError:
        return []


def _setup(job: JobFiles, trace: TraceAnalysis | None) -> list[Finding]:
    """Return what ``check`` finds in a run's manifests, and in the collectives of its analysed steps."""
    if job.run is None or not job.manifests:
        return []
    from fsdp2prof.analyzers.sharding.check import check_run
    from fsdp2prof.analyzers.sharding.run_evidence import own_collectives_of

    own = None if trace is None else own_collectives_of(trace)
    return check_run(job.run, job.manifests, lambda: own).findings


def analyze_any(
    job: JobFiles, **options: Unpack[TraceOptions]
) -> RunAnalysis | TraceAnalysis | MemoryAnalysis:
    """Analyse whatever a job left: a run, or traces, or memory recordings, or both.

    Raises the errors of the three.
    """
    if job.run is not None or (job.traces.files and job.memory.files):
        return analyze_run(job, **options)
    if job.memory.files:
        return analyze_memory(job, cluster=options.get("cluster"))
    return analyze_trace(job, **options)


@no_garbage_collection()
def _of_summaries(job: JobFiles, options: TraceOptions) -> RunAnalysis:
    from fsdp2prof.workflows.ranks.kept import analysis_of_summaries

    return analysis_of_summaries(job, options)


def _summary(job: JobFiles) -> RunSummary:
    from fsdp2prof.analyzers.run_summary import summarize_files, summarize_run

    if job.run is None:
        traces, memory = job.traces, job.memory
        if not traces.files or not memory.files:
            raise RunDirectoryError(
                f"{job.path}: not a run directory, nor a folder with traces and memory recordings; "
                "analyze trace and analyze memory read either"
            )
        ranks = [file.rank for file in traces.files], [file.rank for file in memory.files]
        return summarize_files(str(job.path), *ranks, traces.world_size)
    if not any(
        record.manifest or record.trace or record.memory or record.summary for record in job.run.ranks
    ):
        reason = job.messages[0] if job.messages else "record it again"
        raise RunDirectoryError(f"{job.path}: no rank left anything: {reason}")
    return summarize_run(job.run)


@no_garbage_collection()
def _merged_traces(job: JobFiles, reduced: Sequence[Reduced], options: TraceOptions) -> TraceAnalysis:
    """Merge the analyses of the ranks' traces. Raises ``TraceError`` if none can be read."""
    from fsdp2prof.analyzers.layers import numbered
    from fsdp2prof.analyzers.trace.analysis import References, merge
    from fsdp2prof.results.ledger import PART

    traces = [one.trace for one in reduced if one.trace is not None]
    unreadable = [one.trace_unreadable for one in reduced if one.trace_unreadable is not None]
    if not traces:
        raise TraceError(unreadable[0] if unreadable else job.traces.absent)
    require(job.path, "step", options.get("steps"), {step for one in traces for step in one.steps})
    analyses = [one.analysis for one in traces]
    references = options.get("references") or References()
    if references.of_accelerator and all(one.rank.device_type == "cpu" for one in analyses):
        raise UsageError(f"--hardware would have no effect: {job.path} ran on a CPU")
    result = merge(analyses, references, list(job.manifests.values()))
    programs = [(one.program, one.analysis.summary) for one in traces if one.program is not None]
    if programs and result.totals.windows and not any(one.rank.misses_records for one in analyses):
        from fsdp2prof.analyzers.whatif.what_if import with_what_ifs

        result = with_what_ifs(result, programs, references.thresholds)
    verdict = result.verdict
    if unreadable:
        ranks = numbered("rank", [one.rank.rank for one in analyses])
        verdict = [
            f"{PART}: {len(unreadable)} of {len(reduced)} traces cannot be read, see Warnings; "
            f"all times are of {ranks}.",
            *verdict,
        ]
    return replace(result, verdict=verdict, warnings=[*job.traces.warnings, *unreadable, *result.warnings])


def _merged_memory(found: Found, reduced: Sequence[Reduced]) -> MemoryAnalysis:
    """Merge the analyses of the ranks' recordings. Raises ``SnapshotError`` if none can be read."""
    from fsdp2prof.analyzers.memory.analysis import merge

    analyses = [one for rank in reduced for one in rank.memory]
    unreadable = [text for rank in reduced for text in rank.memory_unreadable]
    if not analyses:
        raise SnapshotError(unreadable[0] if unreadable else found.absent)
    result = merge(analyses)
    return replace(result, warnings=[*found.warnings, *unreadable, *result.warnings])


def _with_peak(result: MemoryAnalysis, at_peak: AtPeak | None) -> MemoryAnalysis:
    """Return the result with the trace's activity at the highest peak."""
    if at_peak is None:
        return result
    return replace(result, ranks=[replace(result.ranks[0], at_peak=at_peak), *result.ranks[1:]])


def _works(
    job: JobFiles, traces: Iterable[RankFile], memory: Iterable[RankFile], options: TraceOptions
) -> list[RankWork]:
    """Return the work of each rank, in order of rank."""
    packed = job.packed_manifests
    trace_of = {file.rank: file for file in traces}
    memory_of = grouped((file.rank, file) for file in memory)
    return [
        RankWork(
            packed=packed.get(rank),
            trace=trace_of.get(rank),
            memory=tuple(memory_of.get(rank, ())),
            options=options,
            ranks=len(trace_of),
        )
        for rank in sorted(trace_of.keys() | memory_of.keys())
    ]
