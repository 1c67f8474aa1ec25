"""The run directory as launchers make it: one of them, or one on every node of a run, in any order."""

from __future__ import annotations

import platform
import shutil
import socket
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from fsdp2prof import __version__
from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RecordOptions, Rehearsal, RunInfo
from fsdp2prof.readers.run.directory import is_run_directory, open_run
from fsdp2prof.readers.run.documents import node_ranks
from fsdp2prof.recorder.settings import relevant_environment, validate
from fsdp2prof.run_directory import FLIGHT_RECORDER_FOLDER, MANIFEST_FILE, TRIGGER_FILE, RankRecord, node_file


def prepare_run(
    path: Path,
    options: RecordOptions,
    command: list[str],
    *,
    node_rank: int = 0,
    force: bool,
    rehearsal: Rehearsal | None = None,
) -> RunInfo:
    """Make the run directory, or join it, and write this node's file.

    Raises ``RunDirectoryError`` if this node's file is there, or a folder that no recorder wrote. With
    ``force`` this node's old recording is removed, never another's; its file is replaced, so that other nodes
    that force at the same moment see at all times that they are not alone.
    """
    validate(options)
    if not _is_text(path.resolve()):
        raise RunDirectoryError(f"{path}: its name is not UTF-8, which no JSON can hold; choose another")
    file = path / node_file(node_rank)
    if path.exists() and not _is_empty(path):
        joins_others = not file.exists() and bool(node_ranks(path))
        if not joins_others:
            _refuse(path, node_rank, force)
            _remove_ranks(path, node_rank)
    info = RunInfo(
        command=command,
        started_at=now(),
        hosts=[socket.gethostname()],
        versions={
            "python": platform.python_version(),
            "torch": version("torch"),
            "fsdp2prof": __version__,
        },
        environment=relevant_environment(),
        options=options,
        rehearsal=rehearsal,
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(file, info)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror})") from error
    return info


def is_alone(path: Path, node_rank: int) -> bool:
    """Whether no other node has recorded into the run: then all ranks of the world are this launcher's."""
    return node_rank == 0 and not set(node_ranks(path)) - {0}


def records_of_node(path: Path, node_rank: int) -> list[RankRecord]:
    """Return what this node's ranks left; a folder without a readable manifest belongs to a node alone."""
    alone = is_alone(path, node_rank)
    return [
        record
        for record in open_run(path).ranks
        if (alone if record.manifest is None else record.manifest.node_rank == node_rank)
    ]


def now() -> str:
    """Return the time as ISO 8601 with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_empty(path: Path) -> bool:
    """Whether nothing is there but what another node's launcher is about to rename."""
    return path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir())


def _refuse(path: Path, node_rank: int, force: bool) -> None:
    if force and not is_run_directory(path):
        raise RunDirectoryError(f"{path}: exists and is not a run directory; -f does not remove it")
    if force:
        return
    is_recorded = (path / node_file(node_rank)).exists()
    what = f"has a node {node_rank}" if node_rank and is_recorded else "exists"
    hint = "; other nodes of the same run take --node-rank N" if is_recorded and not node_rank else ""
    raise RunDirectoryError(
        f"{path}: {what} already; choose another, or overwrite it with -f (force=True){hint}"
    )


class _Owner(msgspec.Struct):
    node_rank: int = 0


def _remove_ranks(path: Path, node_rank: int) -> None:
    alone = is_alone(path, node_rank)
    (path / TRIGGER_FILE).unlink(missing_ok=True)
    if alone:
        for folder in (*path.glob("recording-[0-9]*/"), *path.glob(FLIGHT_RECORDER_FOLDER)):
            shutil.rmtree(folder)
    for folder in path.glob("rank-[0-9]*/"):
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=_Owner)
            is_own = manifest.node_rank == node_rank
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            is_own = alone
        if is_own:
            shutil.rmtree(folder)
