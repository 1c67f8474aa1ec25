"""From a path to an analysis: find the files of each rank, read them, analyse them, put ranks together.

A rank whose file cannot be read does not stop the others: it becomes a warning. Large traces are analysed in
processes of their own, one rank each; the result is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from fsdp2prof.analyzers.compare.memory_peaks import compare_memory
from fsdp2prof.analyzers.memory.analysis import RankRecording, analyze_memory
from fsdp2prof.analyzers.memory.kineto_events import kineto_recordings
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.analyzers.memory.trace_join import find_peak
from fsdp2prof.analyzers.run_analysis import combine
from fsdp2prof.analyzers.run_summary import summarize_run
from fsdp2prof.analyzers.steps import Window, host_steps
from fsdp2prof.analyzers.trace.analysis import RankAnalysis, References, analyze_rank, merge
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.errors import InputError, SnapshotError, TraceError
from fsdp2prof.manifest import RankManifest, RankRecord, RunDirectory
from fsdp2prof.readers.chrome_trace import read_trace
from fsdp2prof.readers.memory_recording import read_memory
from fsdp2prof.readers.run_directory import is_run_directory, open_run
from fsdp2prof.results import MemoryAnalysis, MemoryComparison, RankMemory, RunAnalysis, TraceAnalysis
from fsdp2prof.tables import MemoryRecording, Trace
from fsdp2prof.worker_processes import map_in_processes, usable_cores
from fsdp2prof.workflows.memory_files import MemoryFile, find_memory, is_memory_file, is_trace_file
from fsdp2prof.workflows.trace_cache import read_trace_cached
from fsdp2prof.workflows.trace_files import TraceFile, find_traces

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "TraceOptions",
    "analyze_any_path",
    "analyze_memory_path",
    "analyze_run_path",
    "analyze_trace_path",
    "compare_memory_paths",
]

_BYTES_WORTH_A_PROCESS = {True: 4 << 20, False: 48 << 20}
"""Size of a trace (compressed or not) whose analysis takes clearly longer than starting a process does."""

_File = TypeVar("_File", TraceFile, MemoryFile, RankRecord)


class TraceOptions(TypedDict, total=False):
    """How traces are analysed; each has a default."""

    window: Window
    ranks: Collection[int] | None
    """None, the default, is all."""
    steps: Collection[int] | None
    """None, the default, is all."""
    workers: int | None
    """Processes; by default what the files are worth."""
    cache: bool
    """A large trace leaves its columns beside it and is not decoded again; off by default."""
    references: References
    peak_flops: Mapping[str, int]
    """Peak operations per second of one device by dtype: the references' ``peak_flops_per_s`` becomes that of
    the dtype in which most parameters are gathered."""


def analyze_trace_path(path: str | Path, **options: Unpack[TraceOptions]) -> TraceAnalysis:
    """Analyse the traces of a file, a folder or a run.

    Raises ``TraceError`` when no trace can be read, ``RunDirectoryError`` for a run that cannot, and
    ``InputError`` when none of the chosen ranks or steps is there.
    """
    found = find_traces(path)
    manifests = _manifests(path)
    files = _selected(found.files, options.get("ranks"), path)
    workers, each = _workers(files, options.get("workers"))
    jobs = [_TraceJob(file, manifests.get(file.rank), each, options) for file in files]
    outcomes = list(map_in_processes(_analyze_file, jobs, workers))
    analyses = [outcome for outcome in outcomes if isinstance(outcome, RankAnalysis)]
    unreadable = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not analyses:
        raise TraceError(unreadable[0])
    if options.get("steps") is not None and not any(analysis.rank.steps for analysis in analyses):
        raise InputError(f"{path}: none of the chosen steps is in it; see them with --steps all")
    references = _with_peak(options, analyses)
    result = merge(analyses, references, list(manifests.values()))
    return replace(result, warnings=[*found.warnings, *unreadable, *result.warnings])


def analyze_memory_path(path: str | Path, *, ranks: Collection[int] | None = None) -> MemoryAnalysis:
    """Analyse the memory recordings of a file, a folder or a run; ``ranks`` selects some of them.

    Raises ``SnapshotError`` when no recording can be read, ``RunDirectoryError`` for a run that cannot.
    """
    found = find_memory(path)
    manifests = _manifests(path)
    recordings: list[RankRecording] = []
    unreadable: list[str] = []
    for file in _selected(found.files, ranks, path):
        try:
            recordings += [(file.rank, one, manifests.get(file.rank)) for one in _recordings(file.path)]
        except (SnapshotError, TraceError) as error:
            unreadable.append(str(error))
    if not recordings:
        raise SnapshotError(unreadable[0])
    result = analyze_memory(recordings)
    joined, missing = _with_trace(path, recordings, result.ranks)
    return replace(result, ranks=joined, warnings=[*found.warnings, *unreadable, *result.warnings, *missing])


def _with_trace(
    path: str | Path, recordings: list[RankRecording], results: list[RankMemory]
) -> tuple[list[RankMemory], list[str]]:
    """Look the highest peak up in its rank's trace, if the run has one; return the ranks and warnings."""
    fullest = max(range(len(results)), key=lambda index: results[index].peak.allocated_bytes)
    rank, recording, manifest = recordings[fullest]
    traces = (
        [one.trace for one in open_run(path).ranks if one.rank == rank]
        if is_run_directory(Path(path))
        else []
    )
    if not traces or traces[0] is None:
        return results, []
    try:
        tables = rank_tables(read_trace(traces[0]), manifest)
    except TraceError as error:
        return results, [str(error)]
    looked_up = replace(results[fullest], at_peak=find_peak(prepare(recording, manifest), tables))
    return [*results[:fullest], looked_up, *results[fullest + 1 :]], []


