"""An estimate as a run directory, so that every view of a recorded run reads it too."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from isal import igzip

from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.files import replacing, write_json
from fsdp2prof.manifest import RankManifest, RecordOptions, RunInfo
from fsdp2prof.recorder.memory.recording_file import write_recording
from fsdp2prof.results.estimate import CommEstimate
from fsdp2prof.run_directory import (
    COMMUNICATION_FILE,
    MANIFEST_FILE,
    RUN_FILE,
    STORAGE_COUNT_FILE,
    TRACE_FILE,
    rank_folder,
)
from fsdp2prof.tables.trace import Trace

if TYPE_CHECKING:
    from fsdp2prof.estimators.memory import MemoryPrediction
    from fsdp2prof.estimators.step import StepPrediction


_PID = 1
"""Process of the host's threads; a device's is its index plus this."""

_METADATA = {
    "collective": "Collective name",
    "dtype": "dtype",
    "in_nelems": "In msg nelems",
    "out_nelems": "Out msg nelems",
    "group_size": "Group size",
    "process_group": "Process Group Name",
    "process_group_desc": "Process Group Description",
    "ranks": "Process Group Ranks",
    "seq": "Seq",
    "comms_id": "Comms Id",
}
"""Column of :class:`CollectiveArgs` -> key of an event's arguments."""


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace gzipped; times stay exact to the nanosecond. The file appears whole or not at all."""
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": trace.device.index or 0, "name": trace.device.name}],
        "distributedInfo": {
            "backend": "nccl",
            "rank": trace.rank,
            "world_size": trace.world_size,
            "pg_config": [
                {"pg_name": group.name, "pg_desc": group.desc, "ranks": group.ranks}
                for group in trace.process_groups
            ],
        },
        "baseTimeNanoseconds": trace.base_time_ns,
        "displayTimeUnit": "ms",
    }
    with replacing(path) as temporary, igzip.open(temporary, "wb") as file:  # type: ignore[no-untyped-call]
        file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')
        for number, event in enumerate(_events(trace)):
            file.write((b",\n" if number else b"") + event)
        file.write(b"\n]}\n")


def _events(trace: Trace) -> Iterator[bytes]:
    events = trace.events
    metadata = dict(_metadata(trace))
    for row, shapes in _shapes(trace):
        metadata[row] = metadata.get(row, {}) | shapes
    columns = zip(
        events.name.to_list(),
        events.category.to_list(),
        events.start_ns.tolist(),
        (events.end_ns - events.start_ns).tolist(),
        events.thread.tolist(),
        events.device.tolist(),
        events.stream.tolist(),
        events.correlation.tolist(),
        events.external_id.tolist(),
        events.bytes.tolist(),
        strict=True,
    )
    for row, (name, category, start, length, thread, device, stream, *identities) in enumerate(columns):
        keys = ("correlation", "External id", "bytes")
        args = {key: value for key, value in zip(keys, identities, strict=True) if value >= 0}
        if device >= 0:
            args |= {"device": device, "stream": stream}
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": _PID if device < 0 else _PID + 1 + device,
            "tid": thread if device < 0 else stream,
            "args": args | metadata.get(row, {}),
        }
        times = f',"ts":{_microseconds(start)},"dur":{_microseconds(length)}}}'
        yield msgspec.json.encode(event)[:-1] + times.encode()


def _metadata(trace: Trace) -> Iterator[tuple[int, dict[str, Any]]]:
    table = trace.collective_args
    columns = {key: getattr(table, name) for name, key in _METADATA.items()}
    values = {
        key: column.to_list() if hasattr(column, "to_list") else column.tolist()
        for key, column in columns.items()
    }
    for row, event in enumerate(table.event.tolist()):
        known = {key: values[key][row] for key in values}
        yield event, {key: value for key, value in known.items() if value is not None and value != -1}


def _shapes(trace: Trace) -> Iterator[tuple[int, dict[str, Any]]]:
    table = trace.shapes
    rows = zip(table.event.tolist(), table.dims.to_list(), table.types.to_list(), strict=True)
    for event, dims, types in rows:
        texts = {"Input Dims": dims, "Input type": types}
        yield event, {key: msgspec.Raw(text.encode()) for key, text in texts.items() if text is not None}


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def refuse_existing_run(path: Path) -> None:
    """Raise ``RunDirectoryError`` if something is at ``path`` already, before any work is done."""
    if path.exists():
        raise RunDirectoryError(f"{path}: exists already; name a new folder for the estimated run")


def save_run(path: Path, prediction: MemoryPrediction, communication: CommEstimate) -> None:
    """Write predicted memory and collectives as a run directory of one rank, which represents all.

    Raises ``RunDirectoryError`` if ``path`` exists or cannot be written.
    """
    estimate = prediction.estimate
    fit = [] if estimate.fit is None else estimate.verdict[1:2]
    with _new_run(path, prediction.manifest, fit) as folder:
        write_json(path / COMMUNICATION_FILE, communication)
        write_recording(folder / STORAGE_COUNT_FILE, prediction.recording)


def save_step_run(path: Path, prediction: StepPrediction) -> None:
    """Write a predicted step as a run directory of one rank, which represents all.

    Raises ``RunDirectoryError`` if ``path`` exists or cannot be written.
    """
    trace = prediction.trace
    manifest = RankManifest(
        state="complete",
        world_size=trace.world_size or 1,
        device=trace.device,
        process_groups=list(trace.process_groups),
        traced_steps=[step.step for rank in prediction.estimate.trace.ranks for step in rank.steps],
    )
    with _new_run(path, manifest, prediction.estimate.verdict[:2], active=1) as folder:
        write_trace(folder / TRACE_FILE, trace)


@contextmanager
def _new_run(path: Path, manifest: RankManifest, said: Sequence[str], *, active: int = 0) -> Iterator[Path]:
    """Make a run directory of rank 0 and give the rank's folder to write into."""
    refuse_existing_run(path)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    info = RunInfo(
        command=list(sys.argv),
        state="complete",
        started_at=now,
        finished_at=now,
        world_size=1,
        options=RecordOptions(active=active, ranks="0", memory=not active),
        messages=[f"an estimate: rank 0 represents all {manifest.world_size} ranks", *said],
    )
    folder = path / rank_folder(0)
    try:
        folder.mkdir(parents=True)
        write_json(path / RUN_FILE, info)
        write_json(folder / MANIFEST_FILE, manifest)
        yield folder
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror})") from error
