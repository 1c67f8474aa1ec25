"""Which memory file belongs to which rank: one file, a folder of snapshots or traces, a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.errors import SnapshotError
from fsdp2prof.manifest import OOM_SNAPSHOT_FILE
from fsdp2prof.readers.run_directory import is_run_directory, open_run
from fsdp2prof.workflows.trace_files import rank_in_name

__all__ = ["MemoryFile", "MemorySet", "find_memory", "is_memory_file", "is_trace_file"]

_SUFFIXES = (".pickle", ".pkl", ".npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFile:
    """One rank's memory recording: a snapshot pickle or a storage count."""

    rank: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySet:
    """Memory recordings of one run, in rank order."""

    files: tuple[MemoryFile, ...]
    warnings: tuple[str, ...]
    """Ranks missing or guessed."""


def find_memory(path: str | Path) -> MemorySet:
    """Find the memory recordings in a file, a folder or a run directory.

    Raises ``SnapshotError`` when there is nothing to read, ``RunDirectoryError`` for a run that cannot be.
    """
    root = Path(path)
    if is_run_directory(root):
        return _run_recordings(root)
    if root.is_file():
        return MemorySet(files=(MemoryFile(rank=rank_in_name(root.name) or 0, path=root),), warnings=())
    if not root.exists():
        raise SnapshotError(f"{root}: no such file or folder")
    found = sorted(filter(is_memory_file, root.iterdir())) or sorted(filter(is_trace_file, root.iterdir()))
    if not found:
        raise SnapshotError(
            f"{root}: no memory snapshots: no *.pickle, *.pkl or *.npz file in it, and no trace"
        )
    return _numbered(found)


def is_memory_file(path: Path) -> bool:
    """Whether a file is a memory recording by its name."""
    return path.suffix in _SUFFIXES and path.is_file()


def is_trace_file(path: Path) -> bool:
    """Whether a file is a Kineto trace by its name: its memory events are a recording too."""
    return path.name.endswith((".json", ".json.gz")) and path.is_file()


def _run_recordings(root: Path) -> MemorySet:
    run = open_run(root)
    files = tuple(
        MemoryFile(rank=r.rank, path=path)
        for r in run.ranks
        for path in (r.memory, r.path / OOM_SNAPSHOT_FILE)
        if path is not None and path.is_file()
    )
    if not files:
        reason = run.messages[0] if run.messages else "record again without --no-memory"
        raise SnapshotError(f"{root}: no rank left a memory recording: {reason}")
    silent = [
        f"rank {r.rank}: no memory recording"
        for r in run.ranks
        if r.memory is None and r.manifest is not None and r.manifest.selected
    ]
    return MemorySet(files=files, warnings=(*run.messages, *silent))


def _numbered(found: list[Path]) -> MemorySet:
    """Ranks from the files' names if each says another one, else from their order."""
    ranks = [rank_in_name(file.name) for file in found]
    warnings = []
    if None in ranks or len(set(ranks)) < len(ranks):
        ranks = list(range(len(found)))
        if len(found) > 1:
            warnings.append("the files' names do not say their ranks: numbered in the order of their names")
    pairs = sorted((rank or 0, file) for rank, file in zip(ranks, found, strict=True))
    return MemorySet(
        files=tuple(MemoryFile(rank=rank, path=file) for rank, file in pairs), warnings=tuple(warnings)
    )