def compare_memory_paths(
    before: str | Path, after: str | Path, *, ranks: Collection[int] | None = None
) -> MemoryComparison:
    """Compare the peaks of one rank's first device in two recordings, by default of the lowest rank of each.

    Raises the errors of :func:`analyze_memory_path`.
    """
    return compare_memory(*(_prepared(path, ranks) for path in (before, after)))


def _prepared(path: str | Path, ranks: Collection[int] | None) -> PreparedRecording:
    file = _selected(find_memory(path).files, ranks, path)[0]
    return prepare(_recordings(file.path)[0], _manifests(path).get(file.rank))


def _recordings(path: Path) -> list[MemoryRecording]:
    """Read a snapshot, a storage count, or the memory events of a trace."""
    if not is_trace_file(path):
        return read_memory(path)
    recordings = kineto_recordings(read_trace(path))
    if not recordings:
        raise SnapshotError(f"{path}: no memory events in this trace; record it with profile_memory=True")
    return recordings


def analyze_run_path(path: str | Path, **options: Unpack[TraceOptions]) -> RunAnalysis:
    """Summarize a run directory and analyse its traces and memory; what was not captured is null.

    Raises ``RunDirectoryError`` for a run that cannot be read, and ``InputError`` when none of the chosen
    ranks or steps is there.
    """
    ranks = options.get("ranks")
    run = open_run(path)
    if ranks is not None:
        _selected(run.ranks, ranks, path)
    trace: TraceAnalysis | None = None
    memory: MemoryAnalysis | None = None
    warnings: list[str] = []
    if _has(run, "trace", ranks):
        try:
            trace = analyze_trace_path(path, **options)
        except TraceError as error:
            warnings.append(str(error))
    if _has(run, "memory", ranks):
        try:
            memory = analyze_memory_path(path, ranks=ranks)
        except SnapshotError as error:
            warnings.append(str(error))
    said = set(run.messages)
    return combine(
        summarize_run(run),
        trace and replace(trace, warnings=[line for line in trace.warnings if line not in said]),
        memory and replace(memory, warnings=[line for line in memory.warnings if line not in said]),
        warnings,
    )


