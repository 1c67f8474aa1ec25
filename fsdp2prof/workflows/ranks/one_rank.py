"""Reduce one rank's files to an analysis that is small, picklable and ready to merge with other ranks'.

Nothing else reads a rank's events. This process, a helper process and a cluster's worker all call the same
function, and only its result is sent. The analysis of memory is imported only if there is a recording.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from isal import isal_zlib

from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds
from fsdp2prof.analyzers.trace.analysis import References
from fsdp2prof.errors import InputError, SnapshotError, TraceError, UsageError
from fsdp2prof.worker_processes import map_in_processes, no_garbage_collection, usable_cores
from fsdp2prof.workflows.job.folders import is_trace_name
from fsdp2prof.workflows.job.job_files import at_hand, seen_from_anywhere
from fsdp2prof.workflows.job.one_job import RankFile

if TYPE_CHECKING:
    from fsdp2prof.analyzers.memory.analysis import RecordingAnalysis
    from fsdp2prof.analyzers.memory.prepared import PreparedRecording
    from fsdp2prof.analyzers.steps import Window
    from fsdp2prof.analyzers.trace.analysis import RankAnalysis, References
    from fsdp2prof.analyzers.trace.rank_tables import RankTables
    from fsdp2prof.analyzers.whatif.program import RankProgram
    from fsdp2prof.estimators.config.hardware import HardwareSpec
    from fsdp2prof.manifest import RankManifest
    from fsdp2prof.results.memory import AtPeak
    from fsdp2prof.run_directory import PackedManifest
    from fsdp2prof.tables.allocations import MemoryRecording
    from fsdp2prof.tables.trace import Trace
    from fsdp2prof.workflows.ranks.cluster import Cluster


REPLAYED_RANKS = 64
"""Number of ranks above which a job is replayed only on request: every rank's program takes memory and
time."""


class TraceOptions(TypedDict, total=False):
    """How the traces of a job are analysed; each has a default."""

    window: Window
    steps: Collection[int] | None
    """None, the default, is all."""
    workers: int | None
    """Number of processes; by default chosen by file size."""
    cluster: str | None
    """Where each rank is read: ``local`` or a Dask scheduler's address; by default here."""
    references: References
    what_if: bool
    """Whether to replay changes that would make a step faster; by default in jobs of at most
    ``REPLAYED_RANKS`` ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """One rank's files to reduce, picklable."""

    packed: PackedManifest | None
    trace: RankFile | None = None
    memory: tuple[RankFile, ...] = ()
    options: TraceOptions = field(default_factory=TraceOptions)
    ranks: int = 1
    """Of the job, whose traces are read."""
    workers: int | None = None
    """Number of processes that decode one file; by default chosen by its size."""
    keep_fullest: bool = False
    """Whether to also return the recording with the highest peak, if it stays in this process."""
    tables_in: Path | None = None
    """Folder on this machine in which the joined tables are stored for :func:`stored_tables`."""

    @property
    def manifest(self) -> RankManifest | None:
        """The rank's manifest."""
        return None if self.packed is None else self.packed.manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedTrace:
    """The analysis of a rank's trace."""

    analysis: RankAnalysis
    steps: tuple[int, ...]
    """Numbers of the steps that can be chosen."""
    program: RankProgram | None
    """To replay the recording with changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """The analysis of a rank."""

    trace: ReducedTrace | None
    trace_unreadable: str | None
    """Why its trace could not be read."""
    memory: list[RecordingAnalysis]
    memory_unreadable: list[str]
    at_peak: AtPeak | None
    """The state of the step at the highest of this rank's peaks."""
    fullest: PreparedRecording | None = None

    @property
    def peak_bytes(self) -> int:
        """The highest of this rank's peaks; -1 without any."""
        return max((one.rank.peak.allocated_bytes for one in self.memory), default=-1)


