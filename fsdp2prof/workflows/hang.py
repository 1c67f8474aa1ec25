"""From Flight Recorder dumps and stacks to the collective in which a job hangs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp2prof.analyzers.hang.analysis import analyze_hang as analyze
from fsdp2prof.analyzers.layers import numbered
from fsdp2prof.errors import FlightRecorderError, InputError
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.job.flight_recorder import looks_like_dump, read_dump
from fsdp2prof.readers.job.stacks import looks_like_stacks, read_stacks
from fsdp2prof.readers.job.watchdog_log import looks_like_watchdog, read_watchdog_logs, stuck_watchdogs
from fsdp2prof.readers.run.directory import is_run_directory, open_run
from fsdp2prof.results.hang import HangAnalysis
from fsdp2prof.run_directory import FLIGHT_RECORDER_FILE
from fsdp2prof.tables.flight_recorder import FlightDump, RankStacks
from fsdp2prof.workflows.job.folders import files_below
from fsdp2prof.workflows.job.one_job import read_name

_LAST_NUMBER = re.compile(r"(\d{1,7})(?:\.[a-z]{1,9})?$")


def analyze_hang(path: str | Path, *, run: str | Path | None = None) -> HangAnalysis:
    """Read every dump and every rank's stacks at a path and find where the job hangs.

    ``path`` is one file, a folder of them (one per rank), or a run directory that contains them; ``run``
    is the run directory whose manifests name the layers, by default ``path`` itself if it is one. Raises
    ``InputError`` for a path without dumps and stacks, two dumps of one rank, and a dump without a rank in
    its name.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root}: no such file or folder")
    files = [root] if root.is_file() else list(files_below(root))
    stacks, left_out = _read_stacks(files)
    if left_out and not stacks and root.is_file() and not looks_like_watchdog(root):
        raise InputError(left_out[0].removeprefix("left out: "))
    dumps, warnings = _read_dumps(root, files, needed=not stacks)
    manifests = _manifests(root if run is None else Path(run), asked=run is not None)
    return analyze(dumps, manifests, [*warnings, *left_out], stacks=stacks)


def _read_stacks(files: Sequence[Path]) -> tuple[list[RankStacks], list[str]]:
    """Stacks of each rank, the newest if there are several."""
    found: dict[int, Path] = {}
    warnings: list[str] = []
    for file in files:
        if not looks_like_stacks(file):
            continue
        rank = _named_rank(file)
        if rank is None:
            warnings.append(
                f"left out: {file}: stacks without a rank in the file name; rename it to "
                "end in the rank, like stacks_3"
            )
        elif rank not in found or found[rank].stat().st_mtime_ns < file.stat().st_mtime_ns:
            found[rank] = file
    return [read_stacks(file, rank) for rank, file in sorted(found.items())], warnings


def _read_dumps(root: Path, files: Sequence[Path], *, needed: bool) -> tuple[list[FlightDump], list[str]]:
    if root.is_file() and not looks_like_watchdog(root):
        if needed and not looks_like_dump(root):
            raise FlightRecorderError(_nothing(root, files))
        return [read_dump(root, _rank(root))] if needed else [], []
    found: dict[int, Path] = {}
    for file in _of_one_moment(root, list(filter(looks_like_dump, files))):
        rank = _rank(file)
        if rank in found:
            raise FlightRecorderError(
                f"{root}: two dumps for rank {rank}: {found[rank].relative_to(root)} and "
                f"{file.relative_to(root)}; give a folder with one dump per rank"
            )
        found[rank] = file
    dumps: list[FlightDump] = []
    warnings: list[str] = []
    for rank, file in sorted(found.items()):
        try:
            dumps.append(read_dump(file, rank))
        except FlightRecorderError as error:
            warnings.append(f"left out: {error}")
    if not dumps:
        logs = [file for file in files if file not in found.values() and looks_like_watchdog(file)]
        dumps = read_watchdog_logs({file: read_name(Path(file.name)).rank for file in logs})
    if not dumps and needed:
        why = warnings[0].removeprefix("left out: ") if warnings else _nothing(root, files)
        raise FlightRecorderError(why)
    return dumps, warnings


def _nothing(root: Path, files: Sequence[Path]) -> str:
    if stuck := stuck_watchdogs(files):
        return (
            f"{root}: names no collective: the watchdog itself stopped on {numbered('rank', stuck)}. A CUDA "
            "or NCCL call does not return, or a thread holds the GIL; `py-spy dump` shows where"
        )
    return f"{root}: contains no Flight Recorder dump, log of a timeout or stacks of a rank"


def _of_one_moment(root: Path, files: list[Path]) -> list[Path]:
    """The recorder's dumps in a run's rank folders, or the training's own dumps: the set with more ranks."""
    own = [file for file in files if file.name == FLIGHT_RECORDER_FILE and file.parent.parent == root]
    others = [file for file in files if file not in own]
    return own if len(own) > len(others) else others


def _rank(file: Path) -> int:
    named = _named_rank(file)
    if named is None:
        raise FlightRecorderError(
            f"{file}: the file name has no rank; rename it to end in the rank, like trace_3"
        )
    return named


def _named_rank(file: Path) -> int | None:
    """Rank in a file's name (``rank_3``, or a number at its end), otherwise in its folder's."""
    named = read_name(Path(file.name)).rank
    if named is None and (number := _LAST_NUMBER.search(file.name)):
        named = int(number[1])
    return read_name(file).rank if named is None else named


def _manifests(root: Path, *, asked: bool) -> Mapping[int, RankManifest]:
    if not asked and not is_run_directory(root):
        return {}
    return {one.rank: one.manifest for one in open_run(root).ranks if one.manifest is not None}
