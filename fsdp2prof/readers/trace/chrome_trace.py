"""Kineto (Chrome) trace files as tables: ``read_trace(path) -> Trace``.

CUDA, ROCm and CPU/gloo traces of torch 1.12 and newer, plain or gzip. Times are exact integer nanoseconds.
A large file is decoded by several processes, each taking every n-th chunk.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace import kineto_schema as schema
from fsdp2prof.readers.trace.event_args import TextTimeNeededError
from fsdp2prof.readers.trace.event_columns import Share
from fsdp2prof.readers.trace.event_stream import PIECE_BYTES, WrongCutError, decode_pieces, read_head
from fsdp2prof.readers.trace.tables import assemble, header_integer
from fsdp2prof.tables.trace import Trace
from fsdp2prof.worker_processes import Task, usable_cores

_MAX_WORKERS = 8
"""Every worker gunzips the whole file, which is a tenth of decoding it: more than these gain little."""
_OTHER_FORMATS = {b"SQLite format 3\0": "fsdp2prof.readers.trace.nsys_report"}
_LONGEST_MAGIC = max(map(len, _OTHER_FORMATS))
_BYTES_PER_WORKER = {True: 2 << 20, False: 24 << 20}
"""File size (compressed or not) that is worth the start of another process."""
_LONG_TIME = re.compile(rb'"ts":\s*\d{14,}\.\d')
"""A timestamp that is decoded as text (``LONGEST_US``); others are found in decoded events."""


def read_trace(
    path: str | Path, *, rank: int | None = None, workers: int | None = None, piece_bytes: int = PIECE_BYTES
) -> Trace:
    """Read one rank's trace file.

    ``rank`` is the caller's knowledge (from a run directory or a file name), used if the file does not
    state it. ``workers`` processes decode it together (default: by its size, at most the number of cores).
    ``piece_bytes`` of JSON are decoded at a time, so memory is bounded by the stored columns.

    A report of Nsight Systems exported to SQLite (:mod:`fsdp2prof.readers.trace.nsys_report`) is also
    read; ``rank`` selects one of several processes in it.

    Raises ``TraceError`` for a file that is missing, empty, truncated, or not a Kineto trace.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a folder; name one trace file")
    if (reader := _other_reader(path)) is not None:
        report: Trace = reader.read_nsys_report(path, rank=rank)
        return report if rank is None else replace(report, rank=rank)
    workers = _worth(path) if workers is None else workers
    trace = _read_together(path, workers, piece_bytes) if workers > 1 else None
    if trace is None:
        trace = _read_alone(path, piece_bytes)
    return replace(trace, rank=rank) if trace.rank is None and rank is not None else trace


def peek_rank(path: str | Path) -> tuple[int | None, int | None]:
    """Return (rank, world size) from the start of a trace file; None if missing.

    Reads no more than the start. Raises ``TraceError`` for a file that does not begin like a trace.
    """
    _refuse_unexported(Path(path))
    if _other_reader(Path(path)) is not None:
        return None, None
    try:
        distributed = schema.FLOAT_TIMES.document.decode(read_head(Path(path))).distributed_info
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: not a readable Kineto trace: {error}") from None
    return header_integer(distributed, "rank"), header_integer(distributed, "world_size")


def processes_in(path: Path) -> int:
    """Return how many processes with kernels a file has: one, but for a report of Nsight Systems.

    Raises ``TraceError`` for a database that is not a report or has no kernels.
    """
    reader = _other_reader(path)
    return 1 if reader is None else len(reader.nsys_processes(path))


def _other_reader(path: Path) -> Any:
    """Return the module that reads a file of another format, known by its first bytes; None for Kineto's."""
    try:
        with path.open("rb") as file:
            begin = file.read(_LONGEST_MAGIC)
    except OSError:
        return None
    name = next((name for magic, name in _OTHER_FORMATS.items() if begin.startswith(magic)), None)
    return None if name is None else import_module(name)


def _refuse_unexported(path: Path) -> None:
    """Nsight Systems' own files are not documented; its export is."""
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: a report of Nsight Systems: nsys export --type sqlite {path.name}")


def _read_alone(path: Path, piece_bytes: int) -> Trace:
    warnings: list[str] = []
    reader = _Reader()
    decode_pieces(path, reader.add, warnings, piece_bytes)
    return assemble(str(path), reader.header, reader.share, warnings)


def _read_together(path: Path, workers: int, piece_bytes: int) -> Trace | None:
    """Read with the help of other processes; None if a guessed cut was wrong, which a single reader
    repairs."""
    helpers = [Task(_read_share, path, index, workers, piece_bytes) for index in range(1, workers)]
    try:
        warnings: list[str] = []
        reader = _Reader()
        decode_pieces(path, reader.add, warnings, piece_bytes, turn=(0, workers))
        for helper in helpers:
            share = helper.result()
            if share is None:
                return None
            reader.share.merge(share)
    except WrongCutError:
        return None
    finally:
        for helper in helpers:
            helper.cancel()
    return assemble(str(path), reader.header, reader.share, warnings)


def _read_share(path: Path, index: int, workers: int, piece_bytes: int) -> Share | None:
    """Decode every ``workers``-th chunk from ``index`` on; None if a guessed cut was wrong."""
    reader = _Reader()
    try:
        decode_pieces(path, reader.add, [], piece_bytes, turn=(index, workers))
    except WrongCutError:
        return None
    return reader.share


def _worth(path: Path) -> int:
    """Return how many processes to read a file with."""
    try:
        size = path.stat().st_size
    except OSError:
        return 1
    return max(1, min(usable_cores(), _MAX_WORKERS, size // _BYTES_PER_WORKER[path.suffix == ".gz"]))


class _Reader:
    """Decodes chunks of one file into a share; has its header once the last chunk is decoded."""

    def __init__(self) -> None:
        self.share = Share()
        self.header = schema.Header()
        self._kinds = schema.FLOAT_TIMES

    def add(self, text: bytes, number: int, is_last: bool) -> None:
        """Decode one chunk; raises ``msgspec.DecodeError`` if it is invalid."""
        if not self.share.pieces and _LONG_TIME.search(text):
            self._kinds = schema.TEXT_TIMES
        try:
            self.share.add(number, self._decode(text, is_last), self._kinds)
        except TextTimeNeededError:
            self._kinds = schema.TEXT_TIMES
            self.share.add(number, self._decode(text, is_last), self._kinds)

    def _decode(self, text: bytes, is_last: bool) -> list[Any]:
        if not is_last:
            return self._kinds.events.decode(text)  # type: ignore[no-any-return]
        document = self._kinds.document.decode(text)
        events, document.events = document.events, []
        self.header = document
        return events  # type: ignore[no-any-return]
