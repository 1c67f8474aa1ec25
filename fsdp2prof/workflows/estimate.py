"""What an estimate takes from a recorded run, and an estimate as a run that every view reads."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.estimators.memory import MemoryPrediction
from fsdp2prof.files import write_json
from fsdp2prof.manifest import (
    COMMUNICATION_FILE,
    MANIFEST_FILE,
    RUN_FILE,
    STORAGE_COUNT_FILE,
    RankManifest,
    RecordOptions,
    RunInfo,
    rank_folder,
)
from fsdp2prof.readers.run_directory import open_run
from fsdp2prof.recorder.recording_file import write_recording
from fsdp2prof.results import CommEstimate

__all__ = ["describe_run", "refuse_existing_run", "save_run"]


def describe_run(path: Path) -> RankManifest:
    """Return what the lowest rank with parameter groups says of itself.

    Raises ``RunDirectoryError`` for what is no run, and for a run in which no rank has any.
    """
    manifests = [record.manifest for record in open_run(path).ranks if record.manifest is not None]
    described = [manifest for manifest in manifests if manifest.param_groups]
    if not described:
        raise RunDirectoryError(f"{path}: no rank recorded an FSDP parameter group")
    return described[0]


def refuse_existing_run(path: Path) -> None:
    """Raise ``RunDirectoryError`` if something is at ``path`` already, before any work is done."""
    if path.exists():
        raise RunDirectoryError(f"{path}: exists already; name a new folder for the estimated run")


def save_run(path: Path, prediction: MemoryPrediction, communication: CommEstimate) -> None:
    """Write both predictions as a run directory of one rank, which stands for all.

    Raises ``RunDirectoryError`` if ``path`` exists or cannot be written.
    """
    refuse_existing_run(path)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    info = RunInfo(
        command=list(sys.argv),
        state="complete",
        started_at=now,
        finished_at=now,
        world_size=1,
        options=RecordOptions(active=0, ranks="0"),
        messages=[
            f"an estimate: rank 0 of {prediction.manifest.world_size} stands for all",
            *([] if prediction.estimate.fit is None else prediction.estimate.verdict[1:2]),
        ],
    )
    folder = path / rank_folder(0)
    try:
        folder.mkdir(parents=True)
        write_json(path / RUN_FILE, info)
        write_json(folder / MANIFEST_FILE, prediction.manifest)
        write_json(path / COMMUNICATION_FILE, communication)
        write_recording(folder / STORAGE_COUNT_FILE, prediction.recording)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror})") from error
