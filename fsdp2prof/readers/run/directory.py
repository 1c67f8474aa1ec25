"""A run directory, opened: the command, and each rank's recording.

A rank may be missing, incomplete or crashed; ``messages`` says so and the rest is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.manifest import (
    MANIFEST_SCHEMA,
    RANK_LIMIT,
    RECORDING_SCHEMA,
    RankManifest,
    RecordingInfo,
    RunInfo,
)
from fsdp2prof.readers.run.documents import UnreadableError, node_ranks, read_document, read_run_info
from fsdp2prof.run_directory import (
    MANIFEST_FILE,
    PACKED,
    RECORDING_FILE,
    RUN_FILE,
    SNAPSHOT_FILE,
    STORAGE_COUNT_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    PackedManifest,
    RankRecord,
    RunDirectory,
    rank_folder,
    recording_folder,
    recording_number,
)
from fsdp2prof.vocabulary import CATEGORIES, quoted_error

_MOST_LISTED = 12
_RANK_FOLDER = re.compile(r"rank-([0-9]{5,6})")


def is_run_directory(path: Path) -> bool:
    """Whether ``path`` is a folder that a recorder wrote: it has a node's file or ranks with a manifest."""
    return path.is_dir() and (bool(node_ranks(path)) or any(path.glob(f"rank-*/{MANIFEST_FILE}")))


def open_rank(folder: Path) -> RunDirectory:
    """Open one rank's folder as a separate run."""
    rank = _rank_of(folder)
    if rank is None:
        raise RunDirectoryError(f"{folder}: not a rank's folder")
    return RunDirectory(path=folder, info=RunInfo(), ranks=(_read_rank(rank, folder, RunInfo()),))