@no_garbage_collection()
def reduce_rank(work: RankWork) -> Reduced:
    """Read a rank's files and analyse them as far as a merge needs; keep the reasons of unreadable ones."""
    memory: list[RecordingAnalysis] = []
    unreadable: list[str] = []
    fullest: PreparedRecording | None = None
    highest = -1
    for rank, view in _views(work, unreadable):
        from fsdp2prof.analyzers.memory.analysis import analyze_prepared

        analysis = analyze_prepared(rank, view, work.manifest)
        memory.append(analysis)
        if analysis.rank.peak.allocated_bytes > highest:
            highest, fullest = analysis.rank.peak.allocated_bytes, view
    trace: ReducedTrace | None = None
    trace_unreadable: str | None = None
    at_peak: AtPeak | None = None
    if work.trace is not None:
        try:
            trace, tables = _reduce_trace(work, work.trace)
            if fullest is not None:
                from fsdp2prof.analyzers.memory.kineto_events import find_peak

                at_peak = find_peak(fullest, tables)
        except TraceError as error:
            trace_unreadable = str(error)
    return Reduced(
        trace=trace,
        trace_unreadable=trace_unreadable,
        memory=memory,
        memory_unreadable=unreadable,
        at_peak=at_peak,
        fullest=fullest if work.keep_fullest else None,
    )


def peak_in_trace(work: RankWork, fullest: PreparedRecording | None = None) -> AtPeak | None:
    """Look up the highest of a rank's peaks in its trace, which must exist.

    ``fullest`` is the recording, if it is already loaded. Raises ``TraceError``.
    """
    from fsdp2prof.analyzers.memory.kineto_events import find_peak
    from fsdp2prof.analyzers.trace.rank_tables import rank_tables

    assert work.trace is not None
    if fullest is None:
        views = [view for _, view in _views(work, [])]
        # the first of the highest, as in the result
        fullest = max(views, key=lambda view: int(view.totals[view.peak_order]))
    return find_peak(fullest, rank_tables(read_rank_trace(work.trace, workers=work.workers), work.manifest))


def read_recordings(file: RankFile) -> list[MemoryRecording]:
    """Read a snapshot, a storage count, or the memory events of a trace.

    Raises ``SnapshotError``, and ``TraceError`` for such a trace.
    """
    if is_trace_name(file.path):
        from fsdp2prof.analyzers.memory.kineto_events import kineto_recordings

        recordings = kineto_recordings(read_rank_trace(file))
        if not recordings:
            raise SnapshotError(
                f"{file.path}: no memory events in this trace; record it with profile_memory=True"
            )
        return recordings
    from fsdp2prof.readers.memory.recording import read_memory

    with _at_hand(file, SnapshotError) as local:
        try:
            return read_memory(local)
        except SnapshotError as error:
            raise SnapshotError(_named(str(error), local, file)) from None


def cut_short(trace: Trace, manifest: RankManifest | None) -> list[int]:
    """Steps with a label in the trace that the recorder did not see end.

    If it saw none end, those in which no forward began: the others are all there is to show. None if no
    label decides, for example with replayed graphs.
    """
    if manifest is None:
        return []
    from fsdp2prof.analyzers.steps import host_steps, trained_steps

    worth_showing = set(manifest.traced_steps) or trained_steps(trace.labels)
    steps = host_steps(trace.labels).step.tolist() if worth_showing else []
    return [step for step in steps if step not in worth_showing]


def _views(work: RankWork, unreadable: list[str]) -> Iterator[tuple[int, PreparedRecording]]:
    """Yield the rank's recordings, one device after the other; append the reasons of unreadable files."""
    for file in work.memory:
        try:
            recordings = read_recordings(file)
        except (SnapshotError, TraceError) as error:
            unreadable.append(str(error))
            continue
        from fsdp2prof.analyzers.memory.prepared import prepare

        for recording in recordings:
            yield file.rank, prepare(recording, work.manifest)


