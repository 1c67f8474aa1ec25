"""The least a trace loader can do in one process, as a yardstick: decode every event, keep 10 columns.

isal gunzip, a typed msgspec decode in 8 MB pieces, columns as numpy arrays, and exact interval arithmetic on
the kernels: how much of the communication is hidden behind compute. Times are kept as float64 microseconds,
which loses nanoseconds of Unix time; there is no metadata, no launch, no layer and no step in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from isal import igzip


class Args(msgspec.Struct, gc=False):
    external_id: Any = msgspec.field(default=-1, name="External id")
    correlation: Any = -1
    stream: Any = -1


class Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str = ""
    pid: Any = 0
    tid: Any = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Args | None = None


def run_floor(path: Path) -> dict[str, Any]:
    """Keep 10 columns of every event and compute the exact overlap of the whole trace."""
    decoder = msgspec.json.Decoder(list[Event])
    names: dict[str, int] = {}
    columns: list[list[Any]] = [[] for _ in range(10)]
    empty = Args()

    def keep(text: bytes) -> None:
        events = decoder.decode(b"[%b]" % text)
        args = [e.args or empty for e in events]
        pieces = (
            np.array([e.ts for e in events]),
            np.array([e.dur for e in events]),
            np.array([names.setdefault(e.ph, len(names)) for e in events], dtype=np.int32),
            np.array([names.setdefault(e.cat, len(names)) for e in events], dtype=np.int32),
            np.array([names.setdefault(e.name, len(names)) for e in events], dtype=np.int32),
            np.array([e.pid if type(e.pid) is int else -1 for e in events], dtype=np.int64),
            np.array([e.tid if type(e.tid) is int else -1 for e in events], dtype=np.int64),
            np.array([a.external_id for a in args], dtype=np.int64),
            np.array([a.correlation for a in args], dtype=np.int64),
            np.array([a.stream if type(a.stream) is int else -1 for a in args], dtype=np.int64),
        )
        for column, piece in zip(columns, pieces, strict=True):
            column.append(piece)

    with igzip.open(path) as stream:  # type: ignore[no-untyped-call]
        buffer = stream.read(8 << 20)
        buffer = buffer[re.search(rb'"traceEvents"\s*:\s*\[', buffer).end() :]  # type: ignore[union-attr]
        while more := stream.read(8 << 20):
            cut = re.compile(rb"\},\s*\{").search(buffer, len(buffer) - 65536)
            assert cut is not None
            keep(buffer[: cut.start() + 1])
            buffer = buffer[cut.start() :].lstrip(b"}, \n") + more
        keep(buffer[: buffer.rindex(b"]")].rstrip())
    ts, dur, _, cat, name, *_ = (np.concatenate(column) for column in columns)
    kernel = np.flatnonzero(cat == names["kernel"])
    text = list(names)
    is_comm = np.array(["nccl" in text[i] for i in range(len(text))])[name[kernel]]
    start = np.rint(ts[kernel] * 1000).astype(np.int64)
    end = start + np.rint(dur[kernel] * 1000).astype(np.int64)

    def union(mask: Any) -> Any:
        order = np.argsort(start[mask], kind="stable")
        s, e = start[mask][order], np.maximum.accumulate(end[mask][order])
        first = np.flatnonzero(np.r_[True, s[1:] > e[:-1]])
        return s[first], np.r_[e[first[1:] - 1], e[-1]]

    def covered(intervals: Any, at: Any) -> Any:
        s, e = intervals
        before = np.concatenate([[0], np.cumsum(e - s)])
        row = np.searchsorted(s, at, side="right") - 1
        return np.where(row < 0, 0, before[row] + np.minimum(at, e[row]) - s[row])

    comm, compute = union(is_comm), union(~is_comm)
    hidden = int((covered(compute, comm[1]) - covered(compute, comm[0])).sum())
    total = int((comm[1] - comm[0]).sum())
    return {"events": len(ts), "comm_ns": total, "overlap_frac": hidden / total}