def analyze_any_path(
    path: str | Path, **options: Unpack[TraceOptions]
) -> RunAnalysis | TraceAnalysis | MemoryAnalysis:
    """Analyse whatever is at ``path``: a run, traces, or memory recordings.

    Raises the errors of the three.
    """
    path = Path(path)
    if is_run_directory(path) or not path.exists():
        return analyze_run_path(path, **options)
    if _holds_memory(path):
        return analyze_memory_path(path, ranks=options.get("ranks"))
    return analyze_trace_path(path, **options)


@dataclass(frozen=True, slots=True)
class _TraceJob:
    """One rank's trace to analyse, picklable."""

    file: TraceFile
    manifest: RankManifest | None
    workers: int | None
    """Processes that decode this one file; by default what it is worth."""
    options: TraceOptions


def _analyze_file(job: _TraceJob) -> RankAnalysis | str:
    """Analyse one rank; a file that cannot be read gives its error's message."""
    read = read_trace_cached if job.options.get("cache") else read_trace
    try:
        trace = read(job.file.path, rank=job.file.rank, workers=job.workers)
    except TraceError as error:
        return str(error)
    window, chosen = job.options.get("window", "steps"), job.options.get("steps")
    cut_short = _cut_short(trace, job.manifest) if window == "steps" and chosen is None else []
    if cut_short and job.manifest is not None:
        chosen = job.manifest.traced_steps
    analysis = analyze_rank(trace, job.manifest, window=window, chosen=chosen, default_rank=job.file.rank)
    rank = job.file.rank
    told = [f"rank {rank}: step {n} was cut short and is left out; --steps {n} shows it" for n in cut_short]
    return replace(analysis, warnings=[*analysis.warnings, *told])


def _cut_short(trace: Trace, manifest: RankManifest | None) -> list[int]:
    """Steps whose label is in the trace and that the recorder did not see end; none if it saw no step end."""
    if manifest is None or not manifest.traced_steps:
        return []
    return [step for step in host_steps(trace.labels).step.tolist() if step not in manifest.traced_steps]


def _with_peak(options: TraceOptions, analyses: Sequence[RankAnalysis]) -> References:
    """Return the references with the peak of the dtype in which the model computes, if it is known."""
    gathered: Counter[str] = Counter()
    for analysis in analyses:
        for row in analysis.groups:
            if row.op == "all_gather" and row.dtype is not None:
                gathered[row.dtype] += row.payload_bytes or 0
    references = options.get("references", References())
    peaks = options.get("peak_flops", {})
    known = [peaks[dtype] for dtype, _ in gathered.most_common(1) if dtype in peaks]
    return replace(references, peak_flops_per_s=known[0]) if known else references


def _workers(files: Sequence[TraceFile], given: int | None) -> tuple[int, int | None]:
    """Processes that share the ranks, and that share the decoding of one rank (None: what it is worth)."""
    if given is not None:
        return given, max(1, given // len(files))
    large = sum(f.path.stat().st_size >= _BYTES_WORTH_A_PROCESS[f.path.suffix == ".gz"] for f in files)
    if large < 2:
        return 1, None
    workers = min(large, usable_cores())
    return workers, max(1, usable_cores() // workers)


def _manifests(path: str | Path) -> dict[int, RankManifest]:
    if not is_run_directory(Path(path)):
        return {}
    return {record.rank: record.manifest for record in open_run(path).ranks if record.manifest is not None}


def _selected(files: Sequence[_File], ranks: Collection[int] | None, path: str | Path) -> Sequence[_File]:
    chosen = [file for file in files if ranks is None or file.rank in ranks]
    if not chosen:
        here = _listed({file.rank for file in files})
        raise InputError(f"{path}: none of the chosen ranks is here; it has {here}")
    return chosen


def _listed(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _holds_memory(path: Path) -> bool:
    """Whether a file is a memory recording by its name, or a folder holds such files and no traces."""
    if path.is_dir():
        return any(map(is_memory_file, path.iterdir())) and not any(path.glob("*.json*"))
    return is_memory_file(path)


def _has(run: RunDirectory, what: str, ranks: Collection[int] | None) -> bool:
    return any(getattr(r, what) is not None for r in run.ranks if ranks is None or r.rank in ranks)
