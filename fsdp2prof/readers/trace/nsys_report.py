"""Nsight Systems reports, exported with ``nsys export --type sqlite``, as the tables of a trace.

Kernels, copies and fills (``CUPTI_ACTIVITY_KIND_*``) are the device's work, ``CUPTI_ACTIVITY_KIND_RUNTIME``
the calls that launched it, and NVTX push/pop ranges what the host was in: torch's operators and FSDP2's
labels stand among them under ``torch.autograd.profiler.emit_nvtx`` and ``nsys profile
--pytorch=autograd-nvtx``. The schema is the documented one
(https://docs.nvidia.com/nsight-systems/2021.5/nsys-exporter/exported_data.html); tables and columns that an
older or newer exporter leaves out are taken as empty. The database is opened read-only, and of it only plain
tables and stored columns are asked for.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace.event_args import Shape, int_column, narrow, nvtx_shape
from fsdp2prof.readers.trace.event_columns import Piece, Share
from fsdp2prof.readers.trace.kineto_schema import Header
from fsdp2prof.readers.trace.tables import assemble
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import Trace

_T = TypeVar("_T")

_ROWS = 1 << 16
"""Rows that are turned into columns at a time."""
_TID_BITS = 24
"""A ``globalTid`` is a ``globalPid`` with the thread in its lowest bits."""
_TID = (1 << _TID_BITS) - 1
_LATEST_NS = 1 << 60
_PUSH_POP = 59
"""``NVTX_EVENTS.eventType`` of a range that one thread pushed and popped."""
_MOST_TEXT = 1 << 16

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_FILL = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALL = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGE = "NVTX_EVENTS"

_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
           10: "PtoP"}  # fmt: skip
"""``CUpti_ActivityMemcpyKind``, as Kineto writes it."""
_VERSION = re.compile(r"_v\d+(?:_ptsz|_ptds)?$")
_OPERATOR = re.compile(r"(?!FSDP::|fsdp2prof::)[A-Za-z_]\w*::\w|record_param_comms$|\w+Backward\d*$")
"""Suffix that torch writes itself, not on behalf of ``record_function``."""
_ADDED = re.compile(
    r"(?:, seq = \d+)?(?:, op_id = \d+)?(?:, sizes = (\[.*?\]))?(?:, input_op_ids = \[.*\])?$"
)
"""What ``emit_nvtx`` writes behind a name (torch/csrc/profiler/util.cpp, ``getNvtxStr``)."""


@dataclass(frozen=True, slots=True)
class NsysProcess:
    """A process of a report that used a device."""

    global_pid: int
    """Process id as in the report; -1 if it names no processes."""
    device: int
    """The one most of its kernels ran on."""


def nsys_processes(path: Path) -> list[NsysProcess]:
    """Return the processes with kernels, by device: on one node the order of local ranks, as a rule.

    Raises ``TraceError`` for a database that is not a report or has no kernels.
    """
    return _guarded(path, lambda report: report.processes)


def read_nsys_report(path: Path, *, rank: int | None = None) -> Trace:
    """Read one process of a report: the only one, otherwise number ``rank`` of ``nsys_processes``.

    Raises ``TraceError`` for a file that is not an exported report, is damaged, or has no kernels.
    """
    return _guarded(path, lambda report: _read(report, rank))


def _guarded(path: Path, read: Callable[[_Report], _T]) -> _T:
    """Read from an open report; turn an SQLite error into one line."""
    try:
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            return read(_Report(path, connection))
    except (sqlite3.Error, sqlite3.Warning, OSError, OverflowError) as error:
        raise TraceError(f"{path}: not a readable export of Nsight Systems: {error}") from None


def _read(report: _Report, rank: int | None) -> Trace:
    processes = report.processes
    if len(processes) > 1 and not (rank is not None and rank < len(processes)):
        raise TraceError(
            f"{report.path}: it has {len(processes)} processes, but none with number {rank}: choose one of "
            f"0 to {len(processes) - 1} with --ranks"
        )
    process = processes[rank if len(processes) > 1 and rank is not None else 0]
    share, warnings = Share(), []
    for number, (piece, spoilt) in enumerate(_pieces(report, process, share)):
        share.pieces[number] = piece
        if spoilt:
            warnings.append(f"{report.path}: {spoilt} rows without a start and an end are left out")
    if not report.columns(_RANGE):
        warnings.append(
            f"{report.path}: no NVTX ranges, so no layers: profile with --trace=cuda,nvtx "
            "--pytorch=autograd-nvtx, or train under torch.autograd.profiler.emit_nvtx()"
        )
    if report.count(_GRAPH):
        warnings.append(
            f"{report.path}: CUDA graphs are recorded whole; --cuda-graph-trace=node records their kernels"
        )
    header = Header(device_properties=report.devices(), base_time_ns=report.session_start_ns())
    return replace(assemble(str(report.path), header, share, warnings), capture="cut")


def _pieces(report: _Report, process: NsysProcess, share: Share) -> Iterator[tuple[Piece, int]]:
    names = _Names(report)
    device = ("deviceId", "streamId", "correlationId")
    for rows in report.rows(_KERNEL, process, (*device, "demangledName", "shortName", "mangledName")):
        yield _device_piece(share, rows, "kernel", [names.kernel(row[5:]) for row in rows])
    for rows in report.rows(_GRAPH, process, device):
        yield _device_piece(share, rows, "kernel", ["(a CUDA graph)"] * len(rows))
    for rows in report.rows(_COPY, process, (*device, "copyKind", "bytes")):
        copies = [f"Memcpy {_COPIES.get(row[5], 'of unknown kind')}" for row in rows]
        yield _device_piece(share, rows, "gpu_memcpy", copies, [row[6] for row in rows])
    for rows in report.rows(_FILL, process, (*device, "bytes")):
        fills = ["Memset (Device)"] * len(rows)
        yield _device_piece(share, rows, "gpu_memset", fills, [row[5] for row in rows])
    for rows in report.rows(_CALL, process, ("globalTid", "correlationId", "nameId")):
        calls = [names.call(row[4]) for row in rows]
        yield _host_piece(share, rows, calls, [row[3] for row in rows])
    for rows in report.rows(_RANGE, process, ("globalTid", "text", "textId"), f"eventType = {_PUSH_POP}"):
        yield _range_piece(share, rows, [names.range(text, number) for *_, text, number in rows])


def _device_piece(
    share: Share, rows: list[Any], category: str, names: Sequence[str], sizes: Sequence[Any] | None = None
) -> tuple[Piece, int]:
    return _piece(
        share,
        rows,
        names,
        [category] * len(rows),
        device=int_column([row[2] for row in rows]),
        stream=int_column([row[3] for row in rows]),
        correlation=int_column([row[4] for row in rows]),
        bytes=None if sizes is None else int_column(sizes),
    )


def _host_piece(
    share: Share, rows: list[Any], names: Sequence[str], correlation: Sequence[Any]
) -> tuple[Piece, int]:
    kinds = ["cuda_runtime" if name.startswith("cuda") else "cuda_driver" for name in names]
    return _piece(share, rows, names, kinds, correlation=int_column(correlation))


def _range_piece(share: Share, rows: list[Any], texts: Sequence[str]) -> tuple[Piece, int]:
    told = [_range(text) for text in texts]
    piece, spoilt = _piece(
        share,
        rows,
        [name for name, _ in told],
        ["cpu_op" if _OPERATOR.match(name) else "user_annotation" for name, _ in told],
    )
    if not spoilt:  # else rows have moved
        shapes = [nvtx_shape(row, name, sizes) for row, (name, sizes) in enumerate(told) if sizes]
        piece.shapes.extend(shape for shape in shapes if shape is not None)
    return piece, spoilt


def _piece(
    share: Share, rows: list[Any], names: Sequence[str], categories: Sequence[str], **known: IntArray | None
) -> tuple[Piece, int]:
    """Columns of rows that begin with start and end; device rows have no thread."""
    start, end = int_column([row[0] for row in rows]), int_column([row[1] for row in rows])
    good = (start >= 0) & (end >= start) & (end < _LATEST_NS)
    none = np.full(len(rows), -1, dtype=np.int64)
    on_device = known.get("device") is not None
    thread = none if on_device else int_column([row[2] for row in rows])
    process = (thread >> _TID_BITS).tolist()
    columns = {
        "start_ns": start,
        "duration_ns": end - start,
        "name": share.names.codes(names, len(rows)),
        "category": share.categories.codes(categories, len(rows)),
        "pid": none if on_device else share.pids.codes(process, len(rows)),
        "tid": share.tids.codes((thread & _TID).tolist(), len(rows)),
        **{
            name: none if (column := known.get(name)) is None else column
            for name in ("device", "stream", "correlation", "external_id", "bytes")
        },
    }
    events = {name: narrow(values[good]) for name, values in columns.items()}
    shapes: list[Shape] = []
    return Piece(events=events, memory={}, metadata=[], shapes=shapes, syncs=[]), int((~good).sum())


@lru_cache(maxsize=1 << 14)
def _range(text: str) -> tuple[str, str | None]:
    """Name of a range, and the sizes that ``emit_nvtx`` wrote behind it."""
    added = _ADDED.search(text)
    if added is None or not added[0]:
        return text, None
    return text[: added.start()], added[1]


class _Names:
    """Texts by their numbers in ``StringIds``, looked up as they are met."""

    def __init__(self, report: _Report) -> None:
        self._report = report
        self._known: dict[Any, str] = {}

    def kernel(self, numbers: Sequence[Any]) -> str:
        """Name of a kernel: the first of several that is there."""
        return next((text for number in numbers if (text := self._text(number))), "(a kernel without a name)")

    def call(self, number: Any) -> str:
        """Name of a call into the runtime or driver, without the version of its interface."""
        return _VERSION.sub("", self._text(number) or "cuda call")

    def range(self, text: Any, number: Any) -> str:
        """Name of an NVTX range, whose text is in its row or registered."""
        return (text if isinstance(text, str) else self._text(number))[:_MOST_TEXT]

    def _text(self, number: Any) -> str:
        if number not in self._known:
            self._known[number] = self._report.text(number)
        return self._known[number]


class _Report:
    """An open report: which tables and columns it has, and their rows."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        connection.text_factory = lambda text: text.decode(errors="replace")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        self._tables = {
            name
            for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            if isinstance(sql, str) and not re.match(r"\s*CREATE\s+VIRTUAL", sql, re.IGNORECASE)
        }
        self._columns: dict[str, frozenset[str]] = {}
        if _KERNEL not in self._tables:
            what = "has no CUDA kernels: profile with --trace=cuda,nvtx"
            raise TraceError(
                f"{path}: {what}" if self._is_export() else f"{path}: not an export of Nsight Systems"
            )
        self.processes = self._processes()

    def columns(self, table: str) -> frozenset[str]:
        """Names of the stored columns of a table; none for anything but a plain table."""
        if table not in self._columns:
            told = self._connection.execute(f"PRAGMA table_xinfo({table})") if table in self._tables else []
            self._columns[table] = frozenset(row[1] for row in told if row[6] == 0)
        return self._columns[table]

    def count(self, table: str) -> int:
        """Number of rows of a table; 0 if it is empty or missing."""
        if not self.columns(table):
            return 0
        return int(self._connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])

    def rows(
        self, table: str, process: NsysProcess, columns: Sequence[str], only: str | None = None
    ) -> Iterator[list[Any]]:
        """Yield rows of one process, some at a time: start, end, then the columns; null for one not there."""
        there = self.columns(table)
        if not {"start", "end"} <= there:
            return
        chosen = ", ".join(f'"{name}"' if name in there else "NULL" for name in ("start", "end", *columns))
        wanted = [only] if only is not None and only.split(" ")[0] in there else []
        if process.global_pid >= 0 and "globalPid" in there:
            wanted.append(f"globalPid = {process.global_pid}")
        elif process.global_pid >= 0 and "globalTid" in there:
            wanted.append(f"(globalTid >> {_TID_BITS}) = {process.global_pid >> _TID_BITS}")
        where = f" WHERE {' AND '.join(wanted)}" if wanted else ""
        cursor = self._connection.execute(f"SELECT {chosen} FROM {table}{where}")
        while rows := cursor.fetchmany(_ROWS):
            yield rows

    def text(self, number: Any) -> str:
        """Return a registered text; empty if missing."""
        if not isinstance(number, int) or not {"id", "value"} <= self.columns("StringIds"):
            return ""
        row = self._connection.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
        return row[0] if row is not None and isinstance(row[0], str) else ""

    def devices(self) -> list[dict[str, Any]]:
        """Properties of the GPUs, as a Kineto trace has them."""
        there = self.columns("TARGET_INFO_GPU")
        wanted = ("id", "name", "totalMemory", "computeMajor", "computeMinor")
        keys = ("id", "name", "totalGlobalMem", "computeMajor", "computeMinor")
        if not {"id", "name"} <= there:
            return []
        chosen = ", ".join(f'"{name}"' if name in there else "NULL" for name in wanted)
        rows = self._connection.execute(f"SELECT {chosen} FROM TARGET_INFO_GPU").fetchmany(256)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def session_start_ns(self) -> int:
        """Unix time at which the report's clock was 0; 0 where unknown."""
        if "utcEpochNs" not in self.columns("TARGET_INFO_SESSION_START_TIME"):
            return 0
        row = self._connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        return row[0] if row is not None and isinstance(row[0], int) else 0

    def _is_export(self) -> bool:
        return not self._tables.isdisjoint(
            {"StringIds", "META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV", _RANGE}
        )

    def _processes(self) -> list[NsysProcess]:
        there = self.columns(_KERNEL)
        pid = "globalPid" if "globalPid" in there else "-1"
        device = "deviceId" if "deviceId" in there else "0"
        rows = self._connection.execute(f"SELECT {pid}, {device}, COUNT(*) FROM {_KERNEL} GROUP BY 1, 2")
        most: dict[int, tuple[int, int]] = {}
        for process, index, count in rows.fetchmany(_ROWS):
            known = isinstance(process, int) and isinstance(index, int)
            if known and count > most.get(process, (0, 0))[0]:
                most[process] = (count, index)
        if not most:
            raise TraceError(f"{self.path}: has no CUDA kernels: profile with --trace=cuda,nvtx")
        found = [NsysProcess(process, index) for process, (_, index) in most.items()]
        return sorted(found, key=lambda one: (one.device, one.global_pid))
