"""From a job's traces to one file for Perfetto: analyse all ranks, then write them one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any

from isal import igzip

from fsdp2prof import __version__
from fsdp2prof.errors import SnapshotError
from fsdp2prof.files import replacing
from fsdp2prof.reporters.perfetto.rank_events import rank_events
from fsdp2prof.reporters.perfetto.tracks import (
    as_json,
    collective_flows,
    finding_events,
    memory_events,
    rank_clocks,
)
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.workflows.analyze import analyze_memory, analyze_ranks
from fsdp2prof.workflows.job.job_files import JobFiles
from fsdp2prof.workflows.job.urls import shown
from fsdp2prof.workflows.ranks.one_rank import TraceOptions, stored_tables

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfettoExport:
    """Counts of the file written."""

    path: Path
    ranks: int
    events: int
    arrows: int
    """Collectives with an arrow between their ranks."""
    bytes: int
    warnings: list[str]


def export_perfetto(job: JobFiles, path: Path, **options: Unpack[TraceOptions]) -> PerfettoExport:
    """Write all ranks of a job on one clock in the Trace Event Format; gzip where the name ends in .gz.

    The ranks' tables are stored beside the file until their clocks are compared. Raises the errors of
    :func:`~fsdp2prof.workflows.analyze.analyze_trace`.
    """
    with TemporaryDirectory(dir=path.parent, prefix=".fsdp2prof-") as folder:
        return _export(job, path, Path(folder), options)


def _export(job: JobFiles, path: Path, folder: Path, options: TraceOptions) -> PerfettoExport:
    analysis, analyses = analyze_ranks(job, folder, **options)
    summaries = [one.summary for one in analyses]
    clocks = rank_clocks(summaries, analysis)
    flows = collective_flows(summaries, clocks)

    def events() -> Iterator[list[str]]:
        for rank in (one.rank.rank for one in analyses):
            yield from rank_events(stored_tables(folder, rank), rank, clocks[rank], flows.get(rank, {}))
        yield list(map(as_json, finding_events(analysis, clocks)))
        for position, memory in enumerate(_memory(job)):
            yield list(map(as_json, memory_events(memory, position)))

    warnings = shown(analysis.warnings)
    about = {
        "tool": f"fsdp2prof {__version__}",
        "verdict": analysis.verdict,
        "warnings": warnings,
    }
    with replacing(path) as temporary:
        with _opened(temporary, compressed=path.suffix == ".gz") as file:
            count = _write(file, events(), about)
        size = temporary.stat().st_size
    arrows = {point.number for points in flows.values() for point in points.values()}
    return PerfettoExport(
        path=path,
        ranks=len(analyses),
        events=count,
        arrows=len(arrows),
        bytes=size,
        warnings=warnings,
    )


def _memory(job: JobFiles) -> list[RankMemory]:
    """Return the memory recordings of the job, where it has any of their own."""
    if not job.memory.files:
        return []
    try:
        return analyze_memory(job).ranks
    except SnapshotError:
        return []


@contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[IO[bytes]]:
    if compressed:
        with (
            path.open("wb") as raw,
            igzip.IGzipFile(fileobj=raw, mode="wb", compresslevel=2, mtime=0) as file,  # type: ignore[no-untyped-call]
        ):
            yield file  # type: ignore[misc]
    else:
        with path.open("wb") as plain:
            yield plain


def _write(file: IO[bytes], events: Iterable[list[str]], about: dict[str, Any]) -> int:
    """Write the document list by list; return how many events there are."""
    file.write(f'{{"displayTimeUnit":"ns","otherData":{as_json(about)},"traceEvents":['.encode())
    count, between = 0, "\n"
    for lines in filter(None, events):
        file.write((between + ",\n".join(lines)).encode())
        count, between = count + len(lines), ",\n"
    file.write(b"\n]}\n")
    return count