def _reduce_trace(work: RankWork, file: RankFile) -> tuple[ReducedTrace, RankTables]:
    from fsdp2prof.analyzers.trace.analysis import analyze_tables
    from fsdp2prof.analyzers.trace.rank_tables import rank_tables

    trace = read_rank_trace(file, workers=work.workers)
    window, chosen = work.options.get("window", "steps"), work.options.get("steps")
    left_out = cut_short(trace, work.manifest) if window == "steps" and chosen is None else []
    tables = rank_tables(trace, work.manifest, window, chosen, left_out)
    analysis = analyze_tables(tables, default_rank=file.rank, ranks=work.ranks)
    told = [
        f"rank {file.rank}: step {n} was cut short and is left out; --steps {n} shows it" for n in left_out
    ]
    whose = trace.rank if work.manifest is None or work.manifest.rank == trace.rank else None
    if whose is not None and whose != file.rank:
        told.append(f"{trace.source}: is a trace of rank {whose}, read as that of rank {file.rank}")
    program: RankProgram | None = None
    if work.options.get("what_if", work.ranks <= REPLAYED_RANKS):
        from fsdp2prof.analyzers.whatif.recorded import program_of

        program = program_of(tables, analysis.summary)
    reduced = ReducedTrace(
        analysis=replace(analysis, warnings=[*analysis.warnings, *told]),
        steps=tables.measurable,
        program=program,
    )
    if work.tables_in is not None:
        _stored(work.tables_in, analysis.rank.rank).write_bytes(
            isal_zlib.compress(pickle.dumps(tables, pickle.HIGHEST_PROTOCOL), 0)
        )
    return reduced, tables


def stored_tables(folder: Path, rank: int) -> RankTables:
    """Return the tables that a rank's reduction stored: a tenth of the time of reading its trace again."""
    tables: RankTables = pickle.loads(isal_zlib.decompress(_stored(folder, rank).read_bytes()))
    return tables


