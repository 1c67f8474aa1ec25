"""A cache of read traces: the second analysis of a large trace does not decode it again.

The columns of a :class:`Trace` are kept as plain arrays (nothing pickled) behind a line of JSON that says
what they are, beside the trace, or in the user's cache folder where that cannot be written. They are mapped
into memory, not copied. A cache counts only for the same bytes of the file and the same reader. It is written
by rename, checked when it is read, and never fatal.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields, replace
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from fsdp2prof import backends, readers, tables
from fsdp2prof.files import replacing
from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.readers.trace.nsys_report import is_nsys_report
from fsdp2prof.tables import (
    CollectiveArgs,
    EventTable,
    LabelTable,
    MemoryEventTable,
    ShapeTable,
    Strings,
    SyncTable,
    Table,
    Trace,
)

__all__ = ["cache_files", "read_trace_cached"]

_SUFFIX = ".fsdp2prof-cache"
_WORTH_BYTES = {True: 1 << 20, False: 12 << 20}
"""File size (compressed or not) from which reading takes long enough to be worth a cache."""
_HASHED_BYTES = 1 << 18
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError)

_Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
_T = TypeVar("_T", bound=Table)


class _Head(msgspec.Struct):
    """What is not a column."""

    key: str
    rank: int | None
    world_size: int | None
    device: DeviceInfo
    process_groups: tuple[ProcessGroupInfo, ...]
    base_time_ns: int
    threads: tuple[str, ...]
    warnings: tuple[str, ...]
    columns: tuple[tuple[str, str, int], ...]
    """Name, dtype and bytes of each array that follows."""
    checksum: int
    """CRC-32 of their bytes."""


def read_trace_cached(
    path: str | Path, *, rank: int | None = None, workers: int | None = None, worth_bytes: int | None = None
) -> Trace:
    """Read a trace as ``read_trace`` does, from its cache if it has one, leaving one if not.

    Not cached are reports of Nsight Systems, and files smaller than ``worth_bytes`` (default: what reads in
    about a tenth of a second).
    Raises ``TraceError`` like ``read_trace``.
    """
    path = Path(path)
    worth_bytes = _WORTH_BYTES[path.suffix == ".gz"] if worth_bytes is None else worth_bytes
    if not path.is_file() or path.stat().st_size < worth_bytes or is_nsys_report(path):
        return read_trace(path, rank=rank, workers=workers)
    before = _state(path)
    key = _key(path) if _may_have_cache(path) else None
    candidates = () if key is None else cache_files(path, key)
    trace = next((found for file in candidates if (found := _load(file, key, str(path)))), None)
    if trace is None:
        trace = read_trace(path, workers=workers)
        key = key or _key(path)
        if _state(path) == before:
            any(_store(file, key, trace) for file in cache_files(path, key))
    return replace(trace, rank=rank) if trace.rank is None else trace


def cache_files(path: Path, key: str) -> tuple[Path, Path]:
    """Where the cache of a trace may be: beside it, else in the user's cache folder."""
    return path.with_name(path.name + _SUFFIX), _users_folder() / f"{key}{_SUFFIX}"


def _users_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp2prof"


def _may_have_cache(path: Path) -> bool:
    """Whether there is a cache to compare a file with: without one, a file that is no trace is refused at its
    first bytes, not after a checksum of all of them.
    """
    if path.with_name(path.name + _SUFFIX).exists():
        return True
    return any(_users_folder().glob(f"{path.stat().st_size:x}-*{_SUFFIX}"))


