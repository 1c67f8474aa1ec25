"""Requests and plans of recordings, requests of summaries, in files of the run directory.

A request asks a running job for a recording, and its first rank takes the file away. That rank writes the
plan of every recording.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RecordingInfo
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.run_directory import RECORDING_FILE, TRIGGER_FILE, recording_folder, recording_number

_POLL_S = 0.2
_SLASH = ":"


class _Request(msgspec.Struct):
    reason: str


def request_recording(run: Path, reason: str) -> None:
    """Ask for a recording; a request that is still there says the same."""
    write_json(run / TRIGGER_FILE, _Request(reason))


def take_request(run: Path) -> str | None:
    """Take a request away and return its reason; None where there is none."""
    file = run / TRIGGER_FILE
    try:
        text = file.read_bytes()
        file.unlink()
    except OSError:
        return None
    try:
        return msgspec.json.decode(text, type=_Request).reason
    except msgspec.DecodeError:
        return "a request without a reason"


def summaries_folder(run: Path, node_rank: int) -> Path:
    """Return the folder in which a node's ranks ask its launcher for summaries."""
    return run / f".summaries-{node_rank:05d}"


def request_summary(run: Path, node_rank: int, folder: Path) -> None:
    """Ask for the summary of a rank's folder. Raises ``OSError`` where no launcher would see it."""
    name = str(folder.relative_to(run)).replace("/", _SLASH)
    (summaries_folder(run, node_rank) / name).touch()


def take_summary_requests(run: Path, requests: Path) -> list[Path]:
    """Take the requests of summaries away and return the folders that they name."""
    taken = []
    with suppress(OSError):  # the run directory was removed
        for file in sorted(requests.iterdir()):
            file.unlink()
            taken.append(run / file.name.replace(_SLASH, "/"))
    return taken


def ask_and_wait(run: Path, seconds: float) -> RecordingInfo | None:
    """Ask a running job for a recording and wait until its first rank plans one; None if it does not.

    Raises ``RunDirectoryError`` for a run that is over or was not told to listen.
    """
    info = open_run(run).info
    if info.state != "running":
        raise RunDirectoryError(f"{run}: the run has ended ({info.state}); only a running job can record")
    if not info.options.on_demand and info.options.signal is None:
        raise RunDirectoryError(f"{run}: accepts no requests; start it with record --on-demand")
    before = newest(run)
    request_recording(run, "fsdp2prof trigger")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if newest(run) > before and (plan := read_plan(run, before + 1)) is not None:
            return plan
        time.sleep(_POLL_S)
    return None


def write_plan(run: Path, plan: RecordingInfo) -> None:
    """Write the plan of a recording, for whoever reads the run."""
    folder = run / recording_folder(plan.number)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORDING_FILE, plan)


def read_plan(run: Path, number: int) -> RecordingInfo | None:
    """Return the plan of a recording; None where there is none yet."""
    try:
        text = (run / recording_folder(number) / RECORDING_FILE).read_bytes()
    except OSError:
        return None
    return msgspec.json.decode(text, type=RecordingInfo)


def newest(run: Path, *, before_attempt: int | None = None) -> int:
    """Return the highest number of a recording, 0 without any; of earlier attempts only if asked so."""
    numbers = [n for folder in run.glob("recording-*/") if (n := recording_number(folder.name)) is not None]
    if before_attempt is not None:
        plans = [(number, read_plan(run, number)) for number in numbers]
        numbers = [number for number, plan in plans if plan is None or plan.attempt < before_attempt]
    return max(numbers, default=0)


def bytes_taken(run: Path) -> int:
    """Return the bytes of all recordings of a run."""
    files = (file for folder in run.glob("recording-*/") for file in folder.rglob("*"))
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue  # another rank has just renamed it
    return total
