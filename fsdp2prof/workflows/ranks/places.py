"""Where ranks are reduced: in this process, in processes beside it, or on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from fsdp2prof.errors import TraceError
from fsdp2prof.worker_processes import map_in_processes, usable_cores
from fsdp2prof.workflows.job.job_files import seen_from_anywhere
from fsdp2prof.workflows.job.one_job import RankFile
from fsdp2prof.workflows.ranks.one_rank import RankWork, Reduced, TraceOptions, peak_in_trace

if TYPE_CHECKING:
    from fsdp2prof.analyzers.memory.prepared import PreparedRecording
    from fsdp2prof.results.memory import AtPeak
    from fsdp2prof.workflows.ranks.cluster import Cluster

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
    """Return the work with absolute locations of its files, one process a rank."""
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
    """Processes that share the ranks, and that share the decoding of one rank (None: what it is worth)."""
    if given is not None:
        return given, max(1, given // max(1, len(files)))
    large = sum(
        file.path.stat().st_size >= _BYTES_WORTH_A_PROCESS[file.path.suffix == ".gz"] for file in files
    )
    if large < 2:
        return 1, None
    workers = min(large, usable_cores())
    return workers, max(1, usable_cores() // workers)
