"""Of the files in a folder those of one job: of one iteration, one a rank. Two jobs are never merged.

What the names of a file and of its folders say: whose it is, and of which iteration.

::

    rank3_trace.json, worker_3_x.json, rank_3/trace.json    rank 3
    profile_3.json, 3.json                                  rank 3
    000003_step_10.pickle                                   rank 3, iteration 10
    iteration_10/rank3_trace.json, snapshot_step10.pickle   iteration 10
    step_000000000010_exit/000003_step_10.pickle            iteration 10, at its end
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from filecmp import cmp
from itertools import count, islice
from pathlib import Path, PurePath

from fsdp2prof.by_key import grouped
from fsdp2prof.errors import InputError
from fsdp2prof.units import plural

_RANK = re.compile(r"(?<![a-z])(?:rank|worker|profile)[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
_RANK_FIRST = re.compile(r"(\d{1,7})(?:\.|[-_](?:iteration|iter|step)[-_]?\d)", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"(?:rank|worker)[-_]?(\d{1,7})", re.IGNORECASE)
_ITERATION = re.compile(r"(?<![a-z])(?:iteration|iter|step)[-_]?(\d{1,18})(_exit)?", re.IGNORECASE)
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, order=True, slots=True)
class Iteration:
    """A profiling cycle of a training, by the step it ended with."""

    number: int
    at_exit: bool = False
    """Written as the training ended there, out of memory say."""


@dataclass(frozen=True, slots=True)
class NamedFile:
    """Facts read from a path; None if it does not contain them."""

    rank: int | None
    iteration: Iteration | None


def read_name(path: PurePath) -> NamedFile:
    """Read a file's own name, otherwise the folders of ``path`` from the inside out."""
    *folders, name = path.parts
    found = [match for part in path.parts for match in _ITERATION.finditer(part)]
    number = int(found[-1][1]) if found else None
    at_exit = any(match[2] for match in found if int(match[1]) == number)
    iteration = None if number is None else Iteration(number, at_exit)
    return NamedFile(rank=_rank(name, folders), iteration=iteration)


def in_order(path: PurePath) -> list[tuple[int, str]]:
    """Sort key of paths that puts 2 before 10."""
    parts = _DIGITS.split(path.as_posix())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts if part]


def same_but_for_last_number(paths: list[PurePath]) -> bool:
    """Whether files of one folder are a series: ``host_7.100.json``, ``host_7.200.json``."""
    stems = {tuple(_DIGITS.split(path.as_posix())[:-2]) for path in paths}
    return len(stems) == 1


def _rank(name: str, folders: list[str]) -> int | None:
    if named := _RANK.findall(name):
        return int(named[-1])
    if first := _RANK_FIRST.match(name):
        return int(first[1])
    inside_out = (_RANK_FOLDER.fullmatch(folder) for folder in reversed(folders))
    return next((int(match[1]) for match in inside_out if match), None)


_SHOWN = 8
_NO_EVENTS_BYTES = 1 << 12
"""Upper limit of the size of a trace without events: such files may be equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A file of one rank."""

    rank: int
    path: Path
    """As results and messages call it."""
    location: str | None = None
    """Where it is read, if not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Files of one kind and of one job, in order of rank."""

    files: tuple[RankFile, ...] = ()
    absent: str = ""
    """Why there are none."""
    world_size: int | None = None
    """As the files say; None if none says it."""
    warnings: tuple[str, ...] = ()
    """Ranks missing or guessed; files left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A file that was found."""

    path: Path
    name: PurePath
    """Relative to the folder that was searched."""
    named: NamedFile
    """Facts from the file's name."""
    rank: int | None
    """World size from the file, otherwise from its name."""
    world_size: int | None


def of_one_job(
    root: Path, kind: str, candidates: list[Candidate], iteration: int | None, left_out: Sequence[str]
) -> Found:
    """Select the files of one kind in a folder: those of the newest or the given iteration, one per rank.

    Raises ``InputError`` for files of several jobs and for a missing iteration.
    """
    chosen, told = _of_one_iteration(root, kind, candidates, iteration)
    _refuse_two_sizes(root, chosen)
    by_rank, guessed = _by_rank(kind, chosen)
    warnings = [*told, *left_out, *guessed]
    files = []
    for rank, ranks_own in sorted(by_rank.items()):
        newest, older = ranks_own[-1], ranks_own[:-1]
        if older:
            _refuse_two_jobs(root, kind, rank, ranks_own)
            names = ", ".join(str(file.name) for file in older)
            warnings.append(f"rank {rank} has {len(ranks_own)} {kind}s: {newest.name} is read, not {names}")
        files.append(RankFile(rank=rank, path=newest.path))
    world_size = next((one.world_size for one in chosen if one.world_size is not None), None)
    return Found(
        files=tuple(files), world_size=world_size, warnings=(*warnings, *_gaps(kind, by_rank, world_size))
    )


