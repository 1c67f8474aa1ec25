"""A timeline as the SQLite database that ``nsys export`` makes, by its documented schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from synthetic.kineto import BASE_NS, EPOCH_NS, PID
from synthetic.world import Recording

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, totalMemory INTEGER,
    computeMajor INTEGER, computeMinor INTEGER, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
    eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""

_KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}


def global_pid(rank: int) -> int:
    """The process of a rank, as reports number processes."""
    return (PID + rank) << 24


def write_nsys(
    recordings: Sequence[Recording], path: Path, *, nvtx: bool = True, added: bool = False
) -> Path:
    """Write one report with a process a rank.

    ``nvtx``: whether NVTX was traced; ``added``: whether names bear what ``emit_nvtx`` writes behind them.
    """
    with closing(sqlite3.connect(path)) as report:
        report.executescript(_SCHEMA)
        report.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.15.1')")
        report.execute(
            "INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, NULL, NULL)", (BASE_NS + EPOCH_NS - 1000,)
        )
        strings: dict[str, int] = {}
        for recording in recordings:
            _write(report, recording, strings, nvtx=nvtx, added=added)
        rows = [(number, text) for text, number in strings.items()]
        report.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        report.commit()
    return path


def _write(
    report: sqlite3.Connection, recording: Recording, strings: dict[str, int], *, nvtx: bool, added: bool
) -> None:
    def text(value: str) -> int:
        return strings.setdefault(value, len(strings) + 1)

    process, device = global_pid(recording.rank), recording.rank % 8
    report.execute(
        "INSERT INTO TARGET_INFO_GPU VALUES (0, ?, 'NVIDIA H100 80GB HBM3', 84942979072, 9, 0, 132)",
        (device,),
    )
    for activity in recording.timeline.device:
        place = (activity.start + 1000, activity.end + 1000, device, 1, activity.stream, activity.correlation)
        if activity.category == "kernel":
            row = (*place, process, text(activity.name), text(activity.name.split("<")[0]), None)
            report.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({_marks(row)})", row)
            continue
        size = activity.args.get("bytes", 0)
        if activity.category == "gpu_memcpy":
            kind = next(number for word, number in _KINDS.items() if word in activity.name)
            copy = (*place, process, size, kind)
            report.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({_marks(copy)})", copy)
        else:
            fill = (*place, process, 0, size)
            report.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES ({_marks(fill)})", fill)
    for number, event in enumerate(recording.timeline.host):
        thread = process | event.thread
        if event.category.startswith("cuda_"):
            call = (0, thread, event.correlation, text(f"{event.name}_v7000"), 0)
            values = (event.start + 1000, event.end + 1000, *call)
            report.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({_marks(values)})", values)
        elif nvtx:
            name = event.name
            if added:
                dims = event.args.get("Input Dims")
                sizes = f", sizes = {dims}" if dims else ""
                name = f"{name}, op_id = {number + 1}{sizes}"
            own, registered = (None, text(name)) if number % 2 else (name, None)
            span = (event.start + 1000, event.end + 1000, 59, None, None, own, thread, None, registered, 0)
            report.execute(f"INSERT INTO NVTX_EVENTS VALUES ({_marks(span)})", span)


def _marks(row: Sequence[object]) -> str:
    return ", ".join("?" * len(row))
