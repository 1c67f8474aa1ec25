"""From the files of a job to an analysis: read them, analyse them, put ranks together.

A rank whose file cannot be read does not stop the others: it becomes a warning. Large traces are analysed in
processes of their own, one rank each; the result is the same. Every file is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2prof.analyzers.memory.analysis import RankRecording, analyze_recording
from fsdp2prof.analyzers.memory.analysis import merge as merge_memory
from fsdp2prof.analyzers.memory.kineto_events import kineto_recordings
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.analyzers.memory.trace_join import find_peak
from fsdp2prof.analyzers.run_analysis import combine
from fsdp2prof.analyzers.run_summary import summarize_files, summarize_run
from fsdp2prof.analyzers.sharding.run_layout import mesh_of_run, shards_of_run
from fsdp2prof.analyzers.steps import host_steps, trained_steps
from fsdp2prof.analyzers.trace.analysis import RankAnalysis, References, analyze_tables, merge
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.errors import RunDirectoryError, SnapshotError, TraceError, UsageError
from fsdp2prof.estimators.replay.program import RankProgram
from fsdp2prof.estimators.whatif import program_of, replay_job, with_what_ifs
from fsdp2prof.manifest import RankManifest
from fsdp2prof.progress import counted
from fsdp2prof.readers.chrome_trace import read_trace
from fsdp2prof.readers.memory_recording import read_memory
from fsdp2prof.results import AtPeak, MemoryAnalysis, RunAnalysis, RunSummary, TraceAnalysis
from fsdp2prof.tables import MemoryRecording, Trace
from fsdp2prof.worker_processes import map_in_processes, usable_cores
from fsdp2prof.workflows.choices import require
from fsdp2prof.workflows.folders import is_trace_name
from fsdp2prof.workflows.job_files import JobFiles
from fsdp2prof.workflows.one_job import RankFile
from fsdp2prof.workflows.summaries import analysis_of_summaries
from fsdp2prof.workflows.trace_cache import read_trace_cached
from fsdp2prof.workflows.trace_options import TraceOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "TraceOptions",
    "analyze_any",
    "analyze_memory",
    "analyze_ranks",
    "analyze_run",
    "analyze_trace",
    "cut_short",
    "read_recordings",
    "read_tables",
]

_BYTES_WORTH_A_PROCESS = {True: 4 << 20, False: 48 << 20}
"""Size of a trace (compressed or not) whose analysis takes clearly longer than starting a process does."""


def analyze_trace(job: JobFiles, **options: Unpack[TraceOptions]) -> TraceAnalysis:
    """Analyse the traces of a job.

    Raises ``TraceError`` when no trace can be read, and ``InputError`` for steps that are not in them.
    """
    if job.summaries.files:
        kept = analysis_of_summaries(job, options)
        if kept.trace is None:
            raise TraceError(f"{job.path}: its summaries hold no trace: record with --active 1 or more")
        return replace(kept.trace, warnings=[*job.messages, *kept.warnings, *kept.trace.warnings])
    result, _ = analyze_ranks(job, **options)
    return result


def analyze_ranks(job: JobFiles, **options: Unpack[TraceOptions]) -> tuple[TraceAnalysis, list[RankAnalysis]]:
    """Analyse the traces of a job as :func:`analyze_trace` does; return what was kept of each rank, too."""
    part = _analyze_traces(job, None, options)
    return replace(part.result, warnings=[*job.messages, *part.result.warnings]), part.ranks


def read_tables(job: JobFiles, **options: Unpack[TraceOptions]) -> Iterator[tuple[RankFile, RankTables]]:
    """Read the ranks of a job one after the other, each with its tables joined up; unreadable ones not."""
    manifests = job.manifests
    read = read_trace_cached if options.get("cache") else read_trace
    for file in job.traces.files:
        try:
            trace = read(file.path, rank=file.rank, workers=options.get("workers"))
        except TraceError:
            continue
        window, chosen = options.get("window", "steps"), options.get("steps")
        yield file, rank_tables(trace, manifests.get(file.rank), window, chosen)


def analyze_memory(job: JobFiles, *, cache: bool = False) -> MemoryAnalysis:
    """Analyse the memory recordings of a job, or else the memory events in its traces.

    The highest peak is looked up in its rank's trace; ``cache`` is that of :class:`TraceOptions`.
    Raises ``SnapshotError`` when no recording can be read.
    """
    if job.summaries.files:
        kept = analysis_of_summaries(job, {})
        if kept.memory is None:
            raise SnapshotError(f"{job.path}: its summaries hold no memory: record without --no-memory")
        return replace(kept.memory, warnings=[*job.messages, *kept.warnings, *kept.memory.warnings])
    part = _analyze_recordings(job)
    result = part.result
    trace = part.trace_of_fullest(job)
    if trace is not None:
        try:
            read = read_trace_cached if cache else read_trace
            tables = rank_tables(read(trace.path, rank=trace.rank), part.fullest.manifest)
            result = part.with_peak(find_peak(part.fullest.prepared(), tables))
        except TraceError as error:
            result = replace(result, warnings=[*result.warnings, str(error)])
    return replace(result, warnings=[*job.messages, *result.warnings])


def analyze_run(job: JobFiles, **options: Unpack[TraceOptions]) -> RunAnalysis:
    """Summarize a run and analyse its traces and memory; what was not captured is None.

    Without a recorder's manifests the files of both kinds are a run, too. Raises ``RunDirectoryError`` for
    anything else and for a run that left nothing, and the errors of :func:`analyze_trace`.
    """
    return replace(
        _analyze_run(job, options),
        sharding=shards_of_run(str(job.path), job.manifests),
        mesh=mesh_of_run(job.manifests),
    )


def _analyze_run(job: JobFiles, options: TraceOptions) -> RunAnalysis:
    summary = _summary(job)
    if job.summaries.files:
        kept = analysis_of_summaries(job, options)
        return combine(summary, kept.trace, kept.memory, kept.warnings)
    memory: _MemoryPart | None = None
    trace: TraceAnalysis | None = None
    at_peak: AtPeak | None = None
    warnings: list[str] = []
    if job.memory.files:
        try:
            memory = _analyze_recordings(job)
        except SnapshotError as error:
            warnings.append(str(error))
    if job.traces.files:
        try:
            fullest = None if memory is None else memory.fullest
            part = _analyze_traces(job, fullest, options)
            trace, at_peak = part.result, part.at_peak
        except TraceError as error:
            warnings.append(str(error))
    result = None if memory is None else memory.with_peak(at_peak)
    return combine(summary, trace, result, warnings)


def analyze_any(
    job: JobFiles, **options: Unpack[TraceOptions]
) -> RunAnalysis | TraceAnalysis | MemoryAnalysis:
    """Analyse whatever a job left: a run, or traces, or memory recordings, or both.

    Raises the errors of the three.
    """
    if job.run is not None or (job.traces.files and job.memory.files):
        return analyze_run(job, **options)
    if job.memory.files:
        return analyze_memory(job, cache=options.get("cache", False))
    return analyze_trace(job, **options)


def read_recordings(path: Path) -> list[MemoryRecording]:
    """Read a snapshot, a storage count, or the memory events of a trace. Raises ``SnapshotError``."""
    if not is_trace_name(path):
        return read_memory(path)
    recordings = kineto_recordings(read_trace(path))
    if not recordings:
        raise SnapshotError(f"{path}: no memory events in this trace; record it with profile_memory=True")
    return recordings


def _summary(job: JobFiles) -> RunSummary:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fullest:
    """The recording with the highest peak, to be looked up in its rank's trace; picklable."""

    rank: int
    recording: MemoryRecording
    manifest: RankManifest | None

    def prepared(self) -> PreparedRecording:
        return prepare(self.recording, self.manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MemoryPart:
    result: MemoryAnalysis
    fullest: _Fullest
    from_traces: bool

    def with_peak(self, at_peak: AtPeak | None) -> MemoryAnalysis:
        """Return the result with what the trace says of the highest peak."""
        if at_peak is None:
            return self.result
        looked_up = replace(self.result.ranks[0], at_peak=at_peak)
        return replace(self.result, ranks=[looked_up, *self.result.ranks[1:]])

    def trace_of_fullest(self, job: JobFiles) -> RankFile | None:
        """Return the trace of the fullest rank; none where the recording came from the trace itself."""
        if self.from_traces:
            return None
        return next((file for file in job.traces.files if file.rank == self.fullest.rank), None)


def _analyze_recordings(job: JobFiles) -> _MemoryPart:
    found = job.recordings
    if not found.files:
        raise SnapshotError(found.absent)
    manifests = job.manifests
    recordings: list[RankRecording] = []
    unreadable: list[str] = []
    for file in counted(found.files, found.files):
        try:
            manifest = manifests.get(file.rank)
            recordings += [(file.rank, one, manifest) for one in read_recordings(file.path)]
        except (SnapshotError, TraceError) as error:
            unreadable.append(str(error))
    if not recordings:
        raise SnapshotError(unreadable[0])
    analyses = [analyze_recording(*one) for one in recordings]
    # the first of the highest, as in the result
    fullest = max(range(len(analyses)), key=lambda at: analyses[at].rank.peak.allocated_bytes)
    rank, recording, manifest = recordings[fullest]
    result = merge_memory(analyses)
    return _MemoryPart(
        result=replace(result, warnings=[*found.warnings, *unreadable, *result.warnings]),
        fullest=_Fullest(rank=rank, recording=recording, manifest=manifest),
        from_traces=found is job.traces,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TraceJob:
    """One rank's trace to analyse, picklable."""

    file: RankFile
    manifest: RankManifest | None
    workers: int | None
    """Processes that decode this one file; by default what it is worth."""
    options: TraceOptions
    fullest: _Fullest | None
    """A recording of this rank whose peak is to be looked up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankOutcome:
    analysis: RankAnalysis
    steps: tuple[int, ...]
    """All that can be chosen."""
    at_peak: AtPeak | None
    program: RankProgram | None
    """For what is tried on the recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracePart:
    result: TraceAnalysis
    ranks: list[RankAnalysis]
    at_peak: AtPeak | None


def _analyze_traces(job: JobFiles, fullest: _Fullest | None, options: TraceOptions) -> _TracePart:
    """Analyse the traces, and look the highest peak of memory up in its rank's."""
    files = job.traces.files
    if not files:
        raise TraceError(job.traces.absent)
    manifests = job.manifests
    workers, each = _workers(files, options.get("workers"))
    jobs = [
        _TraceJob(
            file=file,
            manifest=manifests.get(file.rank),
            workers=each,
            options=options,
            fullest=fullest if fullest is not None and fullest.rank == file.rank else None,
        )
        for file in files
    ]
    outcomes = list(counted(map_in_processes(_analyze_file, jobs, workers), jobs))
    analysed = [outcome for outcome in outcomes if isinstance(outcome, _RankOutcome)]
    unreadable = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not analysed:
        raise TraceError(unreadable[0])
    require(job.path, "step", options.get("steps"), {step for one in analysed for step in one.steps})
    analyses = [outcome.analysis for outcome in analysed]
    references = options.get("references") or References()
    if references.of_accelerator and all(one.rank.device_type == "cpu" for one in analyses):
        raise UsageError(f"--hardware would have no effect: {job.path} ran on a CPU")
    result = merge(analyses, references, list(manifests.values()))
    programs = [(one.program, one.analysis.summary) for one in analysed if one.program is not None]
    if programs and result.totals.windows:
        result = with_what_ifs(result, replay_job(programs))
    warnings = [*job.traces.warnings, *unreadable, *result.warnings]
    at_peak = next((outcome.at_peak for outcome in analysed if outcome.at_peak is not None), None)
    return _TracePart(result=replace(result, warnings=warnings), ranks=analyses, at_peak=at_peak)


def _analyze_file(job: _TraceJob) -> _RankOutcome | str:
    """Analyse one rank; a file that cannot be read gives its error's message."""
    read = read_trace_cached if job.options.get("cache") else read_trace
    try:
        trace = read(job.file.path, rank=job.file.rank, workers=job.workers)
    except TraceError as error:
        return str(error)
    window, chosen = job.options.get("window", "steps"), job.options.get("steps")
    left_out = cut_short(trace, job.manifest) if window == "steps" and chosen is None else []
    if left_out:
        chosen = set(host_steps(trace.labels).step.tolist()) - set(left_out)
    tables = rank_tables(trace, job.manifest, window, chosen)
    analysis = analyze_tables(tables, default_rank=job.file.rank)
    rank = job.file.rank
    told = [f"rank {rank}: step {n} was cut short and is left out; --steps {n} shows it" for n in left_out]
    return _RankOutcome(
        analysis=replace(analysis, warnings=[*analysis.warnings, *told]),
        steps=tables.measurable,
        at_peak=None if job.fullest is None else find_peak(job.fullest.prepared(), tables),
        program=program_of(tables, analysis.summary) if job.options.get("what_if") else None,
    )


def cut_short(trace: Trace, manifest: RankManifest | None) -> list[int]:
    """Steps whose label is in the trace and that the recorder did not see end.

    If it saw none end, those that no forward began in: the others are all there is to show.
    """
    if manifest is None:
        return []
    worth_showing = set(manifest.traced_steps) or trained_steps(trace.labels)
    return [step for step in host_steps(trace.labels).step.tolist() if step not in worth_showing]


def _workers(files: Sequence[RankFile], given: int | None) -> tuple[int, int | None]:
    """Processes that share the ranks, and that share the decoding of one rank (None: what it is worth)."""
    if given is not None:
        return given, max(1, given // len(files))
    large = sum(f.path.stat().st_size >= _BYTES_WORTH_A_PROCESS[f.path.suffix == ".gz"] for f in files)
    if large < 2:
        return 1, None
    workers = min(large, usable_cores())
    return workers, max(1, usable_cores() // workers)
