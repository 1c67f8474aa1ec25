"""The files of one job, found and opened once: the input of every workflow.

A path is a run directory, one file, or a folder of files (:mod:`fsdp2prof.workflows.job.folders`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile, ZipFile

from fsdp2prof.errors import InputError
from fsdp2prof.readers.trace.chrome_trace import peek_rank, processes_in
from fsdp2prof.run_directory import OOM_SNAPSHOT_FILE, PACKED, TRIAL_FILE
from fsdp2prof.workflows.job.folders import (
    find_memory_files,
    find_traces,
    is_memory_name,
    is_trace_name,
    refuse_special,
)
from fsdp2prof.workflows.job.one_job import Found, RankFile, read_name, same_files
from fsdp2prof.workflows.job.urls import is_url, url_of

if TYPE_CHECKING:
    from fsdp2prof.manifest import RankManifest
    from fsdp2prof.run_directory import PackedManifest, RunDirectory


@contextmanager
def at_hand(file: RankFile) -> Iterator[Path]:
    """Give a local path to read a file from; one at a URL is copied for that time. Raises ``InputError``."""
    if file.location is not None and is_url(file.location):
        from fsdp2prof.workflows.job.remote import fetched

        with fetched(file.location) as copy:
            yield copy
    else:
        yield Path(file.location or file.path)


def located(file: RankFile) -> RankFile:
    """Return the file with the URL that its path represents, if any."""
    return replace(file, location=url_of(file.path))


def seen_from_anywhere(file: RankFile) -> RankFile:
    """Return the file with a location that a process in another folder can read."""
    return file if file.location else replace(file, location=str(file.path.absolute()))


_SHOWN = 16


def require(path: Path, what: str, chosen: Collection[int] | None, here: Collection[int]) -> None:
    """Raise ``InputError`` if not every chosen rank or step (``what``) is at a path; None chooses none."""
    absent = set(chosen or ()) - set(here)
    if absent:
        are = "is" if len(absent) == 1 else "are"
        has = listed(what, here) if here else f"no {what}"
        raise InputError(f"{path}: {listed(what, absent)} {are} not here; it has {has}")


def listed(what: str, numbers: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1, 2``."""
    shown = ", ".join(map(str, sorted(numbers)[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"{what} {shown}" if len(numbers) == 1 else f"{what}s {shown}"


_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"
"""How a snapshot begins, and how a storage count does."""


def open_job(
    path: str | Path, *, ranks: Collection[int] | None = None, iteration: int | None = None
) -> JobFiles:
    """Open the files at a path; ``ranks`` selects some of them.

    ``iteration`` selects one of several recordings of a run, or profiling cycles in a folder; the default
    is the newest, or the script's own settings if others were tried. Raises ``InputError`` for missing
    input, ``RunDirectoryError`` for a run that cannot be read.
    """
    root = Path(path)
    refuse_special(root)
    run = _run_at(root, iteration) if root.is_dir() else None
    if iteration is not None and (root.is_file() or (run is not None and not run.recordings)):
        what = "a run directory with one recording" if run is not None else "one file"
        raise InputError(f"{root}: is {what} and has no iterations: leave out --iteration")
    return JobFiles(root, run, ranks, iteration)


def _run_at(root: Path, iteration: int | None) -> RunDirectory | None:
    """Open a run directory, and of several recordings in it one; None for another folder."""
    from fsdp2prof.readers.run.directory import is_run_directory, open_recording, open_run

    if not is_run_directory(root):
        return None
    run = open_run(root)
    if not run.recordings:
        return run
    newest = run.recordings[0 if was_tried(root) else -1]
    return open_recording(run, newest if iteration is None else iteration)


def was_tried(run: Path) -> bool:
    """Whether other settings were tried in a run: its first recording is then of the script's own."""
    return any(run.glob(f"rank-*/{TRIAL_FILE}"))


class JobFiles:
    """Files of one job, by kind and rank; each kind is searched once, on first use."""

    def __init__(
        self, path: Path, run: RunDirectory | None, ranks: Collection[int] | None, iteration: int | None
    ) -> None:
        self.path = path
        self.run = run
        """The run; None without manifests."""
        self._ranks = ranks
        self._iteration = iteration

    @cached_property
    def traces(self) -> Found:
        """Kineto traces; raises ``InputError`` for those of several jobs, and for a rank not there."""
        found = self._traces()
        return replace(found, warnings=(*found.warnings, *same_files(found.files)))

    def _traces(self) -> Found:
        if self.run is not None:
            return self._chosen(_traces_of_run(self.run))
        if self.path.is_dir():
            return self._chosen(find_traces(self.path, self._iteration))
        if _is_memory_file(self.path):
            return Found(absent=f"{self.path}: a memory recording, not a trace")
        if (processes := processes_in(self.path)) > 1:
            return self._chosen(_processes_of_report(self.path, processes))
        rank, world_size = peek_rank(self.path)
        return self._chosen(self._one_file(rank, world_size))

    @cached_property
    def memory(self) -> Found:
        """Memory snapshots and storage counts, several of a rank perhaps; raises as :attr:`traces`."""
        if self.run is not None:
            return self._chosen(_recordings_of_run(self.run))
        if self.path.is_dir():
            return self._chosen(find_memory_files(self.path, self._iteration))
        if not _is_memory_file(self.path):
            return Found(absent=f"{self.path}: a trace, not a memory recording")
        return self._chosen(self._one_file())

    @cached_property
    def summaries(self) -> Found:
        """Summaries of ranks that stored no recording; raises the errors of :attr:`traces`."""
        ranks = () if self.run is None else self.run.ranks
        files = tuple(RankFile(rank=one.rank, path=one.summary) for one in ranks if one.summary is not None)
        return self._chosen(Found(files=files))

    @property
    def recordings(self) -> Found:
        """Files with memory use: :attr:`memory`, otherwise traces, which may contain memory events."""
        has_own = bool(self.memory.files) or self.run is not None
        return self.memory if has_own or not self.traces.files else self.traces

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages about the run as a whole."""
        return self.run.messages if self.run is not None else ()

    @property
    def manifests(self) -> dict[int, RankManifest]:
        """Manifest of each rank of a run."""
        return {rank: packed.manifest for rank, packed in self.packed_manifests.items()}

    @property
    def packed_manifests(self) -> dict[int, PackedManifest]:
        """The same, packed."""
        records = self.run.ranks if self.run is not None else ()
        return {record.rank: record.packed for record in records if record.packed is not None}

    def _one_file(self, rank: int | None = None, world_size: int | None = None) -> Found:
        if rank is None:
            rank = read_name(Path(*self.path.absolute().parts[-2:])).rank or 0
        return Found(files=(RankFile(rank=rank, path=self.path),), world_size=world_size)

    def _chosen(self, found: Found) -> Found:
        """Select the chosen ranks; a rank of a run without files of this kind is a warning."""
        found = replace(found, files=tuple(map(located, found.files)))
        if self._ranks is None or not found.files:
            return found
        recorded = {record.rank for record in self.run.ranks} if self.run is not None else set()
        here = {file.rank for file in found.files}
        require(self.path, "rank", set(self._ranks) - recorded, here)
        files = tuple(file for file in found.files if file.rank in self._ranks)
        return replace(found, files=files, absent=f"{self.path}: {listed('rank', self._ranks)} left none")


def _processes_of_report(path: Path, count: int) -> Found:
    files = tuple(RankFile(rank=rank, path=path) for rank in range(count))
    told = f"{path.name} has {count} processes but no ranks: assumed to be ranks 0 to {count - 1} by device"
    return Found(files=files, warnings=(told,))


def _traces_of_run(run: RunDirectory) -> Found:
    worlds = [record.manifest.world_size for record in run.ranks if record.manifest is not None]
    return Found(
        files=tuple(RankFile(rank=r.rank, path=r.trace) for r in run.ranks if r.trace is not None),
        absent=f"{run.path}: no rank left a trace: {_reason(run, 'record again with --active 1 or more')}",
        world_size=run.info.world_size or max(worlds, default=None),
        warnings=_silent(run, "trace", "no trace"),
    )


def _of_failure(folder: Path) -> Path | None:
    """The snapshot of a failed request, packed or not; the unpacked one where both are there."""
    paths = (folder / (OOM_SNAPSHOT_FILE + end) for end in ("", PACKED))
    return next((path for path in paths if path.is_file()), None)


def _recordings_of_run(run: RunDirectory) -> Found:
    files = tuple(
        RankFile(rank=record.rank, path=path)
        for record in run.ranks
        for path in (record.memory, _of_failure(record.path))
        if path is not None and path.is_file()
    )
    reason = _reason(run, "record again without --no-memory")
    return Found(
        files=files,
        absent=f"{run.path}: no rank left a memory recording: {reason}",
        warnings=_silent(run, "memory", "no memory recording"),
    )


def _reason(run: RunDirectory, otherwise: str) -> str:
    if any(record.summary is not None for record in run.ranks):
        return "record again without --summary, which keeps no recordings"
    return run.messages[0] if run.messages else otherwise


def _silent(run: RunDirectory, kind: str, said: str) -> tuple[str, ...]:
    """Name the ranks that were to leave a file of a kind and did not."""
    return tuple(
        f"rank {record.rank}: {said}"
        for record in run.ranks
        if getattr(record, kind) is None
        and record.summary is None
        and record.manifest is not None
        and record.manifest.selected
    )


def _is_memory_file(path: Path) -> bool:
    """Whether a file is a memory recording, by its name, otherwise by its first bytes."""
    if is_trace_name(path) or is_memory_name(path):
        return is_memory_name(path)
    try:
        with path.open("rb") as file:
            begin = file.read(4)
            return begin.startswith(_PICKLE) or (begin == _ZIP and _holds_arrays(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _holds_arrays(path: Path) -> bool:
    """Whether a zip file is one of arrays, as a storage count is, and not of anything."""
    try:
        with ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except (BadZipFile, RuntimeError, ValueError):  # RuntimeError: a newer kind of zip
        return False