def _stored(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.tables"


def read_rank_trace(file: RankFile, *, workers: int | None = None) -> Trace:
    """Read a rank's trace from its location, under the user's name for it.

    ``workers`` are those of :class:`TraceOptions`. Raises ``TraceError``.
    """
    from fsdp2prof.readers.trace.chrome_trace import read_trace

    with _at_hand(file, TraceError) as local:
        try:
            trace = read_trace(local, rank=file.rank, workers=workers)
        except TraceError as error:
            raise TraceError(_named(str(error), local, file)) from None
    warnings = tuple(_named(text, local, file) for text in trace.warnings)
    return replace(trace, source=str(file.path), warnings=warnings)


@contextmanager
def _at_hand(file: RankFile, kind: type[InputError]) -> Iterator[Path]:
    """Yield a local path; raise an error of the file's own kind if it cannot be fetched."""
    with ExitStack() as stack:
        try:
            local = stack.enter_context(at_hand(file))
        except InputError as error:
            raise kind(str(error)) from None
        yield local


def _named(text: str, local: Path, file: RankFile) -> str:
    return text.replace(str(local), str(file.path))


_BYTES_WORTH_A_PROCESS = {True: 4 << 20, False: 48 << 20}
"""Size of a trace (compressed or not) whose analysis takes clearly longer than the start of a process."""


@contextmanager
def place_of(options: TraceOptions) -> Iterator[_Here | _OnCluster]:
    """Give the place that the options ask for. Raises ``ClusterError`` for a cluster that cannot be used."""
    address, workers = options.get("cluster"), options.get("workers")
    if address is None:
        yield _Here(workers)
        return
    from fsdp2prof.workflows.ranks.cluster import open_cluster

    with open_cluster(address, workers) as cluster:
        yield _OnCluster(cluster)


class _Here:
    """This machine."""

    def __init__(self, workers: int | None) -> None:
        self._given = workers

    def map(self, reduce: Callable[[RankWork], Reduced], works: Sequence[RankWork]) -> Iterator[Reduced]:
        workers, each = _workers([work.trace for work in works if work.trace], self._given)
        jobs = [
            replace(work, workers=each, keep_fullest=workers == 1 and work.trace is None) for work in works
        ]
        if workers > 1:
            _import_once(works)
        return map_in_processes(reduce, jobs, workers)

    def look_up(self, work: RankWork, fullest: PreparedRecording | None) -> AtPeak | str | None:
        return _peak_or_reason(work, fullest)


class _OnCluster:
    """A cluster: only names of files go there, and only analyses come back."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def map(self, reduce: Callable[[RankWork], Reduced], works: Sequence[RankWork]) -> Iterator[Reduced]:
        jobs = [_abroad(work) for work in works]
        self._cluster.require_files([file.location or "" for work in jobs[:1] for file in _files(work)])
        for work, outcome in zip(works, self._cluster.map(reduce, jobs), strict=True):
            yield outcome if isinstance(outcome, Reduced) else _not_reduced(work, str(outcome))

    def look_up(self, work: RankWork, fullest: PreparedRecording | None) -> AtPeak | str | None:
        outcome = next(self._cluster.map(_peak_or_reason, [_abroad(work)]))
        return str(outcome) if isinstance(outcome, Exception) else outcome


def _import_once(works: Sequence[RankWork]) -> None:
    """Import the analysis here: the processes that are forked from this one have it then."""
    if any(work.trace for work in works):
        import_module("fsdp2prof.analyzers.trace.analysis")
    if any(work.memory for work in works):
        import_module("fsdp2prof.analyzers.memory.analysis")
        import_module("fsdp2prof.readers.memory.recording")


def _peak_or_reason(work: RankWork, fullest: PreparedRecording | None = None) -> AtPeak | str | None:
    try:
        return peak_in_trace(work, fullest)
    except TraceError as error:
        return str(error)


def _abroad(work: RankWork) -> RankWork:
    """Return the work with absolute locations of its files, one process per rank."""
    return replace(
        work,
        trace=None if work.trace is None else seen_from_anywhere(work.trace),
        memory=tuple(seen_from_anywhere(file) for file in work.memory),
        workers=1,
    )


def _files(work: RankWork) -> list[RankFile]:
    return [*([work.trace] if work.trace else []), *work.memory]


def _not_reduced(work: RankWork, reason: str) -> Reduced:
    return Reduced(
        trace=None,
        trace_unreadable=None if work.trace is None else f"{work.trace.path}: {reason}",
        memory=[],
        memory_unreadable=[f"{file.path}: {reason}" for file in work.memory],
        at_peak=None,
    )


def _workers(files: Sequence[RankFile], given: int | None) -> tuple[int, int | None]:
    """Processes that share the ranks, and processes that decode one rank (None: chosen by size)."""
    if given is not None:
        return given, max(1, given // max(1, len(files)))
    large = sum(
        file.path.stat().st_size >= _BYTES_WORTH_A_PROCESS[file.path.suffix == ".gz"] for file in files
    )
    if large < 2:
        return 1, None
    workers = min(large, usable_cores())
    return workers, max(1, usable_cores() // workers)


def references(
    *,
    tokens_per_step: int | None = None,
    hardware: str | HardwareSpec | None = None,
    thresholds: FindingThresholds | None = None,
) -> References:
    """Return the figures that the speed of a step and of its collectives is compared with.

    ``tokens_per_step`` is the sum over all ranks; ``hardware`` the accelerator (``h100-sxm``), for MFU and
    bandwidth relative to its peak; ``thresholds`` decide when a finding is reported. Raises ``ModelError``
    for unknown hardware, and ``UsageError`` for hardware given only by its memory.
    """
    device = _accelerator(hardware) if isinstance(hardware, str) else hardware
    if device is not None and not device.flops:
        raise UsageError(f"hardware {device.name} is a size of memory: name an accelerator, such as h100-sxm")
    return References(
        tokens_per_step=tokens_per_step,
        peak_flops_per_s=device.flops if device else {},
        peak_memory_bytes_per_s=device.memory_bytes_per_s if device else None,
        peak_bus_bytes_per_s=device.link_bytes_per_s if device else None,
        thresholds=thresholds or FindingThresholds(),
    )


def _accelerator(hardware: str) -> HardwareSpec:
    from fsdp2prof.estimators.config.hardware import HardwareSpec

    return HardwareSpec.parse(hardware)
