"""Which trace file belongs to which rank: of one file, a folder of Kineto traces, or a recorded run.

A rank comes from the run directory, else from the trace's ``distributedInfo``, else from its name (``rank3``,
``worker_3``, ``3.json``), else from the order of the names, which is said in a warning.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.errors import TraceError
from fsdp2prof.readers.chrome_trace import peek_rank
from fsdp2prof.readers.run_directory import is_run_directory, open_run

__all__ = ["TraceFile", "TraceSet", "find_traces", "rank_in_name"]

_PATTERNS = (("*.pt.trace.json", "*.pt.trace.json.gz"), ("*.json", "*.json.gz"))
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"^(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    """One rank's trace."""

    rank: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSet:
    """Traces of one run, one a rank, in rank order."""

    files: tuple[TraceFile, ...]
    world_size: int | None
    """As the run or the traces say; None if nothing says it."""
    warnings: tuple[str, ...]
    """Ranks missing, given twice or guessed; files left out."""


def find_traces(path: str | Path) -> TraceSet:
    """Find the traces in a file, a folder or a run directory.

    Raises ``TraceError`` when there is nothing to read, ``RunDirectoryError`` for a run that cannot be read.
    """
    root = Path(path)
    if is_run_directory(root):
        return _run_traces(root)
    if root.is_file():
        rank, world_size = peek_rank(root)
        rank = rank_in_name(root.name) if rank is None else rank
        return TraceSet(files=(TraceFile(rank=rank or 0, path=root),), world_size=world_size, warnings=())
    if not root.exists():
        raise TraceError(f"{root}: no such file or folder")
    return _folder_traces(root)


def _run_traces(root: Path) -> TraceSet:
    run = open_run(root)
    files = tuple(TraceFile(rank=r.rank, path=r.trace) for r in run.ranks if r.trace is not None)
    if not files:
        reason = run.messages[0] if run.messages else "record again with --active 1 or more"
        raise TraceError(f"{root}: no rank left a trace: {reason}")
    silent = [
        f"rank {r.rank}: no trace"
        for r in run.ranks
        if r.trace is None and r.manifest is not None and r.manifest.selected
    ]
    worlds = [r.manifest.world_size for r in run.ranks if r.manifest is not None]
    world_size = run.info.world_size or max(worlds, default=None)
    return TraceSet(files=files, world_size=world_size, warnings=(*run.messages, *silent))


def _folder_traces(root: Path) -> TraceSet:
    warnings: list[str] = []
    said: dict[Path, tuple[int | None, int | None]] = {}
    for candidate in _candidates(root):
        try:
            said[candidate] = peek_rank(candidate)
        except TraceError as error:
            warnings.append(f"left out: {error}")
    if not said:
        reason = warnings[0] if len(warnings) == 1 else "no *.json or *.json.gz file in it is a trace"
        raise TraceError(f"{root}: no traces: {reason}")
    by_rank: dict[int, list[Path]] = defaultdict(list)
    unnamed = []
    for file, (rank, _) in said.items():
        rank = rank_in_name(file.relative_to(root).as_posix()) if rank is None else rank
        if rank is None:
            unnamed.append(file)
        else:
            by_rank[rank].append(file)
    for file in unnamed:
        rank = next(r for r in range(len(said)) if r not in by_rank)
        by_rank[rank].append(file)
        if len(said) > 1:
            warnings.append(f"{file.name} does not say its rank: taken as rank {rank} by the order of names")
    for rank, files in sorted(by_rank.items()):
        if len(files) > 1:
            left_out = ", ".join(file.name for file in files[:-1])
            warnings.append(f"rank {rank} has {len(files)} traces: {files[-1].name} is read, not {left_out}")
    world_size = max((world for _, world in said.values() if world is not None), default=None)
    warnings += _gaps(sorted(by_rank), world_size)
    found = tuple(TraceFile(rank=rank, path=by_rank[rank][-1]) for rank in sorted(by_rank))
    return TraceSet(files=found, world_size=world_size, warnings=tuple(warnings))


def _candidates(root: Path) -> list[Path]:
    """Files that may be traces, by name: those in the folder itself, else those one folder deeper."""
    for depth in ("", "*/"):
        for patterns in _PATTERNS:
            found = {file for pattern in patterns for file in root.glob(depth + pattern) if file.is_file()}
            if found:
                return sorted(found, key=lambda file: _natural(file.as_posix()))
    return []


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file's name says (``rank3``, ``worker_3``, ``3.json``), or None."""
    named = _RANK_IN_NAME.findall(name)
    if named:
        return int(named[-1])
    number = _NUMBER.match(name.rpartition("/")[2])
    return int(number.group(1)) if number else None


def _gaps(ranks: list[int], world_size: int | None) -> list[str]:
    missing = sorted(set(range(world_size or ranks[-1] + 1)) - set(ranks))
    if not missing:
        return []
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [f"{len(missing)} of {world_size or ranks[-1] + 1} ranks have no trace here: {shown}"]