def _of_one_iteration(
    root: Path, kind: str, candidates: list[Candidate], wanted: int | None
) -> tuple[list[Candidate], list[str]]:
    """Select one iteration's files, and report it if there are several."""
    there = sorted({one.named.iteration for one in candidates if one.named.iteration is not None})
    numbers = ", ".join(str(number) for number in dict.fromkeys(one.number for one in there))
    if wanted is not None and not there:
        raise InputError(f"{root}: the names of its {kind}s state no iteration: leave out --iteration")
    matching = [one for one in there if wanted is None or one.number == wanted]
    if wanted is not None and not matching:
        raise InputError(f"{root}: no {kind} of iteration {wanted} in it; it has {numbers}")
    newest = matching[-1] if matching else None
    chosen = [one for one in candidates if one.named.iteration == newest]
    if len(chosen) == len(candidates) or wanted is not None:
        return chosen, []
    more = f" and {len(chosen) - 1} more" if len(chosen) > 1 else ""
    return chosen, [
        f"reading the newest of iterations {numbers}: {chosen[0].path}{more}; --iteration chooses another"
    ]


def same_files(files: Iterable[RankFile]) -> list[str]:
    """Say which ranks have one and the same file, byte for byte: no two ranks run alike to the nanosecond."""
    by_size = grouped(
        (size, file)
        for file in files
        if file.location is None and (size := file.path.stat().st_size) > _NO_EVENTS_BYTES
    )
    told = []
    for alike in by_size.values():
        first, *others = alike
        others = [one for one in others if one.path != first.path]  # a report holds several ranks
        same = [one.rank for one in others if cmp(first.path, one.path, shallow=False)]
        if same:
            shown = ", ".join(map(str, same[:_SHOWN])) + (", ..." if len(same) > _SHOWN else "")
            told.append(
                f"the file of rank {first.rank} is identical to that of {plural(len(same), 'rank')}: {shown}"
            )
    return told


def _refuse_two_sizes(root: Path, candidates: Sequence[Candidate]) -> None:
    by_size = {one.world_size: one for one in candidates if one.world_size is not None}
    if len(by_size) > 1:
        sizes = " and ".join(f"{one.name} of {size}" for size, one in sorted(by_size.items())[:2])
        raise InputError(f"{root}: files of jobs of different sizes ({sizes} ranks): name those of one job")


def _refuse_two_jobs(root: Path, kind: str, rank: int, files: Sequence[Candidate]) -> None:
    """Refuse several files of a rank unless they are a series, numbered at their end."""
    if not same_but_for_last_number([file.name for file in files]):
        both = f"{files[0].name} and {files[1].name} are both a {kind} of rank {rank}"
        raise InputError(f"{root}: {both}: name the file or folder of one job")


def _by_rank(kind: str, candidates: Iterable[Candidate]) -> tuple[dict[int, list[Candidate]], list[str]]:
    """Files by rank; files without a rank in their name get the remaining ranks in order."""
    by_rank: dict[int, list[Candidate]] = defaultdict(list)
    silent = []
    for one in candidates:
        if one.rank is None:
            silent.append(one)
        else:
            by_rank[one.rank].append(one)
    alone = len(silent) == 1 and not by_rank
    warnings = []
    free = (rank for rank in count() if rank not in by_rank)
    for one in silent:
        rank = next(free)
        by_rank[rank].append(one)
        if not alone:
            warnings.append(f"{one.name} has no rank in its name: assumed to be rank {rank} by name order")
    return by_rank, warnings


def _gaps(kind: str, ranks: Iterable[int], world_size: int | None) -> list[str]:
    present = set(ranks)
    expected = world_size or max(present) + 1
    missing = expected - sum(rank < expected for rank in present)
    if not missing:
        return []
    named = [str(rank) for rank in islice((r for r in range(expected) if r not in present), _SHOWN)]
    shown = ", ".join(named) + (", ..." if missing > len(named) else "")
    return [f"{missing} of {expected} ranks have no {kind} here: {shown}"]
