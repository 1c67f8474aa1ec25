"""NCCL Inspector's logs (``NCCL_INSPECTOR_ENABLE=1``): one JSON object per line, one file per process.

Format: ``plugins/profiler/inspector/inspector_json.cc`` of github.com/NVIDIA/nccl, versions 4.0 to 4.3 of
its output. Up to 4.2 every record contains its communicator; from 4.3 on a ``dump_stats`` record gives it
for those that follow. Sends, receives and proxy steps are left out.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import numpy as np
from isal import igzip, isal_zlib

from fsdp2prof.errors import InputError
from fsdp2prof.readers.limits import MOST_RANKS
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.nccl import InspectedCalls, InspectedCommunicator, InspectedProcess

UNREADABLE: Any = (OSError, EOFError, isal_zlib.error)  # its stub declares an instance
"""Errors of reading a log, packed or not."""

_LONGEST_LINE = 1 << 20
_BEGINNING = 1 << 12
_KEYS = (b'"coll_perf"', b'"p2p_perf"', b'"dump_stats"', b'"inspector_output_format_version"')

_OPS = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
    "AlltoAll": "all_to_all",
}

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class _Header(msgspec.Struct):
    id: _Text
    rank: _Rank
    n_ranks: _Rank
    nnodes: _Rank = 1
    comm_name: _Text = ""


class _Metadata(msgspec.Struct):
    hostname: _Text = ""
    pid: int = -1


class _Collective(msgspec.Struct):
    coll: _Text
    coll_sn: _Count
    coll_msg_size_bytes: _Count
    coll_exec_time_us: _Count
    coll_algo: _Text | None = None
    coll_proto: _Text | None = None
    coll_timing_source: _Text | None = None


class _Stats(msgspec.Struct):
    coll_dropped_since_last_dump: _Count = 0


class _Record(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    dump_stats: _Stats | None = None


_DECODER = msgspec.json.Decoder(_Record)


def looks_like_inspector(path: Path) -> bool:
    """Whether a file begins like a log of the Inspector."""
    try:
        with opened(path) as file:
            beginning = file.read(_BEGINNING)
    except UNREADABLE:
        return False
    return beginning[:1] == b"{" and any(key in beginning for key in _KEYS)


def read_inspector(path: Path) -> InspectedProcess:
    """Read one process's log. Raises ``InputError`` for a file without a record in it."""
    columns = _Columns()
    try:
        with opened(path) as file:
            while line := file.readline(_LONGEST_LINE):
                columns.add(line)
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not columns.records:
        raise InputError(f"{path}: no record of NCCL Inspector in it; did the job run with its JSON output?")
    return InspectedProcess(
        source=str(path),
        host=columns.host,
        pid=columns.pid,
        communicators=columns.communicators,
        calls=columns.table(),
        dropped=columns.dropped,
        unread=columns.unread,
    )


def opened(path: Path) -> BinaryIO:
    """Open a log, which may have been packed with gzip after it was written."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast("BinaryIO", igzip.open(path, "rb") if packed else path.open("rb"))  # type: ignore[no-untyped-call]


class _Columns:
    """Records to columns, line by line."""

    def __init__(self) -> None:
        self.communicators: dict[str, InspectedCommunicator] = {}
        self.records = self.unread = self.dropped = 0
        self.host, self.pid = "", -1
        self._said: _Header | None = None
        self._texts: dict[str | None, int] = {}
        self._codes = [array("i") for _ in range(5)]
        self._numbers = [array("q") for _ in range(3)]

    def add(self, line: bytes) -> None:
        """Read one line; a line that is not a record of a known communicator is counted."""
        if line.isspace():
            return
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.unread += 1
            return
        header = record.header or self._said
        if record.dump_stats is not None:
            self._said = record.header
            self.dropped += record.dump_stats.coll_dropped_since_last_dump
        if header is None:
            self.unread += 1
            return
        self.records += 1
        if record.metadata is not None and not self.host:
            self.host, self.pid = record.metadata.hostname, record.metadata.pid
        if header.id not in self.communicators:
            self.communicators[header.id] = InspectedCommunicator(
                id=header.id,
                name=header.comm_name if header.comm_name not in ("", "unknown") else None,
                rank=header.rank,
                size=header.n_ranks,
                nodes=header.nnodes,
            )
        if record.coll_perf is not None:
            self._call(header.id, record.coll_perf)

    def _call(self, communicator: str, one: _Collective) -> None:
        op = _OPS.get(one.coll, "other")
        texts = (communicator, op, one.coll_algo, one.coll_proto, one.coll_timing_source)
        for codes, text in zip(self._codes, texts, strict=True):
            codes.append(-1 if text is None else self._texts.setdefault(text, len(self._texts)))
        numbers = (one.coll_sn, one.coll_msg_size_bytes, one.coll_exec_time_us * 1000)
        for column, number in zip(self._numbers, numbers, strict=True):
            column.append(number)

    def table(self) -> InspectedCalls:
        """Everything that was taken."""
        values = tuple(str(text) for text in self._texts)
        communicator, op, algorithm, protocol, timing = (
            Strings(np.asarray(codes, dtype=np.int32), values) for codes in self._codes
        )
        seq, size, duration = (np.asarray(column, dtype=np.int64) for column in self._numbers)
        return InspectedCalls(
            communicator=communicator,
            op=op,
            seq=seq,
            message_bytes=size,
            duration_ns=duration,
            algorithm=algorithm,
            protocol=protocol,
            timing=timing,
        )
