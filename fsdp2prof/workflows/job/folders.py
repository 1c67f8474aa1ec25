"""Traces and memory recordings in a folder, wherever the profiler's owner put them.

Known by their names are the folders of torchtitan and torchtune (``profile_trace/iteration_10``,
``memory_snapshot/step_000000000010``), of TensorBoard and HTA (``*.pt.trace.json.gz``), of Lightning and of
accelerate; any other is read in which names or the files themselves say their ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from fsdp2prof.errors import InputError, TraceError
from fsdp2prof.readers.trace.chrome_trace import peek_rank, processes_in
from fsdp2prof.workflows.job.one_job import Candidate, Found, in_order, of_one_job, read_name

_MOST_FOLDERS_DEEP = 5
"""From an output folder to a trace: ``profiling/traces/iteration_10/replica_0/``."""
_FEW_FOLDERS_DEEP = 2
"""From a folder of logs or dumps to one of them."""
_MOST_ENTRIES = 100_000
"""Where so much lies, looking further down takes minutes and finds a data set."""

_TRACE_SUFFIXES = (".json", ".json.gz", ".sqlite")
_PROFILER_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
_MEMORY_SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".npz")


def is_trace_name(path: PurePath) -> bool:
    """Whether a file is a Kineto trace by its name."""
    return path.name.endswith(_TRACE_SUFFIXES)


def is_memory_name(path: PurePath) -> bool:
    """Whether a file is a memory recording by its name."""
    return path.name.endswith(_MEMORY_SUFFIXES)


def find_traces(root: Path, iteration: int | None = None) -> Found:
    """Find the traces in a folder, of one iteration: by default the newest.

    Those nearest to the folder itself count. Raises ``InputError`` for traces of several jobs and for an
    iteration that is not there.
    """
    refused: list[str] = []
    for depth, level in enumerate(_levels(root)):
        if likely := _likely_traces(root, level, depth):
            refused.clear()
        if candidates := [found for path in likely if (found := _peeked(root, path, refused))]:
            return of_one_job(root, "trace", candidates, iteration, refused)
    reason = refused[0] if len(refused) == 1 else "no *.json, *.json.gz or *.sqlite file in it is a trace"
    return Found(absent=f"{root}: no traces: {reason}")


def find_memory_files(root: Path, iteration: int | None = None) -> Found:
    """Find the memory snapshots and storage counts in a folder, as :func:`find_traces` does."""
    for level in _levels(root):
        # A file may lie unpacked beside its packed self.
        named = {path for path in level if is_memory_name(path)}
        once = [path for path in level if path in named and path.with_suffix("") not in named]
        if candidates := [_candidate(root, path) for path in once]:
            return of_one_job(root, "memory recording", candidates, iteration, [])
    suffixes = ", ".join(f"*{suffix}" for suffix in _MEMORY_SUFFIXES)
    return Found(absent=f"{root}: no memory snapshots: no {suffixes} file in it")


def refuse_special(path: Path) -> None:
    """Raise ``InputError`` for a pipe, socket or device, and for a link to a whole file system.

    Opening a pipe waits for somebody to write into it; a device may never end.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise InputError(f"{path}: neither a file nor a folder")
    if path.resolve() == Path(path.absolute().anchor):
        raise InputError(f"{path}: is the whole file system; name a run directory or a folder of files")


def files_below(root: Path) -> Iterator[Path]:
    """Yield the files of a folder and of its folders, two levels down, without hidden ones.

    Raises ``InputError`` for too many files, and for a pipe or a device.
    """
    refuse_special(root)
    level, seen = [root], 0
    for _ in range(_FEW_FOLDERS_DEEP + 1):
        entries = sorted((entry for folder in level for entry in folder.iterdir()), key=in_order)
        seen += len(entries)
        if seen > _MOST_ENTRIES:
            raise InputError(f"{root}: more than {_MOST_ENTRIES:,} files; give a smaller folder")
        yield from (entry for entry in entries if entry.is_file() and not entry.name.startswith("."))
        level = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]


def _levels(root: Path) -> Iterator[list[Path]]:
    """Yield the files of a folder, then those of all its folders, and so on; hidden ones are left out."""
    folders, seen = [root], 0
    for _ in range(_MOST_FOLDERS_DEEP + 1):
        entries = [entry for folder in folders for entry in _entries(folder)]
        yield sorted((Path(entry) for entry in entries if entry.is_file()), key=in_order)
        folders = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
        seen += len(entries)
        if seen > _MOST_ENTRIES:
            return


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None


def _likely_traces(root: Path, level: Iterable[Path], depth: int) -> list[Path]:
    """Return files that may be traces: those with the profiler's own names if there are any, otherwise
    similar ones."""
    traces = [path for path in level if is_trace_name(path)]
    if named := [path for path in traces if path.name.endswith(_PROFILER_SUFFIXES)]:
        return named
    if depth < 2:
        return traces
    return [
        path for path in traces if "trace" in path.name or read_name(path.relative_to(root)).rank is not None
    ]


def _peeked(root: Path, path: Path, refused: list[str]) -> Candidate | None:
    try:
        rank, world_size = peek_rank(path)
        if (count := processes_in(path)) > 1:
            raise TraceError(f"{path}: a report of {count} processes; analyse it separately")
    except TraceError as error:
        refused.append(f"left out: {error}")
        return None
    return _candidate(root, path, rank, world_size)


def _candidate(root: Path, path: Path, rank: int | None = None, world_size: int | None = None) -> Candidate:
    name = path.relative_to(root)
    named = read_name(root.absolute().name / name)
    rank = named.rank if rank is None else rank
    return Candidate(path=path, name=name, named=named, rank=rank, world_size=world_size)
