"""A timeline as the Kineto JSON torch writes on CUDA."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from synthetic.timeline import Activity, HostEvent
from synthetic.world import Recording

PID = 4242
BASE_NS = 1_711_964_646_000_000_000
EPOCH_NS = 4_458_676_400_000_000_000
"""Kineto writes microseconds since ``baseTimeNanoseconds``; this is the trace's own first instant."""


def write(
    recording: Recording,
    path: Path,
    *,
    keep: Callable[[Activity], bool] = lambda _: True,
    launches: bool = True,
    seq: bool = True,
    comms: bool = True,
    head: bool = True,
) -> Path:
    """Write one rank's trace (gzipped if ``path`` ends in ``.gz``).

    ``keep`` drops device activities together with their launches (a lost collective); ``launches=False``
    drops the launches of all device activities (work queued before the window);
    ``seq`` and ``comms``: whether Seq and Comms Id are known (older torch writes neither); ``head``: whether
    the file begins with ``distributedInfo``.
    """
    timeline = recording.timeline
    device = recording.rank % 8
    dropped = {a.correlation for a in timeline.device if not keep(a)}
    if not launches:
        dropped |= {a.correlation for a in timeline.device}
    hidden = {name for name, known in (("Seq", seq), ("Comms Id", comms)) if not known}

    def us(ns: int) -> str:
        total = ns + EPOCH_NS + recording.skew_ns
        return f"{total // 1000}.{total % 1000:03d}"

    events: list[str] = []

    def add(ph: str, ts: int, **fields: Any) -> None:
        duration = fields.pop("duration_ns", None)
        text = json.dumps({"ph": ph, **fields})
        span = "" if duration is None else f', "dur": {duration // 1000}.{duration % 1000:03d}'
        times = f', "ts": {us(ts)}{span}'
        events.append(text[:-1] + times + "}")

    origin = min(e.start for e in timeline.host)
    for pid, name, label in ((PID, "python3", "CPU"), (device, "python3", f"GPU {device}")):
        add("M", origin, name="process_name", pid=pid, tid=0, args={"name": name})
        add("M", origin, name="process_labels", pid=pid, tid=0, args={"labels": label})
    for event in timeline.host:
        if event.correlation in dropped and event.category.startswith("cuda_"):
            continue
        add(
            "X",
            event.start,
            cat=event.category,
            name=event.name,
            pid=PID,
            tid=event.thread,
            args=_host_args(event, hidden),
            duration_ns=event.end - event.start,
        )
        if event.correlation >= 0:
            add("s", event.start, id=event.correlation, pid=PID, tid=event.thread, cat="ac2g", name="ac2g")
    kept = [a for a in timeline.device if keep(a)]
    for activity in kept:
        add(
            "X",
            activity.start,
            cat=activity.category,
            name=activity.name,
            pid=device,
            tid=activity.stream,
            args=_device_args(activity, device, hidden),
            duration_ns=activity.end - activity.start,
        )
        add(
            "f",
            activity.start,
            id=activity.correlation,
            pid=device,
            tid=activity.stream,
            cat="ac2g",
            name="ac2g",
            bp="e",
        )
    for event, stream, start, end in _mirrored(timeline.host, kept):
        add(
            "X",
            start,
            cat="gpu_user_annotation",
            name=event.name,
            pid=device,
            tid=stream,
            args={"External id": event.external_id},
            duration_ns=end - start,
        )
    add(
        "i",
        origin,
        name="Iteration Start: PyTorch Profiler",
        s="g",
        pid="Traces",
        tid="Trace PyTorch Profiler",
    )
    known = _header(recording, device)
    header = json.dumps(known if head else {"schemaVersion": 1}, indent=1)
    body = header[:-2] + ',\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}"
    path.write_bytes(gzip.compress(body.encode(), 1) if path.suffix == ".gz" else body.encode())
    return path


def write_run(recordings: Sequence[Recording], folder: Path, **options: Any) -> Path:
    """Write one trace per rank into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for recording in recordings:
        write(recording, folder / f"rank{recording.rank}_trace.json.gz", **options)
    return folder


def _header(recording: Recording, device: int) -> dict[str, Any]:
    groups = {c.group: c for c in recording.timeline.collectives}
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": device, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84942979072, "computeMajor": 9,
             "computeMinor": 0, "numSms": 132}
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": recording.rank,
            "world_size": recording.world_size,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": name,
                    "pg_desc": "undefined" if c.mesh_dim is None else f"mesh_{c.mesh_dim}",
                    "backend_config": "cuda:nccl",
                    "pg_size": c.group_size,
                    "ranks": list(c.ranks),
                }
                for name, c in sorted(groups.items())
            ],
            "nccl_version": "2.27.5",
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "record_shapes": 1,
    }  # fmt: skip


def _host_args(event: HostEvent, hidden: set[str]) -> dict[str, Any]:
    args: dict[str, Any] = {"External id": event.external_id}
    if event.category.startswith("cuda_"):
        args |= {"cbid": 211, "correlation": event.correlation}
    elif event.category == "user_annotation":
        args |= {"Record function id": 0}
    return args | {key: value for key, value in event.args.items() if key not in hidden}


def _device_args(activity: Activity, device: int, hidden: set[str]) -> dict[str, Any]:
    args: dict[str, Any] = {
        "External id": activity.external_id,
        "device": device,
        "context": 1,
        "stream": activity.stream,
        "correlation": activity.correlation,
    }
    if activity.category == "kernel":
        args |= {"queued": 0, "registers per thread": 96, "grid": [8, 1, 1], "block": [512, 1, 1]}
    else:
        args |= {"bytes": 1 << 20}
    return args | {key: value for key, value in activity.args.items() if key not in hidden}


def _mirrored(host: list[HostEvent], device: list[Activity]) -> list[tuple[HostEvent, int, int, int]]:
    """Kineto's device-side copies of annotations: per stream, the span of what each range launched."""
    mirrored = []
    for event in host:
        if event.category != "user_annotation":
            continue
        spans: dict[int, tuple[int, int]] = {}
        for a in device:
            if event.start <= a.launch < event.end:
                start, end = spans.get(a.stream, (a.start, a.end))
                spans[a.stream] = min(start, a.start), max(end, a.end)
        mirrored += [(event, stream, start, end) for stream, (start, end) in spans.items()]
    return mirrored