def _state(path: Path) -> tuple[int, int]:
    """Size and time of change: columns are kept only for a file that stayed as it was while it was read."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _key(path: Path) -> str:
    """Size and two checksums of the file's bytes, and a digest of the reader's code.

    A cryptographic hash would take as long as everything else a cached analysis does.
    """
    crc, adler, size = 0, 1, 0
    with path.open("rb") as stream:
        while block := stream.read(_HASHED_BYTES):
            crc, adler, size = isal_zlib.crc32(block, crc), isal_zlib.adler32(block, adler), size + len(block)
    return f"{size:x}-{crc:08x}{adler:08x}-{_reader_digest()}"


@lru_cache(maxsize=1)
def _reader_digest() -> str:
    """Digest of the source that makes a cache, so that nobody has to remember to raise a version number."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + Path(backends.__file__).read_bytes())
    for folder in (*readers.__path__, *tables.__path__):
        for source in sorted(Path(folder).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _store(file: Path, key: str, trace: Trace) -> bool:
    """Write a cache; whether that was possible."""
    arrays: _Arrays = {}
    for name in ("events", "collective_args", "labels", "shapes", "memory", "syncs"):
        arrays |= _pack(name, getattr(trace, name))
    checksum = 0
    for values in arrays.values():
        checksum = isal_zlib.crc32(values.data, checksum)
    head = _Head(
        key=key,
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device,
        process_groups=trace.process_groups,
        base_time_ns=trace.base_time_ns,
        threads=trace.threads,
        warnings=trace.warnings,
        columns=tuple((name, values.dtype.str, values.nbytes) for name, values in arrays.items()),
        checksum=checksum,
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished, unfinished.open("wb") as stream:
            stream.write(msgspec.json.encode(head) + b"\n")
            for values in arrays.values():
                stream.write(bytes(_padding(stream.tell())))
                stream.write(values.data)
    except OSError:
        return False
    return True


def _load(file: Path, key: str | None, source: str) -> Trace | None:
    """Read a cache; None if it is absent, for another key, or not usable."""
    try:
        with file.open("rb") as stream:
            head = msgspec.json.decode(stream.readline(), type=_Head)
            if head.key != key:
                return None
            arrays = _map_arrays(stream, head)
            return Trace(
                source=source,
                rank=head.rank,
                world_size=head.world_size,
                device=head.device,
                process_groups=head.process_groups,
                base_time_ns=head.base_time_ns,
                events=_unpack("events", EventTable, arrays),
                collective_args=_unpack("collective_args", CollectiveArgs, arrays),
                labels=_unpack("labels", LabelTable, arrays),
                shapes=_unpack("shapes", ShapeTable, arrays),
                memory=_unpack("memory", MemoryEventTable, arrays),
                threads=head.threads,
                warnings=head.warnings,
                syncs=_unpack("syncs", SyncTable, arrays),
            )
    except _UNUSABLE:
        return None


def _pack(name: str, table: Table) -> _Arrays:
    arrays: _Arrays = {}
    for column in (field.name for field in fields(table)):  # type: ignore[arg-type]
        values = getattr(table, column)
        if isinstance(values, Strings):
            arrays[f"{name}.{column}.values"] = _json_array(values.values)
            values = values.codes
        arrays[f"{name}.{column}"] = np.ascontiguousarray(values)
    return arrays


def _padding(position: int) -> int:
    """Bytes from a position to where an array may begin."""
    return -position % 8


def _map_arrays(stream: BinaryIO, head: _Head) -> _Arrays:
    """Map the arrays behind a head; raises ``ValueError`` if they are not what was written."""
    content = memoryview(mmap(stream.fileno(), 0, access=ACCESS_READ))
    position = stream.tell()
    arrays: _Arrays = {}
    checksum = 0
    for name, dtype, size in head.columns:
        position += _padding(position)
        part = content[position : position + size]
        checksum = isal_zlib.crc32(part, checksum)
        arrays[name] = np.frombuffer(part, dtype=dtype)
        position += size
    if checksum != head.checksum:
        raise ValueError("damaged")
    return arrays


def _unpack(name: str, table: type[_T], arrays: _Arrays) -> _T:
    columns: dict[str, Any] = {}
    for column in (field.name for field in fields(table)):  # type: ignore[arg-type]
        values = arrays[f"{name}.{column}"]
        if f"{name}.{column}.values" in arrays:
            text = msgspec.json.decode(arrays[f"{name}.{column}.values"].data, type=tuple[str, ...])
            columns[column] = Strings(values, text)
        else:
            columns[column] = values
    return table(**columns)


def _json_array(value: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(msgspec.json.encode(value), dtype=np.uint8)