def open_recording(run: RunDirectory, number: int) -> RunDirectory:
    """Open one of the recordings of a run: the same run, with its ranks' recordings of that time.

    Raises ``RunDirectoryError`` for an unknown number.
    """
    if number not in run.recordings:
        raise RunDirectoryError(f"{run.path}: no recording {number}; it has {_listed(run.recordings)}")
    folder = run.path / recording_folder(number)
    messages = list(run.messages)
    try:
        info, _ = read_document(folder / RECORDING_FILE, RecordingInfo, RECORDING_SCHEMA)
        which = f"recording {number} of {len(run.recordings)}, from step {info.step}: {info.reason}"
        more = f"; --iteration shows another of {_listed(run.recordings)}" if len(run.recordings) > 1 else ""
        messages.append(which + more)
    except UnreadableError as error:
        messages.append(str(error))
    records = _records(folder, run.info)
    for record in records:
        messages += [f"rank {record.rank}: {text}" for text in record.messages]
    return RunDirectory(
        path=folder,
        info=run.info,
        ranks=records,
        messages=tuple(dict.fromkeys(messages)),
        recordings=run.recordings,
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else ", ".join(map(str, numbers)) or "none"


def open_run(path: str | Path) -> RunDirectory:
    """Open a run directory, tolerant of missing, partial and crashed ranks.

    Raises ``RunDirectoryError`` when the path is missing, empty, not a run directory, has an unreadable
    file of a node or was written by a newer fsdp2prof.
    """
    root = Path(path)
    if not root.exists():
        raise RunDirectoryError(
            f"{root}: no such run directory; record with `fsdp2prof record -o {root} -- COMMAND`"
        )
    if not root.is_dir():
        raise RunDirectoryError(f"{root}: a file, not a run directory; give the folder `record -o` wrote")
    if not any(root.iterdir()):
        raise RunDirectoryError(
            f"{root}: an empty folder; record with `fsdp2prof record -o {root} -- COMMAND`"
        )
    if not is_run_directory(root):
        raise RunDirectoryError(
            f"{root}: not a run directory: neither {RUN_FILE} nor a rank's manifest in it"
        )
    info, messages = read_run_info(root)
    records = _records(root, info)
    if missing := _missing_ranks(info, records):
        messages.append(missing)
        if info.state == "complete":
            info.state = "partial"
    if unrecorded := _say_unrecorded(records):
        messages.append(unrecorded)
    for record in records:  # the launcher has summed up what the ranks it saw said
        untold = [text for text in record.messages if not any(text in told for told in info.messages)]
        messages += [f"rank {record.rank}: {text}" for text in untold]
    return RunDirectory(
        path=root,
        info=info,
        ranks=records,
        messages=tuple(dict.fromkeys(messages)),
        recordings=_recordings(root),
    )


def read_manifests(run: RunDirectory) -> dict[int, RankManifest]:
    """Return a run's manifests by rank. Raises ``RunDirectoryError`` if ranks are there and none has one."""
    manifests = {one.rank: one.manifest for one in run.ranks if one.manifest is not None}
    if run.ranks and not manifests:
        first = run.ranks[0]
        why = first.messages[0] if first.messages else f"{MANIFEST_FILE} is missing"
        raise RunDirectoryError(f"{run.path}: no rank's manifest can be read; rank {first.rank}: {why}")
    return manifests


def read_sharded_manifests(path: Path) -> dict[int, RankManifest]:
    """Return a run's manifests by rank. Raises ``RunDirectoryError`` if none has a parameter group."""
    manifests = read_manifests(open_run(path))
    if not any(manifest.param_groups for manifest in manifests.values()):
        raise RunDirectoryError(f"{path}: no rank recorded an FSDP parameter group")
    return manifests


def _records(root: Path, info: RunInfo) -> tuple[RankRecord, ...]:
    folders = sorted((rank, folder) for folder in root.iterdir() if (rank := _rank_of(folder)) is not None)
    return tuple(_read_rank(rank, folder, info) for rank, folder in folders)


def _recordings(root: Path) -> tuple[int, ...]:
    """Numbers of the recordings of which a rank saved something; if there are none, those that began.

    The last one may have only warmed up when the training ended.
    """
    folders = [(recording_number(folder.name), folder) for folder in root.glob("recording-*/")]
    began = sorted(n for n, folder in folders if n is not None and any(folder.glob("rank-*/")))
    kept = {n for n, folder in folders if any(file.name != MANIFEST_FILE for file in folder.glob("rank-*/*"))}
    return tuple([n for n in began if n in kept] or began)


def _rank_of(folder: Path) -> int | None:
    match = _RANK_FOLDER.fullmatch(folder.name)
    rank = int(match.group(1)) if match else RANK_LIMIT
    named_by_us = rank < RANK_LIMIT and folder.name == rank_folder(rank)  # no second name of the same rank
    return rank if named_by_us and folder.is_dir() else None


def _read_rank(rank: int, folder: Path, info: RunInfo) -> RankRecord:
    manifest: RankManifest | None = None
    packed: PackedManifest | None = None
    messages: list[str] = []
    if not (folder / MANIFEST_FILE).is_file():
        messages.append(f"{MANIFEST_FILE} is missing")
    else:
        try:
            manifest, content = read_document(folder / MANIFEST_FILE, RankManifest, MANIFEST_SCHEMA)
            packed = PackedManifest.of(content)
            messages += _state_messages(manifest)
        except UnreadableError as error:
            messages.append(str(error))
    trace = folder / TRACE_FILE
    names = (SNAPSHOT_FILE, SNAPSHOT_FILE + PACKED, STORAGE_COUNT_FILE)
    memory = next((folder / name for name in names if (folder / name).is_file()), None)
    summary = folder / SUMMARY_FILE
    summarised = summary.is_file()
    if manifest is not None and manifest.state == "complete" and not summarised:
        if manifest.traced_steps and not trace.is_file():
            messages.append(f"complete, but {TRACE_FILE} is missing")
        if manifest.memory_steps and memory is None:
            messages.append("complete, but its memory recording is missing")
    return RankRecord(
        rank=rank,
        path=folder,
        packed=packed,
        trace=trace if trace.is_file() else None,
        memory=memory,
        summary=summary if summarised else None,
        messages=tuple(messages),
    )


def _state_messages(manifest: RankManifest) -> list[str]:
    messages = list(manifest.messages)
    if newer := sorted({tensor.category for tensor in manifest.tensors} - set(CATEGORIES)):
        messages.append(f"a newer fsdp2prof wrote tensors of {', '.join(newer)}: counted as unattributed")
    if manifest.state == "running":
        messages.append("still running, or killed before it wrote its outcome")
    elif manifest.state == "crashed":
        messages.append(f"crashed: {quoted_error(manifest.error or 'no exception was seen')}")
    elif manifest.state == "partial" and not messages:
        messages.append("ended before its recording was complete")
    return messages


def _missing_ranks(info: RunInfo, records: tuple[RankRecord, ...]) -> str | None:
    if info.rehearsal is not None:
        return None
    manifests = [record.manifest for record in records if record.manifest is not None]
    if not all(manifest.has_peers for manifest in manifests):
        return None
    worlds = [manifest.world_size for manifest in manifests]
    world_size = info.world_size or max(worlds, default=0)
    missing = sorted(set(range(world_size)) - {record.rank for record in records})
    if not missing:
        return None
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"{len(missing)} of {world_size} ranks left no recording: rank{'s' * (len(missing) > 1)} {shown}"


def _say_unrecorded(records: Sequence[RankRecord]) -> str | None:
    """Say which ranks ``--ranks`` left out and which mesh coordinates only they have; None for none."""
    manifests = [manifest for record in records if (manifest := record.manifest) is not None]
    selected = {one.rank: one.selected for one in manifests}
    left_out = [rank for rank, chosen in selected.items() if not chosen]
    if not left_out:
        return None
    unseen = _unseen(one for one in manifests if one.selected)
    missing = {name: indices for name, indices in unseen.items() if indices}
    said = f"{len(left_out)} of {len(selected)} ranks were not recorded (--ranks): {_some(left_out)}"
    if missing:
        which = ", ".join(f"{name} {_some(indices)}" for name, indices in sorted(missing.items()))
        return f"{said}; no recorded rank has the mesh coordinates {which}, so their activity is missing"
    known = sorted(unseen)
    return f"{said}; every coordinate of {', '.join(known)} has a recorded rank" if known else said


def _unseen(recorded: Iterable[RankManifest]) -> dict[str, list[int]]:
    """By mesh dimension: the coordinates of no recorded rank."""
    sizes: dict[str, int] = {}
    seen: dict[str, set[int]] = defaultdict(set)
    for manifest in recorded:
        for group in manifest.process_groups:
            if group.mesh_dim is not None and manifest.rank in group.ranks:
                sizes[group.mesh_dim] = max(sizes.get(group.mesh_dim, 0), len(group.ranks))
                seen[group.mesh_dim].add(sorted(group.ranks).index(manifest.rank))
    return {name: sorted(set(range(size)) - seen[name]) for name, size in sizes.items()}


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return shown if len(numbers) <= _MOST_LISTED else f"{shown} and {len(numbers) - _MOST_LISTED} more"
